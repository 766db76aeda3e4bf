"""When a request would be served if it were let in now.

Knows the queues, the lanes and what they are expected to take. Decides nothing; that is `policy`. Exact in
the number of requests ahead; their samples are taken to be the queue's average.
"""

from __future__ import annotations

from bisect import bisect_left

from app.scheduling.queues import NEVER_NS, PATIENCE_NS, Entry, Lane, Queue, State, deadline_of, order_of, urgency
from app.scheduling.request import SECOND_NS, Request


def lateness_ns(state: State, queue: Queue, request: Request, now_ns: int) -> int:
    """By how much the request, or one that it would run with, is expected to be late; 0 when none is.

    A request that does not fit into a batch without making its head late opens the next one. That one must
    have room to grow, for the time of a full batch or half of the request's own time: queues that fill up
    with requests which can only run almost alone collapse under load that they could bear.
    """
    lanes = queue.usable_lanes
    if not lanes or state.is_idle(queue):
        return 0
    wait_ns = _wait_for_lane_ns(state, lanes, now_ns) + _others_ns(state, queue, request)
    if not queue.waiting and not any(lane.in_flight for lane in lanes):
        # Only the device is taken. What its own model is thought to take must not keep it out: it would
        # never be learned to be less.
        return max(0, now_ns + wait_ns + 1 - (request.expiry_ns or NEVER_NS))
    entries = queue.by_shape.get(request.shapes, [])
    position = bisect_left(entries, order_of(request))
    mean = max(1.0, _mean_samples(queue))
    per_batch = max(1, int(queue.max_batch / mean))
    first = position - position % per_batch
    full_ns = min(lane.predict_ns(queue.max_batch) for lane in lanes)
    start_ns = now_ns + wait_ns + first // per_batch * full_ns // len(lanes)

    with_it = min(queue.max_batch, round((position - first) * mean) + request.samples)
    end_ns = start_ns + min(lane.predict_ns(with_it) for lane in lanes)
    late_ns = end_ns - min(deadline_of(request), entries[first][1] if first < position else NEVER_NS)
    if late_ns > 0 and first < position:
        before_ns = min(lane.predict_ns(max(1, round((position - first) * mean))) for lane in lanes)
        start_ns += before_ns // len(lanes)
        own_ns = min(lane.predict_ns(request.samples) for lane in lanes)
        room_ns = max(own_ns, min(full_ns, (deadline_of(request) - request.arrival_ns) // 2))
        late_ns = start_ns + room_ns - deadline_of(request)
    if request.latest_start_ns is not None:
        late_ns = max(late_ns, start_ns - request.latest_start_ns)
    return max(0, late_ns)


def backlog_ns(state: State, queue: Queue, now_ns: int) -> int:
    """How long until a lane of this queue has worked off everything that waits in it."""
    lanes = queue.usable_lanes
    if not lanes:
        return SECOND_NS
    return _wait_for_lane_ns(state, lanes, now_ns) + _work_ns(lanes, queue.max_batch, queue.waiting)


def _mean_samples(queue: Queue) -> float:
    requests = sum(map(len, queue.by_shape.values())) + sum(map(len, queue.retries))
    return queue.waiting / requests if requests else 1.0


def _others_ns(state: State, queue: Queue, request: Request) -> int:
    """The work that goes before the request and shares no batch with it."""
    total_ns = 0
    for other in _sharing(state, queue):
        ahead = sum(
            _ahead(entries, request)
            for shapes, entries in other.by_shape.items()
            if other is not queue or shapes != request.shapes
        )
        samples = round(ahead * _mean_samples(other))
        samples += sum(member.samples for group in other.retries for member in group)
        if samples:
            total_ns += _work_ns(other.usable_lanes or other.lanes, other.max_batch, samples)
    return total_ns


def _sharing(state: State, queue: Queue) -> list[Queue]:
    """The queue itself, and those that compete with it for a bounded device."""
    devices = {lane.device for lane in queue.lanes if lane.device in state.device_slots}
    return [
        other
        for other in state.queues.values()
        if other is queue or (other.waiting and any(lane.device in devices for lane in other.lanes))
    ]


def _ahead(entries: list[Entry], request: Request) -> int:
    """How many of another group's requests are more urgent."""
    priority, due_ns, _ = urgency(request)
    timed = bisect_left(entries, (priority, due_ns, -1, -1, request))
    first_untimed = bisect_left(entries, (priority, NEVER_NS, -1, -1, request))
    untimed = bisect_left(entries, (priority, NEVER_NS, due_ns - PATIENCE_NS, -1, request)) - first_untimed
    return timed + untimed


def _wait_for_lane_ns(state: State, lanes: list[Lane], now_ns: int) -> int:
    """How long until one of the lanes may start a batch: when it is free, and its device is."""
    blockers = lanes
    if state.device_is_full(lanes[0].device):
        blockers = [lane for lane in state.lanes() if lane.device == lanes[0].device and lane.in_flight]
    elif any(not lane.in_flight for lane in lanes):
        return 0
    return max(0, min(lane.free_at_ns for lane in blockers) - now_ns)


def _work_ns(lanes: list[Lane], max_batch: int, samples: int) -> int:
    full, rest = divmod(samples, max_batch)
    lane = lanes[0]
    total = full * lane.predict_ns(max_batch) + (lane.predict_ns(rest) if rest else 0)
    return total // len(lanes)
