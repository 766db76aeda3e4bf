"""Which heads of a queue are given up for those behind them. Pure, and part of the policy.

Compares several courses for what waits now: give up no request that could be in time, give up some that have little
time left, or as many as let all others fit into one batch. Each course is followed to its end: a batch that is small
enough for its first request to be in time, then what the device owes to other models, then the rest likewise, as far as
it can be in time.

A course of several batches has a price. It keeps the device longer than one batch of as many would, and takes that
time from requests that are still to come: as many as the device answers in such a time. It counts in full where the one
batch takes half of a request's time: then the device is not idle again soon.
Simulation chose the figures here (docs/internals/simulation.md).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate

from convoy.app.scheduling.queues import Entry, LaneForecast, Queue, State


def early_drops(state: State, queue: Queue, entries: list[Entry], forecast: LaneForecast, first: int) -> int:
    """How many requests from `first` on, in time if they ran now, cost more others than they are."""
    if len(entries) - first < 2:
        return 0
    # Only among equals: none gives way to a lower class.
    heads = _Heads(entries[first : bisect_left(entries, (entries[first][0] + 1,))], queue.max_batch, forecast)
    enough = heads.fewest_before_one_batch()
    if enough in (0, heads.count):
        return 0
    merged = heads.fill(enough) - enough
    takes_ns = max(1, heads.batch_ns(enough, enough + merged))
    beside = state.beside(queue, forecast.lane)
    owed_ns = sum(lane.behind_ns(min(other.waiting, other.max_batch)) for other, lane in beside)
    price_per_ns = min(1.0, 2 * takes_ns / heads.time_ns(enough)) * merged / takes_ns

    def value(given_up: int) -> float:
        if given_up == enough:
            return merged
        kept, longer_ns = heads.course(given_up, owed_ns)
        return kept - longer_ns * price_per_ns

    # Besides none and all that is needed: those with less left than a part of the first one's time.
    some = [heads.with_less_than(heads.time_ns(0) * quarters // 4) for quarters in (1, 2, 3)]
    return max(sorted({0, enough, *[min(enough, one) for one in some]}), key=value)


class _Heads:
    """Requests of one class, in the order of their deadlines, before a lane with batches of at most `most` samples."""

    def __init__(self, entries: list[Entry], most: int, forecast: LaneForecast) -> None:
        self._entries, self._most, self._lane = entries, most, forecast.lane
        self._start_ns = max(forecast.free_ns, forecast.now_ns + forecast.lane.hidden_ns(1))
        self._due_ns = [entry[1] for entry in entries]
        self._before = list(accumulate((entry[-1].samples for entry in entries), initial=0))
        self.count = len(entries)

    def batch_ns(self, first: int, end: int) -> int:
        """What a batch of these takes."""
        return self._lane.behind_ns(self._before[end] - self._before[first])

    def time_ns(self, position: int) -> int:
        """How long after its arrival the answer is worth something."""
        return max(1, self._due_ns[position] - self._entries[position][-1].arrival_ns)

    def fill(self, first: int) -> int:
        """Where the largest batch from `first` on ends, deadlines aside."""
        return max(first + 1, bisect_right(self._before, self._before[first] + self._most) - 1)

    def fewest_before_one_batch(self) -> int:
        """How many must be given up so that a batch of the others, started now, is in time."""

        def is_in_time(first: int) -> bool:
            return self._start_ns + self.batch_ns(first, self.fill(first)) <= self._due_ns[first]

        return bisect_left(range(self.count), True, key=is_in_time)

    def with_less_than(self, left_ns: int) -> int:
        """How many have less time than this left when the device is free."""
        return bisect_left(self._due_ns, self._start_ns + left_ns)

    def course(self, given_up: int, owed_ns: int) -> tuple[int, int]:
        """What becomes of the next full batch when its first `given_up` are dropped, and others where they are late.

        Returns how many are in time, and how much longer that takes the device than one batch of as many.
        """
        position, end, start_ns = given_up, self.fill(0), self._start_ns
        kept = served = work_ns = 0
        while position < end:
            after = self._largest_in_time(position, end, start_ns)
            takes_ns = self.batch_ns(position, after)
            kept, served = kept + after - position, served + self._before[after] - self._before[position]
            work_ns += takes_ns
            start_ns += takes_ns + owed_ns
            owed_ns = 0  # after the first batch
            position = bisect_left(self._due_ns, start_ns + self._lane.behind_ns(1), after, end)
        return kept, work_ns - self._lane.behind_ns(served) if kept else 0

    def _largest_in_time(self, first: int, end: int, start_ns: int) -> int:
        """Where the largest batch that starts at a time, and in which `first` is in time, ends."""

        def is_late(last: int) -> bool:
            return start_ns + self.batch_ns(first, last + 1) > self._due_ns[first]

        return max(first + 1, bisect_left(range(end), True, first + 1, min(end, self.fill(first)), key=is_late))
