"""How many requests come together on a wire that brings them one after the other, and whether a batch waits for more.

Pure: all times are handed in. Two requests come together if the loop had something to do all the time between them:
the second was there already, and not yet read. Who came when the loop had had nothing to do for a while was not there,
and is not worth waiting for.

1. A batch waits for about as many as came together for the last ones.
2. So groups would stay as they are, of clients who could all be one: 16 clients had a batch for each third of them.
   Where requests come together at all, a batch is therefore held for as long as it may be, whoever has come: that costs
   nothing where the loop has calls to read meanwhile.
3. Where the loop had nothing to do for a while, that was in vain, and for the next batches rule 1 is enough: for one,
   three, seven, and so on up to 255. When one by rule 2 has more than were expected, the next pause is half as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

# The loop had something to do all the time, but for this: other threads, which read for it, have the core now and then.
_IDLE_NS = 250_000
_WEIGHT = 1 / 2  # of the last batch in how many are expected
_MORE_TO_COME = 1 / 2  # so far below what is expected a batch waits for one more
_LEAST_EXPECTED = 1.75  # two that came together once are not enough to wait for anybody
_LONGEST_PAUSE = 255  # batches; nobody is to lose more than a hundredth by what is tried in vain


@dataclass(slots=True, eq=False)
class Arrival:
    """When a request came, and what CPU time the loop's thread had had by then. Nanoseconds."""

    submitted_ns: int
    busy_ns: int


class Gathering:
    """What is known of those who wait in one queue."""

    def __init__(self) -> None:
        self._expected = 1.0
        self._is_past_expected = False  # the next batch is held by rule 2
        self._pause = self._pause_left = 0  # batches, by rule 3

    def hold(self, waiting: int) -> bool:
        """Decide whether a batch for these so many is held for others. What was decided last holds when it begins."""
        is_short = max(_LEAST_EXPECTED, waiting + _MORE_TO_COME) <= self._expected
        self._is_past_expected = not is_short and self._expected >= _LEAST_EXPECTED and not self._pause_left
        return is_short or self._is_past_expected

    def batch_began(self, came: list[Arrival], now_ns: int, busy_ns: int) -> None:
        """Learn from those of a batch that come one after the other, at least one. It began at `now_ns`."""
        came.sort(key=lambda one: one.submitted_ns)
        together = 1
        for before, after in pairwise(came):
            if _idle_ns(before, after.submitted_ns, after.busy_ns) > _IDLE_NS:
                break
            together += 1
        if self._pause_left:
            self._pause_left -= 1
        elif self._is_past_expected and _idle_ns(came[0], now_ns, busy_ns) > _IDLE_NS:
            self._pause = self._pause_left = min(_LONGEST_PAUSE, 2 * self._pause + 1)
        elif self._is_past_expected and together >= self._expected + 1:
            self._pause //= 2
        self._is_past_expected = False
        self._expected += _WEIGHT * (together - self._expected)


def _idle_ns(since: Arrival, now_ns: int, busy_ns: int) -> int:
    """How long the loop had nothing to do."""
    return now_ns - since.submitted_ns - (busy_ns - since.busy_ns)
