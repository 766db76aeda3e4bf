"""Exports that look only for a moment at how fast the files are; weights for them, and what the files answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from convoy.app.engines.base import run_arrays
from convoy.app.engines.measure import Pace
from convoy.app.engines.onnxruntime import OnnxRuntimeCpuEngine
from convoy.export.command import export_bundle
from convoy.export.options import ExportOptions
from convoy.models.bundle import Bundle, open_bundle
from convoy.models.checkpoint import CheckpointHeader, PartRecord, write_checkpoint
from convoy.models.datasets import load
from tests.support.stores import DEMO


def measure_little(patches: pytest.MonkeyPatch) -> None:
    pace = Pace(budget_s=0, limit_s=10, warm_up=1, fewest=2, most=2)
    patches.setattr("convoy.export.profiling.profile.PACE", pace)
    patches.setattr("convoy.export.profiling.roofline._BUDGET_S", 0)


def write_digits_checkpoint(path: Path) -> Path:
    """The weights of the bundled digits, as `convoy train` would have left them."""
    import onnx

    bundle, data = open_bundle(DEMO), load("digits")
    spec, accuracy = bundle.manifest.spec, bundle.manifest.variants[0].accuracy
    assert spec.image is not None
    assert accuracy is not None
    weights = {
        tensor.name.removeprefix("network."): onnx.numpy_helper.to_array(tensor)
        for tensor in onnx.load(bundle.path("fp32.onnx")).graph.initializer
        if tensor.name.startswith("network.")
    }
    split = {part: PartRecord(len(samples), data.part_sha256(part)) for part, samples in data.parts.items()}
    header = CheckpointHeader("simple_cnn", spec.labels, spec.image, "digits", split, "0", 0, accuracy.top1)
    write_checkpoint(path, weights, header)
    return path


def export_network(source: str, folder: Path, **changes: object) -> Bundle:
    """What an export makes of somebody's network; its store is in `folder`."""
    given = {"preprocess": "unit", "input": "3x16x16", "max_batch": 4, "random_weights": True}
    options = ExportOptions(source, "net", store=folder / "store", **(given | changes))  # type: ignore[arg-type]
    return open_bundle(export_bundle(options))


def logits_of(bundle: Bundle, images: np.ndarray, file: str = "fp32.onnx") -> np.ndarray:
    """What ONNX Runtime makes of one of its files, by itself."""
    spec = bundle.manifest.spec
    engine = OnnxRuntimeCpuEngine(
        bundle.path(file),
        inputs=spec.inputs,
        outputs=spec.outputs,
        max_batch_size=len(images),
        precision=bundle.manifest.variant(file).precision,
        threads=1,
    )
    return run_arrays(engine, {"images": images})["logits"]
