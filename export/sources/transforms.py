"""A user's torchvision transform, v1 or v2, as the preparation of images.

Reads the steps of validation: resize, centre crop, grey, scaling to 0..1, normalisation. Unknown steps are refused,
because a missing step costs accuracy without an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from convoy.export.sources.torch_job import TransformRecipe
from convoy.export.sources.user_code import Call, load_module, parse_call
from convoy.models.errors import JobError
from convoy.models.torchvision_preset import known_interpolation, preset_image

# Steps that change the container of the pixels and not their values.
_CONVERSIONS = frozenset({"Identity", "RGB", "ToPILImage", "ToPureTensor", "ToTVTensor"})
_SCALING = frozenset({"MaybeToTensor", "ToTensor"})
_TO_TENSOR = _SCALING | {"PILToTensor", "ToImage"}
_ONCE = frozenset({"CenterCrop", "Grayscale", "Normalize", "Resize"})
_PRESET = "ImageClassification"
_LISTS = ("Sequential", "ModuleList")


def read_transform(file: Path, text: str) -> TransformRecipe:
    """The preparation `text` in a user's file: a transform, or a function that returns one. Raises JobError."""
    shown = f"{file.name}:{text}"
    return recipe_of(_load(file, parse_call(text), shown), shown)


def recipe_of(transform: Any, shown: str) -> TransformRecipe:
    """The preparation of a transform, called `shown` in errors. Raises JobError."""
    recipe = TransformRecipe()
    is_scaled = is_tensor = False
    seen: set[str] = set()
    for step in _steps(transform):
        kind = type(step).__name__
        if kind in seen & _ONCE:
            raise JobError(f"{shown}: {kind} occurs twice; use it once")
        seen.add(kind)
        try:
            if kind == _PRESET:
                recipe, is_scaled = _of_preset(step), True
            elif kind == "Resize":
                recipe = _resized(recipe, step, is_tensor=is_tensor)
            elif kind == "CenterCrop":
                recipe = replace(recipe, crop=_pair(step.size))
            elif kind == "Grayscale":
                recipe = _grey(recipe, step)
            elif kind == "Normalize":
                recipe = replace(recipe, mean=tuple(map(float, step.mean)), std=tuple(map(float, step.std)))
            elif kind in _TO_TENSOR:
                is_tensor = True
                is_scaled = is_scaled or kind in _SCALING
            elif kind in ("ConvertImageDtype", "ToDtype"):
                # In a container other than a float tensor, the values stay in 0..255.
                is_scaled = is_scaled or (getattr(step, "scale", True) and _is_floating(step.dtype))
            elif kind not in _CONVERSIONS:
                raise JobError(_unknown(kind))
        except (AttributeError, TypeError, ValueError) as error:
            raise JobError(f"{shown}: {kind} cannot be read ({error}); write --preprocess as a JSON file") from error
        except JobError as error:
            raise JobError(f"{shown}: {error}") from error
    if recipe.mean is None:
        recipe = replace(recipe, mean=(0.0,), std=(1.0,))
    return recipe if is_scaled else _in_0_to_1(recipe)


def _grey(recipe: TransformRecipe, step: Any) -> TransformRecipe:
    if step.num_output_channels != 1:
        raise JobError("Grayscale with num_output_channels=3 is not supported; use 1, or leave it out")
    return replace(recipe, channels=1)


def _is_floating(dtype: Any) -> bool:
    if isinstance(dtype, dict):
        raise JobError("ToDtype with a dict is not supported; pass one dtype")
    return str(dtype).startswith(("torch.float", "torch.bfloat"))


def _unknown(kind: str) -> str:
    if kind.startswith(("Random", "AutoAugment", "AugMix", "TrivialAugment", "ColorJitter")):
        return f"{kind} is a training step; pass the validation transform"
    return f"{kind} is not supported; use Resize, CenterCrop, Grayscale, ToTensor and Normalize, or a JSON file instead"


def _load(file: Path, call: Call, shown: str) -> Any:
    module = load_module(file)
    if not hasattr(module, call.name):
        raise JobError(f"{file.name} has no {call.name!r}; pass --preprocess {file.name}:TRANSFORM")
    found = getattr(module, call.name)
    is_list = type(found).__name__ in _LISTS
    is_transform = is_list or hasattr(found, "transforms") or type(found).__module__.startswith("torchvision.")
    if is_transform or not callable(found):
        return found
    try:
        return found(*call.arguments, **call.options)
    except Exception as error:  # it is the user's code
        raise JobError(f"{shown} failed: {type(error).__name__}: {error}") from error


def _steps(transform: Any) -> Iterator[Any]:
    """The steps in order, including those of an inner `Compose` or `nn.Sequential`."""
    inner = getattr(transform, "transforms", None)
    if inner is None and type(transform).__name__ in _LISTS:
        inner = list(transform)
    if inner is None:
        yield transform
        return
    for step in inner:
        yield from _steps(step)


def _resized(recipe: TransformRecipe, step: Any, *, is_tensor: bool) -> TransformRecipe:
    if recipe.crop is not None:
        raise JobError("Resize after CenterCrop is not supported; write --preprocess as a JSON file")
    if getattr(step, "max_size", None) is not None:
        raise JobError("Resize with max_size gives images of many sizes; add CenterCrop or Resize((height, width))")
    interpolation = known_interpolation(getattr(step.interpolation, "value", step.interpolation))
    size = (step.size,) if isinstance(step.size, int) else tuple(step.size)
    # Pillow always antialiases when it scales down; only tensors can be scaled without.
    recipe = replace(recipe, interpolation=interpolation, antialias=not is_tensor or step.antialias is True)
    return replace(recipe, resize_px=size[0]) if len(size) == 1 else replace(recipe, exact=(size[0], size[1]))


def _of_preset(step: Any) -> TransformRecipe:
    """What torchvision publishes with its weights: `weights.transforms()`."""
    image = preset_image(step)
    return TransformRecipe(
        mean=image.mean,
        std=image.std,
        resize_px=image.resize_px,
        crop=(image.height, image.width),
        interpolation=image.interpolation,
        antialias=image.antialias,
        channels=image.channels,
    )


def _pair(size: Any) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    return int(size[0]), int(size[-1])


def _in_0_to_1(recipe: TransformRecipe) -> TransformRecipe:
    """For steps that leave pixels in 0..255, the same mean and standard deviation for values in 0..1."""
    mean, std = recipe.mean or (0.0,), recipe.std or (1.0,)
    return replace(recipe, mean=tuple(one / 255 for one in mean), std=tuple(one / 255 for one in std))
