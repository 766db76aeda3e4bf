"""Axes: the position of a value between two ends, and the values that get a label. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MOST_TICKS = 8

Kind = Literal["linear", "log", "tail"]
TAIL_TICKS = (0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999)


@dataclass(frozen=True, slots=True)
class Axis:
    """`label` contains the unit. A log axis needs `low` above 0.

    "tail" is for shares of requests: each further nine takes the same space (as in HDR histograms), so the slowest
    requests are visible; it ends below 1. `marked` are the values with a label; None means round values.
    """

    label: str
    low: float
    high: float
    kind: Kind = "linear"
    marked: tuple[float, ...] | None = None

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high end; never outside."""
        low, high, at = (self._bent(one) for one in (self.low, self.high, max(value, self.low)))
        return min(1.0, max(0.0, (at - low) / (high - low)))

    def ticks(self) -> list[float]:
        """The values that get a line and a label."""
        if self.marked is not None:
            return list(self.marked)
        if self.kind == "tail":
            return [tick for tick in TAIL_TICKS if tick <= self.high]
        return _log_ticks(self.low, self.high) if self.kind == "log" else _round_ticks(self.low, self.high)

    def says(self, value: float) -> str:
        """The label of a tick."""
        return f"{100 * value:.6g} %" if self.kind == "tail" else number(value)

    def _bent(self, value: float) -> float:
        if self.kind == "tail":
            return -math.log10(1 - value)
        return math.log10(value) if self.kind == "log" else value


def spanning(label: str, values: Sequence[float], *, from_zero: bool = True) -> Axis:
    """An axis over all values; logarithmic if they differ more than twentyfold and zero need not be shown."""
    positive = [value for value in values if value > 0] or [1.0]
    low, high = min(positive), max(positive)
    if not from_zero and high > 20 * low:
        return Axis(label, 0.9 * low, 1.15 * high, "log")
    return Axis(label, 0.0, 1.08 * high)


def number(value: float) -> str:
    """Three significant digits with thousands separators: 0.0123, 4.56, 78.9, 12,300."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "–"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _round_ticks(low: float, high: float) -> list[float]:
    """About five multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return [index * step for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, with their multiples of two and five if there is room; thinned out if there is not."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1,)):
        ticks = [factor * 10.0**power for power in decades for factor in factors]
        ticks = [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
        if len(ticks) <= MOST_TICKS:
            break
    return ticks[:: 1 + len(ticks) // (MOST_TICKS + 1)]
