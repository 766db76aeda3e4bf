"""Pictures of all sizes that people send, from 1 KB to 12 megapixels, from a seed. Knows Pillow."""

from __future__ import annotations

import io
import random
from dataclasses import dataclass

import numpy as np
from PIL import Image

from convoy.loadtest.peers.pictures import jpegs

_SEED = 0
_ICON_PX = 20
_VARIANTS = 16
_FALLING = 0.2


@dataclass(frozen=True, slots=True)
class PictureKind:
    """`share` of 64 requests are a JPEG of this width and height; a `size` of None is a PNG of about 1 KB."""

    size: tuple[int, int] | None
    share: int


# Most pictures are small, and most of the work is in the large ones.
KINDS = (
    PictureKind(None, 20),
    PictureKind((340, 256), 24),
    PictureKind((500, 375), 12),
    PictureKind((1280, 720), 6),
    PictureKind((4000, 3000), 2),
)


def mixed() -> list[bytes]:
    """64 pictures of all kinds, shuffled."""
    pictures: list[bytes] = []
    for kind in KINDS:
        own = icons(kind.share) if kind.size is None else _photographs(kind.size, kind.share)
        pictures += [own[index % len(own)] for index in range(kind.share)]
    random.Random(_SEED).shuffle(pictures)
    return pictures


def _photographs(size: tuple[int, int], count: int) -> list[bytes]:
    """As large as a camera's: 12 megapixels take 2.6 MB."""
    return jpegs(size, min(count, _VARIANTS), falling=_FALLING)


def icons(count: int) -> list[bytes]:
    """PNGs of about 1 KB."""
    generator = np.random.default_rng(_SEED)
    found = []
    for _ in range(count):
        buffer = io.BytesIO()
        Image.fromarray(generator.integers(0, 256, (_ICON_PX, _ICON_PX, 3), dtype=np.uint8)).save(buffer, "PNG")
        found.append(buffer.getvalue())
    return found


def largest() -> list[bytes]:
    """Pictures of 12 megapixels."""
    assert KINDS[-1].size is not None
    return _photographs(KINDS[-1].size, KINDS[-1].share)
