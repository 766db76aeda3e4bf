"""Pictures as people send them, made from a seed. Knows Pillow."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

_PICTURES = 16
_JPEG_QUALITY = 90


def jpegs(size: tuple[int, int]) -> list[bytes]:
    """Pictures of that width and height with detail at every scale, so that they cost what photographs cost."""
    generator = np.random.default_rng(0)
    pictures = []
    for _ in range(_PICTURES):
        canvas = np.zeros((size[1], size[0], 3))
        for cells in (2, 8, 32, 128):
            coarse = Image.fromarray(generator.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
            canvas += np.asarray(coarse.resize(size, Image.Resampling.BICUBIC)) / cells
        canvas *= 255 / canvas.max()
        buffer = io.BytesIO()
        Image.fromarray(canvas.astype(np.uint8)).save(buffer, "JPEG", quality=_JPEG_QUALITY)
        pictures.append(buffer.getvalue())
    return pictures
