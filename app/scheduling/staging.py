"""How long a batch takes on a lane before it can compute: to be handed over, copied and launched.

Learned from every batch, by the powers of two of its size. Two questions are asked of it, and each is answered
with care for what would go wrong: what of it another batch will hide, where too much would promise what cannot
be kept; and how early a batch must start, where too little would let the device wait.
"""

from __future__ import annotations

from convoy.app.scheduling.request import MILLISECOND_NS

_WEIGHT = 0.2
# Before anything was measured a batch is started rather too early.
_UNKNOWN_NS = MILLISECOND_NS
_MARGIN = 1.25
# Timers and threads wake up late by about so much.
WAKING_NS = MILLISECOND_NS


class Staging:
    """Expected nanoseconds by number of samples."""

    def __init__(self) -> None:
        self._mean_ns: dict[int, float] = {}  # by the power of two that is not below the size

    def observe(self, samples: int, took_ns: int) -> None:
        """One batch of so many samples took so long before it could compute."""
        power = _power(samples)
        mean_ns = self._mean_ns.setdefault(power, took_ns)
        self._mean_ns[power] = max(0.0, mean_ns + _WEIGHT * (took_ns - mean_ns))

    def hidden_ns(self, samples: int) -> int:
        """What surely counts for nothing while another batch computes; 0 before so small a batch was seen."""
        seen = [power for power in self._mean_ns if power <= _power(samples)]
        return int(self._mean_ns[max(seen)]) if seen else 0

    def lead_ns(self, samples: int) -> int:
        """How long before it is to compute a batch is started, so that nothing waits for it."""
        power = _power(samples)
        larger = [own for own in self._mean_ns if own >= power]
        if larger:
            mean_ns = self._mean_ns[min(larger)]
        elif self._mean_ns:
            largest = max(self._mean_ns)
            mean_ns = self._mean_ns[largest] * 2 ** (power - largest)  # in proportion to what is copied
        else:
            mean_ns = _UNKNOWN_NS
        return int(_MARGIN * mean_ns) + WAKING_NS


def _power(samples: int) -> int:
    return (samples - 1).bit_length()
