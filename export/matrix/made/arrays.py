"""Samples that are no pictures, as `.npz` files, and what scores them. Knows numpy and nothing of networks."""

from __future__ import annotations

from pathlib import Path

import numpy as np

_SAMPLES = 96
_CLASSES = 5
SCORES = '''import numpy as np


def close(outputs, targets):
    """One number a sample: the larger, the nearer."""
    return -np.abs(outputs - targets).mean(axis=1)
'''


def write_signals(path: Path) -> None:
    """`signal` float32 [n, 2, 64] and a class of each, int64 [n]."""
    generator = np.random.default_rng(5)
    signals = generator.standard_normal((_SAMPLES, 2, 64)).astype(np.float32)
    np.savez(path, signal=signals, labels=generator.integers(0, _CLASSES, _SAMPLES))


def write_targets(path: Path) -> None:
    """`signal` as before, and what a regression is held against, float32 [n, 5]."""
    generator = np.random.default_rng(6)
    signals = generator.standard_normal((_SAMPLES, 2, 64)).astype(np.float32)
    np.savez(path, signal=signals, targets=generator.standard_normal((_SAMPLES, _CLASSES)).astype(np.float32))


def write_pairs(path: Path) -> None:
    """Two inputs of a network: `images` float32 [n, 3, 32, 32] and `weights` float32 [n, 5]."""
    generator = np.random.default_rng(7)
    np.savez(
        path,
        images=generator.random((_SAMPLES, 3, 32, 32), dtype=np.float32),
        weights=generator.random((_SAMPLES, _CLASSES), dtype=np.float32),
    )
