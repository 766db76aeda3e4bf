"""What the user says of single steps of the preprocessing: `--mean --std --resize --crop --interpolation`.

Knows how they change a recipe, or are one where they leave nothing open. Knows nothing of where recipes come from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, cast, get_args

from convoy.models.errors import BundleError, UsageError
from convoy.models.spec import Front, ImageSpec, Interpolation


class Side(NamedTuple):
    """Height and width in pixels."""

    height: int
    width: int


class ImageChanges(NamedTuple):
    """None is what was not said. `typed` are the options as they were written.

    `mean` and `std` have a value per channel, or one for all. `resize_px` is the shorter side before the crop,
    `exact` what images are scaled to straight; at most one of the two is given.
    """

    typed: str = ""
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    resize_px: int | None = None
    exact: Side | None = None
    crop: Side | None = None
    interpolation: Interpolation | None = None


NOTHING_CHANGED = ImageChanges()


def parse_changes(
    mean: str | None, std: str | None, resize: str | None, crop: str | None, interpolation: str | None
) -> ImageChanges:
    """Raises UsageError."""
    given = {"--mean": mean, "--std": std, "--resize": resize, "--crop": crop, "--interpolation": interpolation}
    typed = " ".join(f"{flag} {text}" for flag, text in given.items() if text is not None)
    if interpolation is not None and interpolation not in get_args(Interpolation):
        raise UsageError(
            f"--interpolation {interpolation!r} is not known; use {', '.join(map(str, get_args(Interpolation)))}"
        )
    resized = _side("--resize", resize) if resize is not None else None
    is_exact = resize is not None and "x" in resize.lower()
    cut = _side("--crop", crop) if crop is not None else None
    if is_exact and cut not in (None, resized):
        raise UsageError(f"--resize {resize} leaves nothing to --crop; pass --resize N for the shorter side")
    return ImageChanges(
        typed,
        _values("--mean", mean) if mean is not None else None,
        _values("--std", std) if std is not None else None,
        resized.height if resized and not is_exact else None,
        resized if is_exact else None,
        cut,
        cast(Interpolation | None, interpolation),
    )


def changed(image: ImageSpec, changes: ImageChanges) -> ImageSpec:
    """The recipe with what the user says. Raises UsageError where that does not fit."""
    size = changes.exact or changes.crop or Side(image.height, image.width)
    mode, resize_px = image.resize_mode, image.resize_px
    if changes.exact is not None:
        mode, resize_px = "exact", max(size)
    elif changes.resize_px is not None:
        mode, resize_px = "shorter_side", changes.resize_px
    elif mode == "exact" and changes.crop not in (None, (image.height, image.width)):
        raise UsageError(
            f"--crop cuts nothing, for images are scaled straight to {image.height}x{image.width}; pass --resize, too"
        )
    try:
        return replace(
            image,
            height=size.height,
            width=size.width,
            resize_mode=mode,
            resize_px=resize_px,
            mean=_per_channel(changes.mean or image.mean, image.channels),
            std=_per_channel(changes.std or image.std, image.channels),
            interpolation=changes.interpolation or image.interpolation,
        )
    except BundleError as error:
        raise UsageError(f"{changes.typed} does not fit the preprocessing: {error}") from error


def whole(
    changes: ImageChanges,
    size: Side | None,
    channels: int | None,
    front: Front,
    find_channels: Callable[[Side], int] | None = None,
) -> ImageSpec:
    """A recipe of the user's words alone, `size` and `channels` being the network's input where that is known.

    One value for `--mean` and one for `--std` may be those of grey or of each colour; `find_channels` tells the
    network's own for images of a size. Raises UsageError, which names what is missing.
    """
    cut = changes.exact or changes.crop or size
    said = {
        "--mean": changes.mean,
        "--std": changes.std,
        "--resize": changes.exact or changes.resize_px,
        "--crop": cut,
        "--interpolation": changes.interpolation,
    }
    missing = [flag for flag, value in said.items() if value is None]
    if missing or cut is None:
        raise UsageError(
            f"how images are prepared is said in part only; pass {', '.join(missing)}, too, or --preprocess"
        )
    count = channels or max(len(changes.mean or ()), len(changes.std or ()))
    if channels is None and count == 1 and find_channels is not None:
        count = find_channels(cut)
    if count not in (1, 3):
        raise UsageError(f"--mean and --std have {count} values; pass 1 or 3, one per channel")
    plain = ImageSpec.plain(cut.height, cut.width, 3 if count == 3 else 1, front)
    return changed(replace(plain, antialias=True), changes)


def _values(flag: str, text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    is_std = flag == "--std"
    if len(values) not in (1, 3) or not all(abs(value) < float("inf") for value in values):
        raise UsageError(f"{flag} {text!r} is not one number per channel; write {flag} 0.5,0.5,0.5, or one for all")
    if is_std and min(values) <= 0:
        raise UsageError(f"--std {text} must be above 0")
    if max(values) > 1:
        raise UsageError(f"{flag} {text} must be of pixels scaled to 0..1; divide it by 255")
    return values


def _side(flag: str, text: str) -> Side:
    parts = text.lower().split("x")
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts) or len(parts) > 2:
        raise UsageError(f"{flag} {text!r} is not a size in pixels; write {flag} 224, or height x width, as in 224x192")
    return Side(int(parts[0]), int(parts[-1]))


def _per_channel(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    return values * channels if len(values) == 1 else values
