"""How long a batch will take on one lane, learned from how long batches took.

The shape is `a + c * b` beyond a knee and flat before it, so a table with straight lines between powers of two fits
better than one line; a size beyond the table follows the last segment. Estimates carry a margin, the worst recent ratio
of measured to expected time within bounds, as in Clockwork (Gujarati et al., OSDI 2020), because a prediction that is
late is worse than one that is early.

A size that was slow once would be avoided for ever, and would never be learned to be fast again. Two rules prevent it.
What is believed of one size bounds the others: a batch may not cost much more than the same samples in smaller batches,
nor a small batch more than a large one. And every batch teaches a little about all sizes, as if the whole profile had
become slower or faster by the same factor.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping

from convoy.app.scheduling.request import MILLISECOND_NS

# Before anything was measured: low, so that the first requests are admitted and teach the truth.
UNKNOWN_NS = 1 * MILLISECOND_NS
_WEIGHT = 0.2
# Enough to forget a disturbance in some hundred batches, too little to drown what a size says of itself.
_WEIGHT_FOR_OTHERS = 0.02
_RECENT = 10
_MARGIN_BOUNDS = (1.0, 1.5)
# The other way round, for what must be ready when a batch ends: the fastest recent one and a little less.
_SOONEST_BOUNDS = (0.5, 0.98)
# One batch that took thirty times the usual says more about a hiccup than about the next batch.
_OUTLIER_RATIO = 4.0
# Caches make real tables bend a little against both bounds; within this factor they may.
_SLACK = 1.5


class LatencyModel:
    """Expected nanoseconds by number of samples. `measured_ns` is a profile of batches that ran alone."""

    def __init__(self, measured_ns: Mapping[int, float] | None = None) -> None:
        # The profile, and what is believed now: at the same sizes, which ascend. Without a profile the first is empty.
        self._profile_ns = {size: max(1.0, ns) for size, ns in sorted((measured_ns or {}).items())}
        self._believed_ns = dict(self._profile_ns)
        self._ratios: deque[float] = deque(maxlen=_RECENT)
        # Asked several times for every request, and the same until the next batch has ended.
        self._predicted_ns: dict[int, int] = {}

    def expect_ns(self, samples: int) -> int:
        """The plain expectation, without margin."""
        return int(_at(self._believed_ns, samples))

    def predict_ns(self, samples: int) -> int:
        """The expectation with its margin: what promises are made from."""
        known = self._predicted_ns.get(samples)
        if known is None:
            known = self._predicted_ns[samples] = int(_at(self._believed_ns, samples) * self.margin)
        return known

    def soonest_ns(self, samples: int) -> int:
        """What it takes when it goes as well as lately at best."""
        low, high = _SOONEST_BOUNDS
        recent = 0.95 * min(self._ratios) if self._ratios else 0.75
        return int(_at(self._believed_ns, samples) * min(high, max(low, recent)))

    @property
    def margin(self) -> float:
        """The worst recent ratio of measured to expected time, within bounds."""
        low, high = _MARGIN_BOUNDS
        return min(high, max(low, max(self._ratios, default=low)))

    def observe(self, samples: int, took_ns: int) -> None:
        """Learn from one batch that ran alone on the lane."""
        self._predicted_ns.clear()
        above = 1 << (samples - 1).bit_length()
        if not self._believed_ns:
            self._believed_ns[above] = float(max(1, took_ns))
            return
        for power in (above, above if above == samples else above >> 1):
            if power not in self._believed_ns:
                self._add_size(power)
        expected_ns = _at(self._believed_ns, samples)
        self._ratios.append(took_ns / expected_ns)
        surprise = min(took_ns / expected_ns, _OUTLIER_RATIO) - 1.0
        weights = _weights(self._believed_ns, samples)
        norm = sum([weight * weight for weight in weights.values()])
        for size, weight in weights.items():
            self._believed_ns[size] = max(1.0, self._believed_ns[size] * (1.0 + _WEIGHT * surprise * weight / norm))
        self._teach_others(samples)

    def _add_size(self, size: int) -> None:
        self._believed_ns = _with_size(self._believed_ns, size)
        if self._profile_ns:
            self._profile_ns = _with_size(self._profile_ns, size)

    def _teach_others(self, samples: int) -> None:
        now_ns = _at(self._believed_ns, samples)
        factor = now_ns / _at(self._profile_ns, samples)
        for size, ns in self._believed_ns.items():
            if self._profile_ns:
                ns += _WEIGHT_FOR_OTHERS * (factor * self._profile_ns[size] - ns)
            ns = min(ns, _SLACK * now_ns if size < samples else _SLACK * now_ns * size / samples)
            if size >= samples:
                ns = max(ns, now_ns / _SLACK)
            self._believed_ns[size] = max(1.0, ns)


def _at(table_ns: dict[int, float], samples: int) -> float:
    """Nanoseconds of a batch by a table of some sizes, which ascend."""
    if samples in table_ns:
        return table_ns[samples]
    sizes = [*table_ns]
    if not sizes:
        return float(UNKNOWN_NS)
    if samples < sizes[0]:
        return table_ns[sizes[0]]
    if samples < sizes[-1]:
        return sum([weight * table_ns[size] for size, weight in _weights(table_ns, samples).items()])
    last_ns = table_ns[sizes[-1]]
    if len(sizes) == 1:
        # One point says nothing about the slope; proportional is the safe guess upwards.
        return last_ns * samples / sizes[0]
    slope = (last_ns - table_ns[sizes[-2]]) / (sizes[-1] - sizes[-2])
    return last_ns + max(0.0, slope) * (samples - sizes[-1])


def _weights(table_ns: dict[int, float], samples: int) -> dict[int, float]:
    """How much each of the table's sizes says about one between its first and its last."""
    if samples in table_ns:
        return {samples: 1.0}
    sizes = [*table_ns]
    position = bisect_left(sizes, samples)
    low, high = sizes[position - 1], sizes[position]
    share = (samples - low) / (high - low)
    return {low: 1.0 - share, high: share}


