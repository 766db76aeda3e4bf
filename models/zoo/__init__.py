"""The CNNs that ship with Convoy, by name.

Knows their names and inputs without importing torch; only `create` builds a network and imports torch. A new network is
one new file and one new row in `_ZOO`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from convoy.models.errors import UsageError
from convoy.models.tasks import DetectionOutputs, Task

if TYPE_CHECKING:
    from torch import nn

    from convoy.models.spec import Activation


@dataclass(frozen=True, slots=True)
class ZooEntry:
    """The builder (`module:function`, called with the number of classes) and the input in pixels.

    `activation` None means that the graph tells; `detection` says how a detector's outputs are read.
    """

    builder: str
    channels: Literal[1, 3]
    height: int
    width: int
    task: Task = "classify"
    activation: Activation | None = None
    detection: DetectionOutputs | None = None


def _row(module: str, name: str) -> ZooEntry:
    return ZooEntry(f"convoy.models.zoo.{module}:{name}", channels=3, height=32, width=32)


# In the form that detectors of the YOLO family give since YOLOv8.
_SHAPES_READ = DetectionOutputs(boxes="detections", layout="yolo_v8", threshold=0.25, iou_threshold=0.5)

_ZOO = {
    "simple_cnn": _row("simple_cnn", "simple_cnn"),
    "resnet18": _row("small_images", "resnet18"),
    "mobilenet_v2": _row("small_images", "mobilenet_v2"),
    "mobilenet_v3": _row("small_images", "mobilenet_v3"),
    "efficientnet_b0": _row("small_images", "efficientnet_b0"),
    "regnet": _row("small_images", "regnet"),
    "convnext": _row("small_images", "convnext"),
    "densenet": _row("small_images", "densenet"),
    "repvgg": _row("repvgg", "repvgg"),
    "ghostnet": _row("ghostnet", "ghostnet"),
    "wide_range_silu": _row("wide_range", "wide_range_silu"),
    "wide_range_hardswish": _row("wide_range", "wide_range_hardswish"),
    "shapes_detector": ZooEntry(
        "convoy.models.zoo.shapes_detector:shapes_detector", 3, 160, 160, "detect", "none", _SHAPES_READ
    ),
    "shapes_unet": ZooEntry("convoy.models.zoo.shapes_unet:shapes_unet", 3, 160, 160, "segment", "softmax"),
}


def names() -> tuple[str, ...]:
    """The names that `create` knows."""
    return tuple(_ZOO)


def entry(name: str) -> ZooEntry:
    """The row of a network. Raises UsageError for an unknown name."""
    if name not in _ZOO:
        raise UsageError(
            f"the zoo has no network {name!r}; choose one of: {', '.join(_ZOO)}; for torchvision use torchvision:NAME"
        )
    return _ZOO[name]


def create(name: str, num_classes: int) -> nn.Module:
    """A freshly initialised network: float32 [N, channels, height, width] -> float32 logits [N, num_classes].

    Networks with another task have other outputs, which their class describes. Raises UsageError for an unknown name or
    fewer than 2 classes.
    """
    row = entry(name)
    if num_classes < 2:
        raise UsageError(f"a classifier needs at least 2 classes, got {num_classes}")
    module, function = row.builder.split(":")
    return cast("nn.Module", getattr(importlib.import_module(module), function)(num_classes))
