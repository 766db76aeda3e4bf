"""Pictures that small networks learn from in a moment, and a training of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from convoy.models.samples import encode_png
from convoy.models.train_options import TrainOptions

CHANNELS = {"red": 0, "green": 1, "blue": 2}


def write_coloured(
    root: Path,
    counts: dict[str, int],
    *,
    size: tuple[int, int] = (20, 30),
    noise: int = 100,
    tint: int | None = 150,
    seed: int = 0,
) -> Path:
    """Classes that are named by their colour, so many pictures of each; without a tint they are hard to tell apart."""
    rng = np.random.default_rng(seed)
    for label, count in counts.items():
        (root / label).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            pixels = rng.integers(0, noise, (*size, 3), np.uint8)
            pixels[..., CHANNELS[label]] += np.uint8(rng.integers(0, 20) if tint is None else tint)
            (root / label / f"{seed}-{index}.png").write_bytes(encode_png(pixels))
    return root


def options(folder: Path, **changes: Any) -> TrainOptions:
    """A short training on a CPU, whose file lies beside the folder."""
    plain = TrainOptions(
        dataset=str(folder), out=folder.parent / "cnn.safetensors", device="cpu", epochs=4, batch_size=16
    )
    return replace(plain, **changes)
