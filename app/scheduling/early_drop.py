"""Early drop: decide which requests at the head of a queue to drop so that more of those behind them are in time.

Part of the policy, and pure. It compares several plans for the waiting requests: drop none that could be in time, drop
some with little time left, or drop as many as it takes for all others to fit into one batch. Each plan is played
through: a batch small enough for its first request to be in time, then the work of other models on the device, then the
next batch.

A plan with several batches has a price. It occupies the device longer than one batch of the same requests would, and
that time is lost to future requests. The price counts in full if that one batch takes at least half of a request's
time, because then the device will not be idle soon. The figures come from simulation (docs/internals/simulation.md).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate

from convoy.app.scheduling.queues import Entry, LaneForecast, Queue, State


def early_drops(state: State, queue: Queue, entries: list[Entry], forecast: LaneForecast, first: int) -> int:
    """Return how many requests from `first` on to drop, although each would be in time if it ran now."""
    if len(entries) - first < 2:
        return 0
    # Only requests of the same level: none is dropped for a less urgent one.
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

    # Besides none and enough: those with less than a quarter, a half or three quarters of the first request's time
    # left.
    some = [heads.with_less_than(heads.time_ns(0) * quarters // 4) for quarters in (1, 2, 3)]
    return max(sorted({0, enough, *[min(enough, one) for one in some]}), key=value)


class _Heads:
    """Requests of one level in the order of deadlines, for a lane with batches of at most `most` samples."""

    def __init__(self, entries: list[Entry], most: int, forecast: LaneForecast) -> None:
        self._entries, self._most, self._lane = entries, most, forecast.lane
        self._start_ns = max(forecast.free_ns, forecast.now_ns + forecast.lane.hidden_ns(1))
        self._due_ns = [entry[1] for entry in entries]
        self._before = list(accumulate((entry[-1].samples for entry in entries), initial=0))
        self.count = len(entries)

    def batch_ns(self, first: int, end: int) -> int:
        """How long a batch of the requests from `first` to `end` takes."""
        return self._lane.behind_ns(self._before[end] - self._before[first])

    def time_ns(self, position: int) -> int:
        """The time from the request's arrival to its deadline."""
        return max(1, self._due_ns[position] - self._entries[position][-1].arrival_ns)

    def fill(self, first: int) -> int:
        """The end of the largest batch from `first` on, ignoring deadlines."""
        return max(first + 1, bisect_right(self._before, self._before[first] + self._most) - 1)

    def fewest_before_one_batch(self) -> int:
        """How many to drop so that one batch of the others is in time if it starts now."""

        def is_in_time(first: int) -> bool:
            return self._start_ns + self.batch_ns(first, self.fill(first)) <= self._due_ns[first]

        return bisect_left(range(self.count), True, key=is_in_time)

    def with_less_than(self, left_ns: int) -> int:
        """How many requests have less than `left_ns` left when the device is free."""
        return bisect_left(self._due_ns, self._start_ns + left_ns)

    def course(self, given_up: int, owed_ns: int) -> tuple[int, int]:
        """Play the next full batch through, without its first `given_up` requests and without those that become late.

        Returns how many are in time, and by how much that occupies the device longer than one batch of them would.
        """
        position, end, start_ns = given_up, self.fill(0), self._start_ns
        kept = served = work_ns = 0
        while position < end:
            after = self._largest_in_time(position, end, start_ns)
            takes_ns = self.batch_ns(position, after)
            kept, served = kept + after - position, served + self._before[after] - self._before[position]
            work_ns += takes_ns
            start_ns += takes_ns + owed_ns
            owed_ns = 0  # counts once, after the first batch
            position = bisect_left(self._due_ns, start_ns + self._lane.behind_ns(1), after, end)
        return kept, work_ns - self._lane.behind_ns(served) if kept else 0

    def _largest_in_time(self, first: int, end: int, start_ns: int) -> int:
        """The end of the largest batch that starts at `start_ns` and in which `first` is in time."""

        def is_late(last: int) -> bool:
            return start_ns + self.batch_ns(first, last + 1) > self._due_ns[first]

        return max(first + 1, bisect_left(range(end), True, first + 1, min(end, self.fill(first)), key=is_late))
