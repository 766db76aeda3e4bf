"""Which heads of a queue are given up for those behind them. Pure, and part of the policy.

Compares several courses for what waits now: give up no request that could be in time, give up some that have little
time left, or as many as let all others fit into one batch. Each course is followed to its end: a batch that is small
enough for its first request to be in time, then what the device owes to other models, then the rest likewise, as far as
it can be in time.

A course of several batches has a price. It keeps the device longer than one batch of as many would, and takes that
time from requests that are still to come: as many as the device answers in such a time, of all models that wait for it.
It counts in full where what waits takes half of a request's time: then the device is not idle again soon. Other models'
batches keep it busy, too, but where batches are mostly fixed cost that says little: requests that come meanwhile make
them larger and hardly longer.
Simulation chose the figures here (docs/internals/simulation.md).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import NamedTuple

from convoy.app.scheduling.queues import Entry, LaneForecast, Queue, State

# The parts of the head's time that a kept request must have left, besides none and all that is needed.
_TIME_LEFT = (0.25, 0.5, 0.75)
# Smaller batches cost little enough to be left alone, and so do those that take no longer than this many
# requests one by one.
_ALWAYS_ALLOWED = 32
_SINGLES_ALLOWED = 10
# The part of a batch's time that a single request would take. Below the first, each further request makes the batch
# longer by its whole share; above the second, hardly at all.
_HARDLY_FIXED, _MOSTLY_FIXED = 0.1, 0.4
# Of what other models' next batches will hold, only a part waits by now.
_STILL_TO_COME = 1.5


def most_samples(queue: Queue, entries: list[Entry], forecast: LaneForecast, first: int) -> int:
    """How large a batch that begins with the entry `first` may be: it takes at most half of that one's time.

    A request that comes when it begins waits for its end and then for its own batch (Nexus' rule; Shen et al., SOSP
    2019). Not so where batches that short would be little more than their fixed cost, nor where waiting requests would
    pay for it, because the next of them would be late in the batch after this one.
    """
    lane, head = forecast.lane, entries[first]
    if queue.waiting <= _ALWAYS_ALLOWED or head[-1].deadline_ns is None:
        return queue.max_batch
    most_ns = max(_time_ns(head) // 2, _SINGLES_ALLOWED * lane.behind_ns(1))
    sizes = range(_ALWAYS_ALLOWED + 1, queue.max_batch + 1)
    most = min(queue.max_batch, _ALWAYS_ALLOWED + bisect_right(sizes, most_ns, key=lane.behind_ns))
    others = len(entries) - first - most
    if others > 0 and forecast.ends_ns(most) + lane.behind_ns(min(others, most)) > entries[first + most][1]:
        return queue.max_batch
    return most


def early_drops(state: State, queue: Queue, entries: list[Entry], forecast: LaneForecast, first: int) -> int:
    """How many requests from `first` on, in time if they ran now, cost more others than they are."""
    if len(entries) - first < 2:
        return 0
    heads = _Heads(entries, most_samples(queue, entries, forecast, first), forecast, first)
    if heads.largest_in_time(0, heads.fill(0)) == heads.fill(0):
        return 0
    enough = heads.fewest_before_one_batch()
    if enough == heads.count:
        return 0
    merged = heads.fill(enough) - enough
    takes_ns = max(1, forecast.lane.behind_ns(heads.samples(enough, enough + merged)))
    others = _others(state, queue, forecast)
    all_ns, time_ns = takes_ns + others.takes_ns, _time_ns(entries[first + enough])
    busy = min(1.0, 2 * takes_ns / time_ns)
    if others.takes_ns:
        by_samples = _by_samples(forecast.lane.behind_ns(1) / takes_ns)
        busy = max(busy, _STILL_TO_COME * by_samples * min(1.0, 2 * all_ns / time_ns))
    price_per_ns = busy * (merged + others.requests) / all_ns

    def value(given_up: int) -> float:
        if given_up == enough:
            return merged
        kept, longer_ns = heads.course(given_up, others.takes_ns)
        return kept - longer_ns * price_per_ns

    first_time_ns = _time_ns(entries[first])
    some = {min(enough, heads.with_less_than(round(share * first_time_ns))) for share in _TIME_LEFT}
    return max(sorted({0, enough, *some}), key=value)


def _by_samples(fixed: float) -> float:
    """How much longer further requests make a batch, 0 to 1; `fixed` is the part of it that one takes alone."""
    return max(0.0, min(1.0, (_MOSTLY_FIXED - fixed) / (_MOSTLY_FIXED - _HARDLY_FIXED)))


def _time_ns(entry: Entry) -> int:
    """How long after its arrival the answer is worth something."""
    return max(1, entry[1] - entry[-1].arrival_ns)


class _Heads:
    """The requests of one class from `first` on. Only among equals: none gives way to a lower class."""

    def __init__(self, entries: list[Entry], most: int, forecast: LaneForecast, first: int) -> None:
        end = bisect_left(entries, (entries[first][0] + 1,), key=lambda entry: entry[:1])
        self._due_ns = [entry[1] for entry in entries[first:end]]
        self._before = list(accumulate((entry[-1].samples for entry in entries[first:end]), initial=0))
        self._most, self._forecast = most, forecast
        self.count = end - first

    def samples(self, first: int, end: int) -> int:
        return self._before[end] - self._before[first]

    def fill(self, first: int) -> int:
        """Where the largest batch from `first` on ends, deadlines aside."""
        return max(first + 1, bisect_right(self._before, self._before[first] + self._most) - 1)

    def largest_in_time(self, first: int, end: int, start_ns: int | None = None) -> int:
        """Where the largest batch that starts now, or at a time, and in which `first` is in time, ends."""
        end = min(end, self.fill(first))

        def is_late(last: int) -> bool:
            return self._ends_ns(self.samples(first, last + 1), start_ns) > self._due_ns[first]

        return max(first + 1, bisect_left(range(end), True, first + 1, end, key=is_late))

    def _ends_ns(self, samples: int, start_ns: int | None) -> int:
        if start_ns is None:
            return self._forecast.ends_ns(samples)
        return start_ns + self._forecast.lane.behind_ns(samples)

    def fewest_before_one_batch(self) -> int:
        """How many must be given up so that a batch of the others, started now, is in time."""

        def is_in_time(first: int) -> bool:
            return self._forecast.ends_ns(self.samples(first, self.fill(first))) <= self._due_ns[first]

        return bisect_left(range(self.count), True, key=is_in_time)

    def with_less_than(self, left_ns: int) -> int:
        """How many have less time than this left when the device is free."""
        return bisect_left(self._due_ns, self._forecast.free_ns + left_ns)

    def course(self, given_up: int, owed_ns: int) -> tuple[int, int]:
        """How many of the next full batch are in time when the first `given_up` are dropped and no others that could be
        in time, and how much longer that takes the device than one batch of as many."""
        lane, end = self._forecast.lane, self.fill(0)
        if given_up >= end:
            return 0, 0
        position = self.largest_in_time(given_up, end)
        kept, served = position - given_up, self.samples(given_up, position)
        work_ns = lane.behind_ns(served)
        start_ns = self._forecast.ends_ns(served) + owed_ns
        while True:
            position = bisect_left(self._due_ns, start_ns + lane.behind_ns(1), position, end)
            if position == end:
                return kept, work_ns - lane.behind_ns(served)
            after = self.largest_in_time(position, end, start_ns)
            takes_ns = lane.behind_ns(self.samples(position, after))
            kept, served = kept + after - position, served + self.samples(position, after)
            start_ns, work_ns, position = start_ns + takes_ns, work_ns + takes_ns, after


class _Others(NamedTuple):
    """A batch of each other queue that waits for the same device: how many requests, and what they take."""

    requests: int
    takes_ns: int


def _others(state: State, queue: Queue, forecast: LaneForecast) -> _Others:
    requests = takes_ns = 0
    for other, lane in state.beside(queue, forecast.lane):
        samples = min(other.waiting, other.max_batch)
        requests += other.requests * samples // other.waiting
        takes_ns += lane.behind_ns(samples)
    return _Others(requests, takes_ns)
