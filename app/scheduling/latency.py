"""Predict how long a batch takes on one lane, from measured batches.

Latency is flat for small batches and linear for large ones, so a table with linear interpolation between powers of two
fits better than one line. Larger sizes follow the last segment. Predictions carry a margin, the worst recent ratio of
measured to expected time within bounds, as in Clockwork (Gujarati et al., OSDI 2020), because a late answer costs more
than an idle moment.

Without further rules, a size that was slow once would be avoided for ever and never measured again. Two rules prevent
this. The estimate of one size bounds the others: a batch may not cost much more than its samples in smaller batches,
and a small batch not more than a large one. And every measurement moves all sizes a little, as if the whole profile had
become slower or faster by one factor.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping

from convoy.app.scheduling.request import MILLISECOND_NS

# The first guess is low, so that requests are admitted and the model can learn.
UNKNOWN_NS = 1 * MILLISECOND_NS
# Real profiles violate both bounds a little because of caches; this factor allows it.
_SLACK = 1.5


class LatencyModel:
    """Expected nanoseconds by number of samples. `measured_ns` is a profile of batches that ran alone."""

    def __init__(self, measured_ns: Mapping[int, float] | None = None) -> None:
        # The profile (possibly empty) and the current estimates, both in ascending order of the same sizes.
        self._profile_ns = {size: max(1.0, ns) for size, ns in sorted((measured_ns or {}).items())}
        self._believed_ns = dict(self._profile_ns)
        self._ratios: deque[float] = deque(maxlen=10)
        # A cache: predictions are asked for several times per request and change only when a batch ends.
        self._predicted_ns: dict[int, int] = {}

    def expect_ns(self, samples: int) -> int:
        """The expected time, without a margin."""
        return int(_at(self._believed_ns, samples))

    def predict_ns(self, samples: int) -> int:
        """The expected time with a margin, for deadlines."""
        known = self._predicted_ns.get(samples)
        if known is None:
            known = self._predicted_ns[samples] = int(_at(self._believed_ns, samples) * self.margin)
        return known

    def soonest_ns(self, samples: int) -> int:
        """An optimistic estimate, a little below the best recent batch."""
        share = 0.95 * min(self._ratios) if self._ratios else 0.75
        return int(_at(self._believed_ns, samples) * min(0.98, max(0.5, share)))

    @property
    def margin(self) -> float:
        """The worst recent ratio of measured to expected time, within bounds."""
        return min(1.5, max([1.0, *self._ratios]))

    def observe(self, samples: int, took_ns: int) -> None:
        """Learn from one batch that ran alone on the lane."""
        self._predicted_ns.clear()
        above = 1 << (samples - 1).bit_length()
        if not self._believed_ns:
            self._believed_ns[above] = float(max(1, took_ns))
            return
        for power in (above, above if above == samples else above >> 1):
            if power not in self._believed_ns:
                self._believed_ns = _with_size(self._believed_ns, power)
                self._profile_ns = _with_size(self._profile_ns, power) if self._profile_ns else {}
        ratio = took_ns / _at(self._believed_ns, samples)
        self._ratios.append(ratio)
        # A batch that took thirty times the usual says little about the next one.
        step = 0.2 * (min(ratio, 4.0) - 1.0)
        sizes = [*self._believed_ns]
        position = bisect_left(sizes, samples)
        high, low = sizes[position], sizes[max(0, position - 1)]
        share = 1.0 if high == samples else (samples - low) / (high - low)  # the weight of the larger of the two sizes
        norm = share * share + (1.0 - share) * (1.0 - share)
        self._believed_ns[high] *= 1.0 + step * share / norm
        self._believed_ns[low] *= 1.0 + step * (1.0 - share) / norm
        self._teach_others(samples)

    def _teach_others(self, samples: int) -> None:
        now_ns = _at(self._believed_ns, samples)
        factor = now_ns / _at(self._profile_ns, samples)
        for size, ns in self._believed_ns.items():
            if self._profile_ns:
                # Forgets a disturbance after some hundred batches, and is small beside a size's own measurements.
                ns += 0.02 * (factor * self._profile_ns[size] - ns)
            ns = min(ns, _SLACK * now_ns if size < samples else _SLACK * now_ns * size / samples)
            if size >= samples:
                ns = max(ns, now_ns / _SLACK)
            self._believed_ns[size] = max(1.0, ns)


def _at(table_ns: dict[int, float], samples: int) -> float:
    """Interpolate in a table of ascending sizes."""
    if samples in table_ns:
        return table_ns[samples]
    sizes = [*table_ns]
    if not sizes:
        return float(UNKNOWN_NS)
    if samples < sizes[0]:
        return table_ns[sizes[0]]
    if len(sizes) == 1:
        # One point gives no slope. For larger sizes, proportional is the safe guess.
        return table_ns[sizes[0]] * samples / sizes[0]
    position = min(bisect_left(sizes, samples), len(sizes) - 1)
    low, high = sizes[position - 1], sizes[position]
    slope = (table_ns[high] - table_ns[low]) / (high - low)
    return table_ns[high] + (slope if samples < high else max(0.0, slope)) * (samples - high)


def _with_size(table_ns: dict[int, float], size: int) -> dict[int, float]:
    """Add a size to the table, at its interpolated value."""
    return dict(sorted({**table_ns, size: _at(table_ns, size)}.items()))
