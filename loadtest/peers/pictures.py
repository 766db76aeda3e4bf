"""Pictures as people send them, made from a seed. Knows Pillow."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

_PICTURES = 16
_JPEG_QUALITY = 90
_CELLS = (2, 8, 32, 128, 512, 2048)


def jpegs(size: tuple[int, int], count: int = _PICTURES, falling: float = 1.0) -> list[bytes]:
    """So many pictures of that width and height with detail at every scale, so that they cost what photographs cost.

    Detail is the fainter the finer it is, with its frequency to the power of -`falling`.
    """
    generator = np.random.default_rng(0)
    pictures = []
    for _ in range(count):
        canvas = np.zeros((size[1], size[0], 3))
        for cells in [cells for cells in _CELLS if cells < max(size)]:
            coarse = Image.fromarray(generator.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
            canvas += np.asarray(coarse.resize(size, Image.Resampling.BICUBIC)) / cells**falling
        canvas *= 255 / canvas.max()
        buffer = io.BytesIO()
        Image.fromarray(canvas.astype(np.uint8)).save(buffer, "JPEG", quality=_JPEG_QUALITY)
        pictures.append(buffer.getvalue())
    return pictures
