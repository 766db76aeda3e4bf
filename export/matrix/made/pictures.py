"""A folder of pictures of three colours, a folder per class. Knows PNG and nothing of networks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = ("red", "green", "blue")
_OF_EACH = 40
_PX = 40


def write(folder: Path, names: tuple[str, ...] = COLOURS) -> None:
    """`folder/<name>/<n>.png`, in which the class's own channel is the strongest on average."""
    generator = np.random.default_rng(3)
    for channel, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for index in range(_OF_EACH):
            pixels = generator.integers(0, 160, (_PX, _PX, 3))
            pixels[..., channel % 3] += 90
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{index}.png")
