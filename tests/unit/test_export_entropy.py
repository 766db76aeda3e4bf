"""Ranges by entropy: those of the library whose form of the method this is, where it computes as exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnxruntime.quantization import calibrate

from convoy.export.variants.calibrate import least_divergent

BINS = 512


def counted(values: np.ndarray, most: float | None = None) -> np.ndarray:
    limit = np.abs(values).max() if most is None else most
    return np.histogram(values, BINS, (-limit, limit))[0]


def smooth(counts: np.ndarray) -> np.ndarray | None:
    """The library's, without its rounding to single precision, which decides between ranges that are nearly as good."""
    empty = counts == 0
    if empty.all():
        return None
    return counts + 1e-4 * empty - 1e-4 * empty.sum() / (~empty).sum() * ~empty


def divergence(of: np.ndarray, by: np.ndarray) -> Any:
    of, by = of / of.sum(), by / by.sum()
    return (of * np.log(of / by)).sum()


def of_the_library(counts: np.ndarray) -> tuple[int, int]:
    places = np.arange(BINS + 1, dtype=np.float64)
    find: Any = calibrate.HistogramCollector.get_entropy_threshold
    start, end = find(None, (counts, places, np.float64(0), np.float64(BINS)), 128)
    return int(start), int(end)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["normal", "relu", "long-tailed", "few-values"])
def test_the_range_is_the_librarys(kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "smooth_distribution", smooth)
    monkeypatch.setattr(calibrate, "entropy", divergence)
    generator = np.random.default_rng(seed)
    size = int(10 ** generator.uniform(1, 5))
    values = {
        "normal": lambda: generator.normal(size=size),
        "relu": lambda: np.maximum(generator.normal(size=size), 0),
        "long-tailed": lambda: generator.standard_t(2, size=size),
        "few-values": lambda: generator.choice(generator.normal(size=7), size=size),
    }[kind]()
    counts = counted(values, np.abs(values).max() * generator.uniform(1, 2))
    assert least_divergent(counts) == of_the_library(counts)


def test_one_value_far_away_is_cut_off_and_values_that_are_spread_evenly_are_not() -> None:
    generator = np.random.default_rng(0)
    start, end = least_divergent(counted(np.append(generator.normal(size=100_000), 30.0)))
    assert 0 < BINS - end == start - 1
    assert (end - start) / BINS < 0.4
    start, end = least_divergent(counted(generator.uniform(-1, 1, 1_000_000)))
    assert (end - start) / BINS > 0.9


@pytest.mark.parametrize("counts", [np.zeros(BINS, np.int64), np.eye(1, BINS, BINS // 2, dtype=np.int64)[0]])
def test_where_nothing_or_one_value_was_seen_there_is_a_range_around_it(counts: np.ndarray) -> None:
    start, end = least_divergent(counts)
    assert 0 <= start <= BINS // 2 < end <= BINS
