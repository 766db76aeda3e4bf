"""Predict when a request would be served if it were admitted now.

Knows the queues, the lanes and their expected latencies; `policy` decides. Counts the requests ahead exactly and
assumes that each has the queue's average number of samples.
"""

from __future__ import annotations

from bisect import bisect_left

from convoy.app.scheduling.queues import NEVER_NS, PATIENCE_NS, Entry, Lane, Queue, State, urgency
from convoy.app.scheduling.request import SECOND_NS, Request


def lateness_ns(state: State, queue: Queue, request: Request, now_ns: int) -> int:
    """Return by how much the request would be late, alone or because of those ahead of it; 0 if it would be in time.

    Up to twice as many requests may wait as can be served before the deadline. When a device becomes free, the policy
    knows more and can choose which to drop; a refused request cannot be chosen any more.
    """
    lanes = queue.usable_lanes
    if not lanes or state.is_idle(queue):
        return 0
    own = queue.order_of(request)
    first_ns = now_ns + _wait_for_lane_ns(state, lanes, now_ns) + _others_ns(state, queue, own)
    if not queue.waiting and not any(lane.in_flight for lane in lanes):
        # Only other models occupy the device. The model's own predicted latency must not refuse the request: a
        # prediction that is too high could then never be corrected.
        return max(0, first_ns + 1 - (request.expiry_ns or NEVER_NS))
    ahead = _living_ahead(queue, own, first_ns + min(lane.behind_ns(1) for lane in lanes))
    own_ns = min(lane.behind_ns(request.samples) for lane in lanes)
    served_ns = _work_ns(state, lanes, queue.max_batch, ahead + request.samples)
    late_ns = first_ns + max(own_ns, served_ns // 2) - own[1]  # twice as many may wait as can be served
    if request.latest_start_ns is not None:
        before_ns = _work_ns(state, lanes, queue.max_batch, ahead - ahead % queue.max_batch)
        late_ns = max(late_ns, first_ns + before_ns - request.latest_start_ns)
    return max(0, late_ns)


def backlog_ns(state: State, queue: Queue, now_ns: int) -> int:
    """How long until everything that waits in this queue is served."""
    lanes = queue.usable_lanes
    if not lanes:
        return SECOND_NS
    return _wait_for_lane_ns(state, lanes, now_ns) + _work_ns(state, lanes, queue.max_batch, queue.waiting)


def _living_ahead(queue: Queue, own: Entry, soonest_ns: int) -> int:
    """How many samples of the same shapes are ahead of the request, except those that cannot be in time."""
    entries = queue.groups.get(own[-1].shapes, [])
    more_important = bisect_left(entries, own[:1])
    living = bisect_left(entries, own) - bisect_left(entries, (own[0], soonest_ns))
    return _samples(queue, more_important + max(0, living))


def _others_ns(state: State, queue: Queue, own: Entry) -> int:
    """The work that certainly goes first and cannot share a batch with the request."""
    total_ns = 0
    for other in {queue, *(other for lane in queue.lanes for other, _ in state.beside(queue, lane))}:
        groups = [entries for group, entries in other.groups.items() if other is not queue or group != own[-1].shapes]
        ahead = _samples(other, sum([_surely_ahead(entries, own) for entries in groups]))
        total_ns += _work_ns(state, other.usable_lanes, other.max_batch, ahead)
    return total_ns


def _surely_ahead(entries: list[Entry], own: Entry) -> int:
    """How many requests of another group certainly go first: the more urgent, and those without a deadline.

    The others may be dropped. Counting them would let one model's queue refuse all requests of another model, which
    would never get its share of the device.
    """
    level, due_ns, _ = urgency(own)
    more_important = bisect_left(entries, (level,))
    untimed = bisect_left(entries, (level, NEVER_NS, due_ns - PATIENCE_NS)) - bisect_left(entries, (level, NEVER_NS))
    return more_important + untimed


def _samples(queue: Queue, requests: int) -> int:
    """Estimate the samples of that many waiting requests."""
    return round(requests * queue.waiting / queue.requests) if requests else 0


def _wait_for_lane_ns(state: State, lanes: list[Lane], now_ns: int) -> int:
    """How long until the first of the lanes can compute a new batch."""
    return min(state.timeline(lane).free_at_ns(now_ns) for lane in lanes) - now_ns


def _work_ns(state: State, lanes: list[Lane], max_batch: int, samples: int) -> int:
    """How long all lanes together take for the samples, in full batches and one with the rest."""
    full, rest = divmod(samples, max_batch)
    return full * _apart_ns(state, lanes, max_batch) + (_apart_ns(state, lanes, rest) if rest else 0)


def _apart_ns(state: State, lanes: list[Lane], samples: int) -> int:
    """The mean time between the ends of batches, with all lanes at work; lanes of one device take turns."""
    fastest_ns: dict[int, int] = {}
    for lane in lanes:
        device = id(state.timeline(lane))
        fastest_ns[device] = min(lane.behind_ns(samples), fastest_ns.get(device, NEVER_NS))
    return round(1 / sum(1 / max(1, each_ns) for each_ns in fastest_ns.values()))
