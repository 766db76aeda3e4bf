"""Convert torchvision's evaluation presets to our preprocessing, without importing torchvision."""

from __future__ import annotations

from typing import Any, cast, get_args

from convoy.models.errors import JobError
from convoy.models.spec import ImageSpec, Interpolation


def preset_image(preset: Any) -> ImageSpec:
    """The preset `ImageClassification`: resize the shorter side, crop the centre, scale, normalise. Raises JobError."""
    return ImageSpec(
        height=preset.crop_size[0],
        width=preset.crop_size[-1],
        channels=3,
        resize_mode="shorter_side",
        resize_px=preset.resize_size[0],
        interpolation=known_interpolation(preset.interpolation.value),
        antialias=bool(preset.antialias),
        mean=tuple(preset.mean),
        std=tuple(preset.std),
        front="uint8_nhwc",
    )


def segmentation_image(preset: Any) -> ImageSpec:
    """The preset `SemanticSegmentation`, which scales the shorter side and keeps the aspect ratio. A graph takes
    pictures of one size, so here it scales to a square. Raises JobError.
    """
    size = preset.resize_size[0]
    return ImageSpec(
        height=size,
        width=size,
        channels=3,
        resize_mode="exact",
        resize_px=size,
        interpolation=known_interpolation(preset.interpolation.value),
        antialias=bool(preset.antialias),
        mean=tuple(preset.mean),
        std=tuple(preset.std),
        front="uint8_nhwc",
    )


def known_interpolation(name: str) -> Interpolation:
    """Return the name. Raises JobError for one that Convoy does not have."""
    if name not in get_args(Interpolation):
        raise JobError(f"unknown interpolation {name!r}")
    return cast("Interpolation", name)
