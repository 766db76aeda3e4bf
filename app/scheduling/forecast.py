"""When a request would be served if it were let in now.

Knows the queues, the lanes and what they are expected to take. Decides nothing; that is `policy`. Exact in
the number of requests ahead; their samples are taken to be the queue's average.
"""

from __future__ import annotations

from bisect import bisect_left

from convoy.app.scheduling.queues import (
    NEVER_NS,
    PATIENCE_NS,
    Entry,
    Lane,
    Queue,
    State,
    deadline_of,
    urgency,
)
from convoy.app.scheduling.request import SECOND_NS, Request


def lateness_ns(state: State, queue: Queue, request: Request, now_ns: int) -> int:
    """By how much the request is late even alone, or too late for how many wait before it; 0 when it is neither.

    Twice as many may wait as can be served until its deadline. Whom of them to give up is decided when a device is
    free, with more known, and better with more to choose from; a refused request cannot be chosen any more.
    """
    lanes = queue.usable_lanes
    if not lanes or state.is_idle(queue):
        return 0
    wait_ns = _wait_for_lane_ns(state, lanes, now_ns) + _others_ns(state, queue, request)
    if not queue.waiting and not any(lane.in_flight for lane in lanes):
        # Only the device is taken. What its own model is thought to take must not keep it out: it would
        # never be learned to be less.
        return max(0, now_ns + wait_ns + 1 - (request.expiry_ns or NEVER_NS))
    first_ns = now_ns + wait_ns
    mean = max(1.0, _mean_samples(queue))
    batches, rest = divmod(_living_ahead(queue, request, first_ns), max(1, int(queue.max_batch / mean)))
    before_ns = batches * _apart_ns(state, lanes, queue.max_batch)
    own_ns, with_it_ns = (
        min(lane.behind_ns(samples) for lane in lanes)
        for samples in (request.samples, min(queue.max_batch, round(rest * mean) + request.samples))
    )
    time_ns = deadline_of(request) - first_ns
    late_ns = max(own_ns, (before_ns + with_it_ns) // 2) - time_ns  # twice as many may wait as can be served
    if request.latest_start_ns is not None:
        late_ns = max(late_ns, first_ns + before_ns - request.latest_start_ns)
    return max(0, late_ns)


def backlog_ns(state: State, queue: Queue, now_ns: int) -> int:
    """How long until a lane of this queue has worked off everything that waits in it."""
    lanes = queue.usable_lanes
    if not lanes:
        return SECOND_NS
    return _wait_for_lane_ns(state, lanes, now_ns) + _work_ns(state, lanes, queue.max_batch, queue.waiting)


def _mean_samples(queue: Queue) -> float:
    requests = queue.requests + sum(map(len, queue.retries))
    return queue.waiting / requests if requests else 1.0


def _living_ahead(queue: Queue, request: Request, start_ns: int) -> int:
    """How many of the same shapes go before the request and could still be in time from `start_ns` on."""
    entries = queue.by_shape.get(request.shapes, [])
    soonest_ns = start_ns + min(lane.behind_ns(1) for lane in queue.usable_lanes)
    own = queue.order_of(request)
    more_important = bisect_left(entries, own[:1])
    living = bisect_left(entries, own) - bisect_left(entries, (own[0], soonest_ns))
    return more_important + max(0, living)


def _others_ns(state: State, queue: Queue, request: Request) -> int:
    """The work that surely goes before the request and shares no batch with it."""
    total_ns, own = 0, queue.order_of(request)
    for other in _sharing(state, queue):
        ahead = sum(
            _surely_ahead(entries, own)
            for shapes, entries in other.by_shape.items()
            if other is not queue or shapes != request.shapes
        )
        samples = round(ahead * _mean_samples(other))
        samples += sum(member.samples for group in other.retries for member in group)
        if samples:
            total_ns += _work_ns(state, other.usable_lanes or other.lanes, other.max_batch, samples)
    return total_ns


def _sharing(state: State, queue: Queue) -> list[Queue]:
    """The queue itself, and those that compete with it for a bounded device."""
    devices = {lane.device for lane in queue.lanes if lane.device in state.device_slots}
    return [
        other
        for other in state.queues.values()
        if other is queue or (other.waiting and any(lane.device in devices for lane in other.lanes))
    ]


def _surely_ahead(entries: list[Entry], own: Entry) -> int:
    """How many of another group's requests go first: the more important, and those with no deadline to miss.

    Others may be given up. Were they counted, a model whose requests are refused for the queue of another could not
    have a queue of its own, and the other would keep the device for itself.
    """
    level, due_ns, _ = urgency(own)
    more_important = bisect_left(entries, (level,))
    untimed = bisect_left(entries, (level, NEVER_NS, due_ns - PATIENCE_NS)) - bisect_left(entries, (level, NEVER_NS))
    return more_important + untimed


def _wait_for_lane_ns(state: State, lanes: list[Lane], now_ns: int) -> int:
    """How long until a batch of one of the lanes may compute."""
    return min(state.timeline(lane).free_at_ns(now_ns) for lane in lanes) - now_ns


def _work_ns(state: State, lanes: list[Lane], max_batch: int, samples: int) -> int:
    full, rest = divmod(samples, max_batch)
    return full * _apart_ns(state, lanes, max_batch) + (_apart_ns(state, lanes, rest) if rest else 0)


def _apart_ns(state: State, lanes: list[Lane], samples: int) -> int:
    """How far apart batches end that follow each other on all lanes; those of one device take turns."""
    if len(lanes) == 1:
        return lanes[0].behind_ns(samples)
    devices: dict[int, int] = {}
    for lane in lanes:
        device = id(state.timeline(lane))
        devices[device] = min(lane.behind_ns(samples), devices.get(device, NEVER_NS))
    return round(1 / sum(1 / max(1, each_ns) for each_ns in devices.values()))
