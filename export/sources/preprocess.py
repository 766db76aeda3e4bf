"""How images become the network's input: `--preprocess`, otherwise what the checkpoint says, otherwise an error.

`--mean --std --resize --crop --interpolation` change single steps of a preparation, or are one if together they leave
nothing open. Nothing is guessed: a wrong mean costs accuracy without an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, cast, get_args

from convoy.app.engines.dimensions import Size
from convoy.export.options import MissingOption
from convoy.export.sources.preprocess_file import read_preprocess_file
from convoy.export.sources.torch_job import Inquiry, TransformRecipe
from convoy.export.sources.torch_process import ask
from convoy.export.sources.user_code import parse_call
from convoy.models.errors import BundleError, UsageError
from convoy.models.spec import ChannelOrder, Front, ImageSpec, Interpolation, PadPosition

_INPUT = re.compile(r"([13])x(?:([1-9]\d{0,5})(\??)x([1-9]\d{0,5})\3|\?x\?)")
_FRONTS: dict[str, Front] = {"uint8": "uint8_nhwc", "none": "float32_nchw"}


@dataclass(frozen=True, slots=True)
class InputSize:
    channels: Literal[1, 3]
    height: int
    width: int

    @staticmethod
    def of(image: ImageSpec) -> InputSize:
        """The size that a preparation gives."""
        return InputSize(image.channels, image.height, image.width)

    def __str__(self) -> str:
        return f"{self.channels}x{self.height}x{self.width}"


@dataclass(frozen=True, slots=True)
class AskedInput:
    """`--input`. `is_free` means that other heights and widths than `size` are taken as well; None leaves it open."""

    channels: Literal[1, 3]
    size: Size | None
    is_free: bool

    @property
    def of_pictures(self) -> InputSize | None:
        """The size to which pictures are cropped, if it is given."""
        return InputSize(self.channels, self.size.height, self.size.width) if self.size else None


def is_of_tensors(text: str) -> bool:
    """Whether it is not the form of an image, channels x height x width without a name."""
    return "=" in text or ":" in text or text.count("x") != 2


def parse_input(text: str) -> AskedInput:
    """`3x224x224` as channels, height, width; `3x224?x224?` and `3x?x?` leave two dynamic. Raises UsageError."""
    found = _INPUT.fullmatch(text.lower())
    if found is None:
        raise UsageError(
            f"--input {text!r} is not channels x height x width; write 3x224x224, with 1 or 3 channels, "
            "or 3x224?x224? where other heights and widths are to be served, too"
        )
    channels: Literal[1, 3] = 3 if found[1] == "3" else 1
    size = Size(int(found[2]), int(found[4])) if found[2] else None
    return AskedInput(channels, size, is_free=size is None or bool(found[3]))


def parse_front(text: str) -> Front:
    """`uint8` or `none`. Raises UsageError."""
    if text not in _FRONTS:
        raise UsageError(f"--front {text!r} is unknown; use {' or '.join(_FRONTS)}")
    return _FRONTS[text]


class ImageChanges(NamedTuple):
    """None means that it was not given. `typed` are the options as they were written.

    `mean` and `std` have a value per channel, or one for all. `resize_px` is the shorter side before the crop, `exact`
    the size to which images are scaled directly; at most one of the two is given. `channels` is known for a transform.
    """

    typed: str = ""
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    resize_px: int | None = None
    exact: Size | None = None
    crop: Size | None = None
    interpolation: Interpolation | None = None
    antialias: bool = True
    channels: Literal[1, 3] | None = None


def parse_changes(
    mean: str | None, std: str | None, resize: str | None, crop: str | None, interpolation: str | None
) -> ImageChanges:
    """Raises UsageError."""
    given = {"--mean": mean, "--std": std, "--resize": resize, "--crop": crop, "--interpolation": interpolation}
    typed = " ".join(f"{flag} {text}" for flag, text in given.items() if text is not None)
    if interpolation is not None and interpolation not in get_args(Interpolation):
        raise UsageError(
            f"--interpolation {interpolation!r} is unknown; use {', '.join(map(str, get_args(Interpolation)))}"
        )
    resized = _side("--resize", resize) if resize is not None else None
    is_exact = resize is not None and "x" in resize.lower()
    cut = _side("--crop", crop) if crop is not None else None
    if is_exact and cut not in (None, resized):
        raise UsageError(f"--resize {resize} sets the exact size; to crop, pass --resize N for the shorter side")
    return ImageChanges(
        typed,
        _values("--mean", mean) if mean is not None else None,
        _values("--std", std) if std is not None else None,
        resized.height if resized and not is_exact else None,
        resized if is_exact else None,
        cut,
        cast(Interpolation | None, interpolation),
    )


def resolve_image(
    preprocess: str | None,
    size: InputSize | None,
    default_size: InputSize | None,
    header: ImageSpec | None,
    front: Front,
    why_no_header: str,
    changes: ImageChanges,
    find_channels: Callable[[Size], int],
    likely_preset: str = "imagenet",
) -> ImageSpec:
    """The image specification.

    `size` is the user's, `default_size` the network's if known, `header` that of the checkpoint or the registry.
    `changes` take precedence, and `find_channels` is called if they do not determine grey or colour. Raises UsageError
    if they contradict each other or leave something open; then `likely_preset` is the advice.
    """
    known = size or default_size
    if preprocess is None:
        if header is not None:
            image = replace(header, front=front)
        elif changes.typed:
            image = _whole(changes, known, front, find_channels)
        else:
            raise MissingOption(
                f"preprocessing unknown: {why_no_header}; "
                f"pass --preprocess {', '.join(PRESETS)}, file.py:transform, timm:NAME or FILE.json",
                *("--preprocess", likely_preset),
            )
    elif preprocess in PRESETS:
        image = preset(preprocess, known, front)
    elif preprocess.startswith(("timm:", "torchvision:")):
        image = replace(_of_registry(preprocess), front=front)
        image = resized(image, size) if size is not None else image
    elif ".py:" in preprocess:
        image = _of_transform(preprocess, known, front, find_channels)
    else:
        image = read_preprocess_file(Path(preprocess), front)
    image = _changed(image, changes) if changes.typed else image
    found = InputSize.of(image)
    if size is not None and size != found:
        raise UsageError(f"--input says {size}, the preprocessing {found}; leave --input out or change --preprocess")
    return image


def resized(image: ImageSpec, size: InputSize) -> ImageSpec:
    """The preparation at another input size, with the same ratio of resize to crop; another number of channels is left
    to fail.
    """
    if size.channels != image.channels:
        return image
    share = image.resize_px / max(image.height, image.width)
    resize_px = round(max(size.height, size.width) * share)
    return replace(image, height=size.height, width=size.width, resize_px=resize_px)


class Preset(NamedTuple):
    """A usual preparation. `mean` and `std` apply to values in 0..1, one for all channels or one per channel.

    `px` is the usual side of the input, None if there is none. `resize_share` is the shorter side before the crop over
    the crop's side, None if images are scaled directly to the input's size or, with `is_letterbox`, into it.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    px: int | None = None
    resize_share: float | None = None
    interpolation: Interpolation = "bilinear"
    is_letterbox: bool = False
    pad_position: PadPosition = "center"
    channel_order: ChannelOrder = "rgb"


