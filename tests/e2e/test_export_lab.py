"""MobileNetV2, trained on real images, through the whole laboratory: every precision, gated.

It is a hard case. Its residual streams are linear, so that training may leave their channels at any
scale; here they are given scales over three decades without changing what the network computes, the imbalance
that breaks INT8 in published networks (Nagel et al., Data-Free Quantization, 2019, section 3). Quantised as it is,
it answers at random; the laboratory must balance it again, and not buy accuracy with layers in float.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from convoy.export.cache import StepCache
from convoy.export.command import export_bundle
from convoy.export.data import ImageSet
from convoy.export.options import ExportOptions
from convoy.export.progress import IGNORED, SILENT
from convoy.export.proof.verify import measure_accuracy
from convoy.export.variants.calibrate import Calibration, Conversion, collect
from convoy.export.variants.onnx_graph import prepare
from convoy.export.variants.precision import INT8_CPU, REFERENCE
from convoy.export.variants.quantize import quantize_for_cpu
from convoy.export.variants.variant import opened
from convoy.models.bundle import Bundle, Variant, open_bundle
from convoy.models.datasets import load
from convoy.models.train import train
from convoy.models.train_options import TrainOptions
from tests.support.pair_rules import violations
from tests.support.torch_threads import one_torch_thread

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

Weights = dict[str, np.ndarray]
# A processor with BF16 adds one of its own.
FILES = ("fp16.onnx", "int8-cpu.onnx", "int8-trt.onnx", "fp8.onnx")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


def trained(folder: Path, arch: str, epochs: int) -> Path:
    out = folder / f"{arch}.safetensors"
    assert train(TrainOptions("digits", out, arch=arch, epochs=epochs)).header.test_accuracy > 0.9
    return out


def exported(folder: Path, arch: str, weights: Path) -> Bundle:
    options = ExportOptions(
        f"zoo:{arch}",
        arch,
        store=folder / "store",
        weights=weights,
        calibrate="digits",
        evaluate="digits",
        max_batch=8,
    )
    return open_bundle(export_bundle(options, SILENT, StepCache(folder / "cache")))


def unbalance(weights: Weights, decades: float = 3.0) -> Weights:
    """MobileNetV2 with the channels of each linear stream scaled, and scaled back by whoever reads the stream."""
    generator = np.random.default_rng(0)
    scaled = {name: array.copy() for name, array in weights.items()}
    blocks = sorted({int(name.split(".")[1]) for name in weights if name.startswith("features.")})
    stream: np.ndarray | None = None
    for block in blocks[1:-1]:
        first, projection = f"features.{block}.conv.0.0.weight", _projection(weights, block)
        width = len(scaled[f"{projection}.weight"])
        is_residual = stream is not None and len(stream) == width == scaled[first].shape[1]
        if stream is not None:
            scaled[first] /= stream[None, :, None, None]
        if stream is None or not is_residual:
            stream = (10 ** generator.uniform(-decades / 2, decades / 2, width)).astype(np.float32)
        for part in ("weight", "bias"):
            scaled[f"{projection}.{part}"] *= stream
    assert stream is not None
    scaled[f"features.{blocks[-1]}.0.weight"] /= stream[None, :, None, None]
    return scaled


def _projection(weights: Weights, block: int) -> str:
    """The batch normalisation behind a block's last convolution, the one without an activation."""
    prefix = f"features.{block}.conv."
    last = max(int(name.split(".")[3]) for name in weights if name.startswith(prefix))
    return f"{prefix}{last}"


def printed(bundle: Bundle) -> None:
    for variant in bundle.manifest.variants:
        print(f"{variant.file}: {variant.reason}; {variant.calibration_method}; {variant.audit}")
        for step in variant.trade_offs:
            print(f"  {step.layers_kept} kept: {step.accuracy.loss_points:.2f} points, {step.median_ms:.2f} ms")


def within_budget(variant: Variant) -> bool:
    assert variant.accuracy is not None
    assert variant.accuracy.loss_bound_points is not None
    assert variant.accuracy.loss_bound_points > variant.accuracy.loss_points
    return variant.accuracy.loss_points <= 1.0


def test_a_mobilenet_that_plain_int8_breaks_is_brought_back(tmp_path):
    checkpoint = trained(tmp_path, "mobilenet_v2", epochs=6)
    with safe_open(checkpoint, "numpy") as file:
        weights, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    save_file(unbalance(weights), tmp_path / "unbalanced.safetensors", metadata)
    bundle = exported(tmp_path, "mobilenet_v2", tmp_path / "unbalanced.safetensors")
    printed(bundle)
    plain = plain_loss_points(bundle, tmp_path / "plain")
    print(f"plain min-max: {plain:.2f} points lost")
    assert plain > 5
    fp16, *int8, fp8 = map(bundle.manifest.variant, FILES)
    assert all(map(within_budget, (fp16, fp8)))
    assert hurting(fp8) == []
    for variant in int8:
        assert within_budget(variant)
        assert variant.audit is not None
        # Balanced channels cost no layer; only a doubtful image or two may keep a few.
        assert len(hurting(variant)) <= 4
        assert variant.audit.by_precision["int8"] >= 45
        assert variant.trade_offs[0].layers_kept == 0
        assert variant.trade_offs[0].accuracy.loss_points < plain / 10
    cpu, trt = int8
    assert cpu.audit is not None
    assert cpu.audit.by_precision["fp32"] <= 10
    assert trt.audit is not None
    assert violations(onnx.load(bundle.path(trt.file)).graph, trt.audit.kept) == []


def hurting(variant: Variant) -> list[str]:
    """The layers kept in higher precision since INT8 hurt them, not by rule."""
    assert variant.audit is not None
    return [name for name, reason in variant.audit.kept.items() if reason.startswith("alone moves the answers by")]


def plain_loss_points(bundle: Bundle, folder: Path) -> float:
    """What min-max INT8 of every layer loses on the same test images."""
    spec = bundle.manifest.spec
    assert spec.image is not None
    data = load("digits").in_order_of(spec.labels)
    parts = {
        part: ImageSet("digits", tuple(data.part(part)), spec.image, spec.labels) for part in ("calibration", "test")
    }
    folder.mkdir()
    (folder / REFERENCE.file).write_bytes(bundle.path(REFERENCE.file).read_bytes())
    graph = prepare(folder / REFERENCE.file, folder / "prepared.onnx")
    ranges = collect(graph, parts["calibration"].chunks(IGNORED, 32), ["minmax"])
    quantize_for_cpu(Conversion(Calibration(graph, ranges)), folder / INT8_CPU.file)
    with opened(spec, [REFERENCE, INT8_CPU], folder) as candidates:
        _, score = measure_accuracy(candidates, parts["test"], SILENT)
    assert score.accuracy is not None
    return score.accuracy.loss_points
