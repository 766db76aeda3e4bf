"""Exports that are not about how fast the files are, and so look at that for a moment only; and weights for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from convoy.app.engines.measure import Pace
from convoy.models.bundle import open_bundle
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