PRESETS: dict[str, Preset] = {
    # The default of torchvision and timm.
    "imagenet": Preset((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 224, 256 / 224),
    # Values in -1..1, as in Inception networks, many ViTs and models from TensorFlow.
    "inception": Preset((0.5,), (0.5,), 299, 1 / 0.875, "bicubic"),
    # OpenAI's CLIP and models trained like it.
    "clip": Preset((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711), 224, 1.0, "bicubic"),
    "cifar10": Preset((0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616), 32),
    "mnist": Preset((0.1307,), (0.3081,), 28),
    # Values in 0..1 and in 0..255, without a mean.
    "unit": Preset((0.0,), (1.0,)),
    "raw": Preset((0.0,), (1 / 255,)),
    # YOLO: resized to fit as OpenCV does, without antialias, and padded with grey.
    "letterbox": Preset((0.0,), (1.0,), 640, is_letterbox=True),
    # YOLOX: the same in the upper left corner, as BGR in 0..255.
    "yolox": Preset((0.0,), (1 / 255,), 640, is_letterbox=True, pad_position="top_left", channel_order="bgr"),
}


def preset(name: str, size: InputSize | None, front: Front) -> ImageSpec:
    """A usual preparation at a size, by default its own. Raises UsageError."""
    recipe = PRESETS[name]
    if size is None and recipe.px is None:
        raise MissingOption(
            f"--preprocess {name} needs the size of the input; pass --input, as in --input 3x32x32",
            *("--input", "3x32x32"),
        )
    size = size or InputSize(1 if name == "mnist" else 3, recipe.px or 0, recipe.px or 0)
    if len(recipe.mean) > 1 and size.channels != len(recipe.mean):
        raise UsageError(f"--preprocess {name} is for 3 channels; use unit or a FILE.json")
    side = max(size.height, size.width)
    return ImageSpec(
        height=size.height,
        width=size.width,
        channels=size.channels,
        resize_mode="letterbox" if recipe.is_letterbox else "shorter_side" if recipe.resize_share else "exact",
        resize_px=round(side * (recipe.resize_share or 1)),
        interpolation=recipe.interpolation,
        antialias=not recipe.is_letterbox,
        mean=_per_channel(recipe.mean, size.channels),
        std=_per_channel(recipe.std, size.channels),
        front=front,
        pad_position=recipe.pad_position,
        channel_order=recipe.channel_order,
    )


def _of_registry(text: str) -> ImageSpec:
    """The preparation that `timm:NAME` or `torchvision:NAME` was published with. Raises UsageError, JobError."""
    kind, _, name = text.partition(":")
    found = ask(Inquiry("timm" if kind == "timm" else "torchvision", name))
    if found.image is None:
        raise UsageError(f"--preprocess {text}: {found.why_no_image or 'nothing is known'}; pass a JSON file")
    return found.image


def _of_transform(text: str, known: InputSize | None, front: Front, find_channels: Callable[[Size], int]) -> ImageSpec:
    """A user's `file.py:transform`. Raises UsageError, and JobError if it is not understood."""
    head, _, name = text.partition(".py:")
    file = Path(f"{head}.py")
    if not file.is_file():
        raise UsageError(f"--preprocess {text!r}: there is no file {file}; check the path")
    try:
        parse_call(name)
    except ValueError as error:
        raise UsageError(f"--preprocess {text!r}: {error}; write {file}:transform") from error
    recipe = ask(Inquiry("file", name, str(file.resolve()), is_transform=True)).transform
    assert recipe is not None
    steps = changes_of(recipe, f"--preprocess {text}", known)
    return _whole(steps, known, front, find_channels)


def changes_of(recipe: TransformRecipe, shown: str, known: InputSize | None) -> ImageChanges:
    """The steps of a user's transform, which errors call `shown`. Raises UsageError if they leave something open.

    A transform that does not resize takes images of the size of the network's input, where that is `known`.
    """
    if recipe.crop is not None and recipe.resize_px is None and recipe.exact is None:
        raise UsageError(f"{shown}: CenterCrop without Resize is not supported; add a Resize before it")
    if recipe.resize_px is not None and recipe.crop is None:
        raise UsageError(
            f"{shown}: Resize({recipe.resize_px}) alone gives images of many sizes; add CenterCrop, or "
            f"Resize(({recipe.resize_px}, {recipe.resize_px}))"
        )
    if recipe.exact is not None and recipe.crop not in (None, recipe.exact):
        raise UsageError(
            f"{shown}: Resize({recipe.exact}) and then CenterCrop({recipe.crop}) is not supported; use Resize with one "
            "number, which keeps the proportions"
        )
    exact = Size(*recipe.exact) if recipe.exact else None
    if recipe.resize_px is None and exact is None:
        if known is None:
            raise MissingOption(
                f"{shown} does not resize images; add a Resize, or pass --input, as in --input 3x32x32",
                *("--input", "3x32x32"),
            )
        exact = Size(known.height, known.width)
    return ImageChanges(
        shown,
        recipe.mean,
        recipe.std,
        recipe.resize_px,
        exact,
        Size(*recipe.crop) if recipe.crop else None,
        recipe.interpolation or "bilinear",
        recipe.antialias,
        recipe.channels,
    )


def _changed(image: ImageSpec, changes: ImageChanges) -> ImageSpec:
    """The recipe with what the user says. Raises UsageError where that does not fit."""
    size = changes.exact or changes.crop or Size(image.height, image.width)
    mode, resize_px = image.resize_mode, image.resize_px
    if changes.exact is not None:
        mode, resize_px = "exact", max(size.height, size.width)
    elif changes.resize_px is not None:
        mode, resize_px = "shorter_side", changes.resize_px
    elif mode != "shorter_side" and changes.crop not in (None, Size(image.height, image.width)):
        how = "exactly" if mode == "exact" else "fit into"
        raise UsageError(
            f"--crop has no effect, because images are resized to {how} {image.height}x{image.width}; also pass "
            "--resize"
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


def _whole(
    changes: ImageChanges, known: InputSize | None, front: Front, find_channels: Callable[[Size], int]
) -> ImageSpec:
    """A recipe of the user's words alone; `known` is the network's input, where that is known.

    One value for `--mean` and one for `--std` may be those of grey or of each colour; `find_channels` tells the
    network's own for images of a size. Raises UsageError, which names what is missing.
    """
    cut = changes.exact or changes.crop or (Size(known.height, known.width) if known else None)
    said = {
        "--mean": changes.mean,
        "--std": changes.std,
        "--resize": changes.exact or changes.resize_px,
        "--crop": cut,
        "--interpolation": changes.interpolation,
    }
    missing = [flag for flag, value in said.items() if value is None]
    if missing or cut is None:
        raise UsageError(f"preprocessing is incomplete; also pass {', '.join(missing)}, or use --preprocess")
    count = known.channels if known else max(len(changes.mean or ()), len(changes.std or ()))
    if changes.channels is not None:
        count = changes.channels
    elif known is None and count == 1:
        count = find_channels(cut)
    if count not in (1, 3):
        raise UsageError(f"--mean and --std have {count} values; pass 1 or 3, one per channel")
    plain = ImageSpec.plain(cut.height, cut.width, 3 if count == 3 else 1, front)
    return _changed(replace(plain, antialias=changes.antialias), changes)


def _values(flag: str, text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if len(values) not in (1, 3) or not all(abs(value) < float("inf") for value in values):
        raise UsageError(f"{flag} {text!r} is not one number per channel; write {flag} 0.5,0.5,0.5, or one for all")
    if flag == "--std" and min(values) <= 0:
        raise UsageError(f"--std {text} must be above 0")
    if max(values) > 1:
        raise UsageError(f"{flag} {text} must be of pixels scaled to 0..1; divide it by 255")
    return values


def _side(flag: str, text: str) -> Size:
    parts = text.lower().split("x")
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts) or len(parts) > 2:
        raise UsageError(f"{flag} {text!r} is not a size in pixels; write {flag} 224, or height x width, as in 224x192")
    return Size(int(parts[0]), int(parts[-1]))


def _per_channel(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    return values * channels if len(values) == 1 else values