def _with_size(table_ns: dict[int, float], size: int) -> dict[int, float]:
    """The table with one size more, of which it says the same as before."""
    return dict(sorted({**table_ns, size: _at(table_ns, size)}.items()))


# Before the first batch, one is started rather too early.
_STAGING_UNKNOWN_NS = MILLISECOND_NS
_STAGING_MARGIN = 1.25
# How late timers and threads may wake up.
WAKING_NS = MILLISECOND_NS


class Staging:
    """How long a batch takes before it can compute: expected nanoseconds by number of samples."""

    def __init__(self) -> None:
        self._mean_ns: dict[int, float] = {}  # by the power of two that is not below the size

    def observe(self, samples: int, took_ns: int) -> None:
        """Learn from one batch."""
        power = _power(samples)
        mean_ns = self._mean_ns.setdefault(power, took_ns)
        self._mean_ns[power] = max(0.0, mean_ns + _WEIGHT * (took_ns - mean_ns))

    def hidden_ns(self, samples: int) -> int:
        """What another batch that computes surely hides of it; 0 before so small a batch was seen."""
        seen = [power for power in self._mean_ns if power <= _power(samples)]
        return int(self._mean_ns[max(seen)]) if seen else 0

    def lead_ns(self, samples: int) -> int:
        """How long before it is to compute a batch must be started."""
        power = _power(samples)
        larger = [own for own in self._mean_ns if own >= power]
        if larger:
            mean_ns = self._mean_ns[min(larger)]
        elif self._mean_ns:
            largest = max(self._mean_ns)
            mean_ns = self._mean_ns[largest] * 2 ** (power - largest)  # in proportion to what is copied
        else:
            mean_ns = _STAGING_UNKNOWN_NS
        return int(_STAGING_MARGIN * mean_ns) + WAKING_NS


def _power(samples: int) -> int:
    return (samples - 1).bit_length()
