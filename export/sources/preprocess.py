"""How images become the network's input: `--preprocess`, else what the checkpoint says, else a refusal.

Knows the named recipes. It never guesses: a wrong mean costs accuracy without an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from convoy.app.engines.free_sizes import Size
from convoy.export.sources.image_changes import NOTHING_CHANGED, ImageChanges, Side, changed, whole
from convoy.export.sources.preprocess_file import read_preprocess_file
from convoy.models.errors import UsageError
from convoy.models.spec import Front, ImageSpec

_INPUT = re.compile(r"([13])x(?:([1-9]\d{0,5})(\??)x([1-9]\d{0,5})\3|\?x\?)")
_FRONTS: dict[str, Front] = {"uint8": "uint8_nhwc", "none": "float32_nchw"}
# The sizes of torchvision's ImageNet recipes: scale the shorter side to 256, cut the 224 in the centre.
_IMAGENET_PX, _IMAGENET_RESIZE_PX = 224, 256
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True, slots=True)
class InputSize:
    channels: Literal[1, 3]
    height: int
    width: int


@dataclass(frozen=True, slots=True)
class AskedInput:
    """`--input`. `is_free`: other heights and widths than `size` are to be taken as well; None: it is left open."""

    channels: Literal[1, 3]
    size: Size | None
    is_free: bool

    @property
    def of_pictures(self) -> InputSize | None:
        """What pictures are cropped to, where that is said."""
        return InputSize(self.channels, self.size.height, self.size.width) if self.size else None


def parse_input(text: str) -> AskedInput:
    """`3x224x224` as channels, height, width; `3x224?x224?` and `3x?x?` leave the last two free. Raises UsageError."""
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
        raise UsageError(f"--front {text!r} is not known; use {' or '.join(_FRONTS)}")
    return _FRONTS[text]


def resolve_image(
    preprocess: str | None,
    size: InputSize | None,
    default_size: InputSize | None,
    header: ImageSpec | None,
    front: Front,
    why_no_header: str = "the checkpoint does not say",
    changes: ImageChanges = NOTHING_CHANGED,
    find_channels: Callable[[Side], int] | None = None,
) -> ImageSpec:
    """The image specification.

    `size` is what the user asked for, `default_size` what the network is known to take, `header` what the checkpoint
    carries or the registry says. `changes` go before all of that, and `find_channels` is asked where they do not tell
    grey from colours. Raises UsageError where they contradict each other or leave something open.
    """
    if preprocess is None:
        if header is None and changes.typed:
            known = size or default_size
            side = Side(known.height, known.width) if known else None
            image = whole(changes, side, known.channels if known else None, front, find_channels)
        elif header is None:
            raise UsageError(
                f"how images are prepared for this network is not known: {why_no_header}; "
                "pass --preprocess imagenet, unit or FILE.json"
            )
        else:
            image = replace(header, front=front)
    elif preprocess == "imagenet":
        image = _imagenet(size or default_size or InputSize(3, _IMAGENET_PX, _IMAGENET_PX), front)
    elif preprocess == "unit":
        known = size or default_size
        if known is None:
            raise UsageError("--preprocess unit needs the size of the input; pass --input, as in --input 3x32x32")
        image = ImageSpec.plain(known.height, known.width, known.channels, front)
    else:
        image = read_preprocess_file(Path(preprocess), front)
    image = changed(image, changes) if changes.typed else image
    found = InputSize(image.channels, image.height, image.width)
    if size is not None and size != found:
        raise UsageError(
            f"--input says {_shown(size)}, the preprocessing {_shown(found)}; leave --input out or change --preprocess"
        )
    return image


def resized(image: ImageSpec, size: InputSize) -> ImageSpec:
    """The recipe at another input size, with its proportions of resize to crop; another depth is left to clash."""
    if size.channels != image.channels:
        return image
    share = image.resize_px / max(image.height, image.width)
    resize_px = round(max(size.height, size.width) * share)
    return replace(image, height=size.height, width=size.width, resize_px=resize_px)


def _imagenet(size: InputSize, front: Front) -> ImageSpec:
    if size.channels != 3:
        raise UsageError("--preprocess imagenet is for 3 channels; use unit or a FILE.json")
    return ImageSpec(
        height=size.height,
        width=size.width,
        channels=3,
        resize_mode="shorter_side",
        resize_px=round(max(size.height, size.width) * _IMAGENET_RESIZE_PX / _IMAGENET_PX),
        interpolation="bilinear",
        antialias=True,
        mean=_IMAGENET_MEAN,
        std=_IMAGENET_STD,
        front=front,
    )


def _shown(size: InputSize) -> str:
    return f"{size.channels}x{size.height}x{size.width}"
