"""A manifest in which everything is known, for those who show manifests."""

from __future__ import annotations

import base64
import io

from PIL import Image

from convoy.models.bundle import (
    Accuracy,
    ClassAccuracy,
    Confusion,
    DatasetRecord,
    FileRecord,
    Interval,
    LatencyPoint,
    LatencyTable,
    Manifest,
    Mistake,
    Mistakes,
    NodeAudit,
    Provenance,
    Roofline,
    TradeOff,
    Variant,
)
from convoy.models.spec import ModelSpec, TensorSpec

DEVICE = "some-device / 2 threads"


def full_manifest(
    *, label: str = "cat", source: str = "torchvision:resnet18", reason: str = "because", classes: int = 3
) -> Manifest:
    """Of fp32, int8 and fp16; the strings stand in it where a user's own words would."""
    labels = (label, *(f"class {index}" for index in range(1, classes)))
    fp32 = Variant(
        *("fp32.onnx", "fp32", "cpu", True, reason, 1e-7),
        accuracy=_accuracy(labels, 0.934, 0.0, 0.0),
        latency=_table(17.4, None),
    )
    int8 = Variant(
        *("int8-cpu.onnx", "int8", "cpu", True, reason, 1e-2),
        accuracy=_accuracy(labels, 0.9281, 0.59, 0.97),
        latency=_table(7.8, Interval(2.35, 2.25, 2.44)),
        calibration_method="entropy",
        audit=NodeAudit({"int8": 48, "fp32": 12}, {"first.layer": "1.4 points without it"}),
        trade_offs=tuple(
            TradeOff(kept, _accuracy(labels, 0.934 - loss / 100, loss, loss + 0.4), 240.0 + kept)
            for kept, loss in ((0, 3.4), (1, 1.3), (2, 0.59))
        ),
    )
    fp16 = Variant(
        *("fp16.onnx", "fp16", "cuda", True, reason, 1e-3),
        accuracy=_accuracy(labels, 0.9332, 0.08, 0.3),
        latency=None,
        audit=NodeAudit({"fp16": 60}, {}),
    )
    data = DatasetRecord("photos", 1200, "cd" * 32)
    return Manifest(
        schema_version=1,
        spec=ModelSpec(
            *("resnet", (TensorSpec("images", "UINT8", (224, 224, 3)),), (TensorSpec("logits", "FP32", (3,)),)),
            *(32, None, "softmax", labels),
        ),
        variants=(fp32, int8, fp16),
        files={name: FileRecord("ab" * 32, 44_703_968) for name in ("fp32.onnx", "int8-cpu.onnx", "fp16.onnx")},
        provenance=Provenance(source, "ef" * 32, data, data, {"torch": "2.15.0"}, "2026-11-21T01:37:32.123456+00:00"),
        roofline=Roofline(DEVICE, 3.63, 15.1, 44.7, 509.0, 96.0, 1998.0),
        mistakes=mistakes_among(labels),
    )


def mistakes_among(labels: tuple[str, ...], *, pictures: int = 3) -> Mistakes:
    """Of every class 26 images of 400 are answered as the next one, the first class's surely."""
    confusions = tuple(Confusion(one, labels[(index + 1) % len(labels)], 26) for index, one in enumerate(labels))
    kept = confusions[:380]
    pixels = io.BytesIO()
    Image.new("RGB", (4, 4), "red").save(pixels, "PNG")
    picture = base64.b64encode(pixels.getvalue()).decode()
    surest = tuple(Mistake(one.label, one.answered, 0.99, picture) for one in kept[:pictures])
    return Mistakes(26 * len(labels), len(confusions), kept, surest)


def _accuracy(labels: tuple[str, ...], top1: float, loss: float, bound: float | None) -> Accuracy:
    per_class = tuple(ClassAccuracy(label, 400, top1) for label in labels)
    return Accuracy(1200, top1, 0.99, loss, top5=0.99, loss_bound_points=bound, is_proved=True, per_class=per_class)


def _table(per_sample_ms: float, speedup: Interval | None) -> LatencyTable:
    medians_ms = [(size, 0.2 + per_sample_ms * size) for size in (1, 2, 4, 8, 16, 32)]
    points = tuple(LatencyPoint(size, ms, 0.9 * ms, 1.2 * ms) for size, ms in medians_ms)
    return LatencyTable(DEVICE, points, 0.2, per_sample_ms, speedup)
