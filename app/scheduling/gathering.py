"""How many requests come together on a wire that brings them one after the other, and for how many a batch should wait.

Pure: all times are handed in. Two requests come together if the loop had something to do all the time between them:
the second was there already, and not yet read. Who came when the loop had had nothing to do for a while was not there,
and is not worth waiting for.

1. A batch waits for about as many as came together for the last ones.
2. So groups would stay as they are, of clients who could all be one: 16 clients had a batch for each third of them.
   Where there is company at all, a batch is therefore held for as long as it may be, whoever has come: that costs
   nothing where the loop has calls to read meanwhile.
3. Where the loop had nothing to do in the end, that was in vain, and for the next batches rule 1 is enough: for one,
   three, seven, and so on. Each time that more have come than expected, for half as many.
"""

from __future__ import annotations

from itertools import pairwise

# Two came together if the loop was idle for no longer than this: other threads, which read for it, have the core now
# and then. Who waits for a client that is still busy itself waits for longer.
_IDLE_NS = 250_000
_WEIGHT = 1 / 2
_MORE_TO_COME = 1 / 2
# Two that came together once are not enough.
_LEAST = 1.75
# Batches that are held no longer than by rule 1. A hold in vain takes as long as one or two of these.
_LONGEST_PAUSE = 255


class Arrival:
    """When a request came, and what CPU time the loop's thread had had by then. Nanoseconds."""

    __slots__ = ("busy_ns", "submitted_ns")

    def __init__(self, submitted_ns: int, busy_ns: int) -> None:
        self.submitted_ns, self.busy_ns = submitted_ns, busy_ns


class Gathering:
    """What is known of those who wait for one lane."""

    __slots__ = ("_expected", "_goes_beyond", "_pause", "_until_next")

    def __init__(self) -> None:
        self._expected = 1.0  # by rule 1
        self._goes_beyond = False  # the batch that is held waits for more than that
        self._pause = self._until_next = 0  # batches, by rule 3; and how many of these are left

    def expects_more(self, waiting: int) -> bool:
        """Whether a batch for these so many should wait for others."""
        is_short = max(_LEAST, waiting + _MORE_TO_COME) <= self._expected
        self._goes_beyond = not is_short and self._expected >= _LEAST and not self._until_next
        return is_short or self._goes_beyond

    def batch_began(self, came: list[Arrival], now_ns: int, busy_ns: int) -> None:
        """Learn from those of a batch that come one after the other; there are some. It began at `now_ns`."""
        came.sort(key=lambda one: one.submitted_ns)
        together = 1
        for before, after in pairwise(came):
            if _was_idle(before, after.submitted_ns, after.busy_ns):
                break
            together += 1
        if self._until_next:
            self._until_next -= 1
        elif self._goes_beyond and _was_idle(came[-1], now_ns, busy_ns):
            self._until_next = self._pause = min(_LONGEST_PAUSE, 2 * self._pause + 1)
        elif together >= self._expected + 1:
            self._pause //= 2
        self._goes_beyond = False
        self._expected += _WEIGHT * (together - self._expected)


def _was_idle(since: Arrival, now_ns: int, busy_ns: int) -> bool:
    return now_ns - since.submitted_ns - (busy_ns - since.busy_ns) > _IDLE_NS
