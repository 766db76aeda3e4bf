"""The image preparations of timm and transformers, as `ImageSpec`.

Refuses what `ImageSpec` cannot express. Imports neither library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from convoy.models.errors import JobError
from convoy.models.spec import ImageSpec, Interpolation
from convoy.models.torchvision_preset import known_interpolation

# Pillow's numbers, as transformers writes them.
_RESAMPLE: dict[int, Interpolation] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
# Processors that resize, crop, rescale and normalise in this order; others have other steps.
_PROCESSORS = (
    "ViTImage",
    "ViTFeature",
    "CLIPImage",
    "CLIPFeature",
    "SiglipImage",
    "BitImage",
    "ConvNextImage",
    "ConvNextFeature",
)
_OTHER_STEPS = ("do_flip_channel_order", "include_top", "rescale_offset")
# From this size on, ConvNeXt's processor scales directly to the input's size.
_CONVNEXT_EXACT_PX = 384


def is_timm(recipe: Mapping[str, Any]) -> bool:
    """Whether it is timm's `config.json`, or the `pretrained_cfg` in it."""
    return "input_size" in recipe or "pretrained_cfg" in recipe


def is_transformers(recipe: Mapping[str, Any]) -> bool:
    """Whether it is transformers' `preprocessor_config.json`."""
    return any(key in recipe for key in ("image_processor_type", "feature_extractor_type", "do_resize", "image_mean"))


def timm_image(recipe: Mapping[str, Any]) -> ImageSpec:
    """A `pretrained_cfg` as `timm.data.create_transform` reads it for evaluation.

    Crop mode "center" resizes the shorter side to floor(size / crop_pct); "squash" resizes both sides, which is an
    exact resize if nothing is cropped afterwards. Raises JobError for what `ImageSpec` cannot express.
    """
    recipe = recipe.get("pretrained_cfg") or recipe
    channels, height, width = recipe["input_size"]
    share, mode = recipe.get("crop_pct") or 0.875, recipe.get("crop_mode") or "center"
    if height != width or channels not in (1, 3):
        raise JobError(f"timm's input {channels}x{height}x{width} is not square with 1 or 3 channels")
    if mode != "center" and not (mode == "squash" and share == 1):
        raise JobError(f"timm's crop mode {mode!r} at {share:g} is not supported")
    return ImageSpec(
        height=height,
        width=width,
        channels=channels,
        resize_mode="exact" if mode == "squash" else "shorter_side",
        resize_px=math.floor(height / share),
        interpolation=known_interpolation(recipe.get("interpolation") or "bilinear"),
        antialias=True,  # it resizes PIL images, which are always antialiased
        mean=tuple(recipe["mean"]),
        std=tuple(recipe["std"]),
        front="uint8_nhwc",
    )


def transformers_image(recipe: Mapping[str, Any]) -> ImageSpec:
    """A `preprocessor_config.json` of an image classifier. Raises JobError for what `ImageSpec` cannot express."""
    kind = str(recipe.get("image_processor_type") or recipe.get("feature_extractor_type") or "")
    unknown = [f"{step}: true" for step in _OTHER_STEPS if recipe.get(step)]
    if not kind.startswith(_PROCESSORS):
        unknown.append(f"the processor {kind or 'without a type'}")
    if "crop_pct" in recipe and not kind.startswith("ConvNext"):
        unknown.append("crop_pct")
    if recipe.get("resample", 2) not in _RESAMPLE:
        unknown.append(f"resample: {recipe['resample']}")
    if unknown:
        raise JobError(f"{', '.join(unknown)} is not supported; write the preparation as a JSON file of Convoy's")
    size = recipe.get("size", 224)
    crop = _pair(recipe.get("crop_size", size)) if recipe.get("do_center_crop", False) else None
    shorter, exact = _resize_of(size, is_cropped=crop is not None)
    if kind.startswith("ConvNext"):
        side = shorter or _pair(size)[0]
        shorter, exact, crop = None, (side, side), None
        if side < _CONVNEXT_EXACT_PX:
            shorter, exact, crop = int(side / (recipe.get("crop_pct") or 224 / 256)), None, (side, side)
    if not recipe.get("do_resize", True):
        raise JobError("do_resize is false, so images have many sizes; resize them to one size")
    if crop is not None and exact is not None and crop != exact:
        raise JobError(f"size {size} followed by crop_size {crop} is not supported")
    input_size = crop or exact
    if input_size is None:
        raise JobError(f"size {size} without do_center_crop gives images of many sizes")
    scale = float(recipe.get("rescale_factor", 1 / 255)) * 255 if recipe.get("do_rescale", True) else 255.0
    mean, std = [0.0] * 3, [1.0] * 3
    if recipe.get("do_normalize", True):
        mean, std = recipe.get("image_mean", [0.5] * 3), recipe.get("image_std", [0.5] * 3)
    if len(mean) not in (1, 3):
        raise JobError(f"image_mean has {len(mean)} values; it must have 1 or 3")
    return ImageSpec(
        height=input_size[0],
        width=input_size[1],
        channels=3 if len(mean) == 3 else 1,
        resize_mode="exact" if shorter is None else "shorter_side",
        resize_px=shorter or max(input_size),
        interpolation=_RESAMPLE[recipe.get("resample", 2)],
        antialias=True,
        # The processor computes (value * scale - mean) / std of values in 0..1.
        mean=tuple(float(one) / scale for one in mean),
        std=tuple(float(one) / scale for one in std),
        front="uint8_nhwc",
    )


def _resize_of(size: Any, *, is_cropped: bool) -> tuple[int | None, tuple[int, int] | None]:
    """The size of the shorter side, or of the whole image. A single number is the former only before a crop."""
    is_shorter = "shortest_edge" in size if isinstance(size, Mapping) else is_cropped and isinstance(size, int)
    return (_pair(size)[0], None) if is_shorter else (None, _pair(size))


def _pair(size: Any) -> tuple[int, int]:
    """Height and width."""
    if isinstance(size, Mapping):
        if "height" not in size:
            return int(size["shortest_edge"]), int(size["shortest_edge"])
        return int(size["height"]), int(size["width"])
    return (int(size[0]), int(size[-1])) if isinstance(size, list | tuple) else (int(size), int(size))
