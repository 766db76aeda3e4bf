"""Who is let in, and what runs next: pure decisions over a state, at a time that is given.

No clock, no await, no I/O: the same file decides in the server and in the simulator.

The rules, in the order in which they bind:
 1. A request is never split. A batch is the longest prefix of requests with equal shapes that fits the
    model's limit, in the order (priority, deadline, arrival).
 2. Work-conserving and late-bound: a lane that is free takes what is there, at once; there is no window.
    While it runs, the next batch grows by itself.
 3. A batch is cut where one request more would make another late.
 4. A request that cannot be in time any more is given up only when others wait behind it; alone it runs,
    because that costs nobody anything and teaches the latency model.
 5. An idle lane with an empty queue admits everything that could still be in time by the clock, whatever
    the latency model says; so a model that was wrong for a while always recovers.

Rules 2 to 4 follow the early drop of Nexus (Shen et al., SOSP 2019) with late binding.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from enum import Enum

from app.scheduling.queues import NEVER_NS, Entry, Lane, Queue, State, count_samples, order_of
from app.scheduling.request import SECOND_NS, ModelKey, Outcome, Request

# Between models, a request without a deadline counts as one due this long after it came. Else a stream
# of deadlines at one model could starve another for ever.
PATIENCE_NS = SECOND_NS


@dataclass(frozen=True, slots=True)
class Admit:
    pass


class RefusalReason(Enum):
    QUEUE_FULL = "queue_full"
    PREDICTED_LATE = "predicted_late"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class Refuse:
    """The request was not taken. A retry after `retry_after_ns` has a chance if nobody else comes."""

    reason: RefusalReason
    retry_after_ns: int


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Run these requests as one batch on this lane. They have left the queue."""

    key: ModelKey
    lane: Lane
    requests: tuple[Request, ...]
    samples: int
    predicted_ns: int


@dataclass(frozen=True, slots=True)
class Drop:
    """These requests have left the queue unanswered."""

    requests: tuple[Request, ...]
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do before the next arrival, completion, or this time."""

    until_ns: int | None


Decision = Dispatch | Drop | Wait


def admit(state: State, request: Request, now_ns: int) -> Admit | Refuse:
    """Take the request into its queue, or say why not and when to try again."""
    queue = state.queues[request.key]
    if queue.waiting + request.samples > queue.max_waiting:
        return Refuse(RefusalReason.QUEUE_FULL, _backlog_ns(state, queue, queue.waiting, now_ns))
    if request.expiry_ns is not None:
        if request.expiry_ns <= now_ns:
            return Refuse(RefusalReason.EXPIRED, 0)
        late_ns = _predicted_lateness_ns(state, queue, request, now_ns)
        if late_ns > 0:
            return Refuse(RefusalReason.PREDICTED_LATE, late_ns)
    state.enqueue(request)
    return Admit()


def complete(state: State, decision: Dispatch, now_ns: int, took_ns: int | None) -> None:
    """A batch has left its lane; `took_ns` teaches the latency model and is None when it failed."""
    lane = decision.lane
    lane.in_flight -= 1
    lane.free_at_ns = max(now_ns, lane.free_at_ns) if lane.in_flight else now_ns
    if took_ns is not None:
        lane.latency.observe(lane.padded(decision.samples), took_ns)


def blame(state: State, decision: Dispatch, wanted: tuple[Request, ...]) -> Request | None:
    """A batch has failed: the request that is to blame, or None after putting the halves back to be tried.

    `wanted` are the members that somebody still waits for. Only a request that failed alone is to blame.
    """
    if len(decision.requests) == 1:
        return decision.requests[0]
    state.enqueue_halves(wanted)
    return None


def decide(state: State, now_ns: int) -> Decision:
    """The next thing to do at `now_ns`. Call until it says Wait."""
    expired = state.take_expired(now_ns)
    if expired:
        return Drop(expired, Outcome.EXPIRED)
    best: _Candidate | None = None
    for queue in state.queues.values():
        if not queue.waiting:
            continue
        lane = _free_lane(state, queue)
        if lane is None:
            continue
        hopeless = _take_hopeless(state, queue, lane, now_ns)
        if hopeless:
            return Drop(hopeless, Outcome.HOPELESS)
        candidate = _candidate(queue, lane, now_ns)
        if best is None or candidate.urgency < best.urgency:
            best = candidate
    if best is None:
        return Wait(state.next_expiry_ns)
    return _dispatch(state, best, now_ns)


@dataclass(frozen=True, slots=True)
class _Candidate:
    queue: Queue
    lane: Lane
    requests: tuple[Request, ...]
    samples: int
    urgency: tuple[int, int, int]


def _candidate(queue: Queue, lane: Lane, now_ns: int) -> _Candidate:
    if queue.retries:
        requests = queue.retries[0]
        return _Candidate(queue, lane, requests, count_samples(requests), _urgency(requests[0]))
    entries = min(queue.by_shape.values(), key=lambda entries: _urgency(entries[0][-1]))
    requests = _prefix(entries, queue, lane, now_ns)
    return _Candidate(queue, lane, requests, count_samples(requests), _urgency(requests[0]))


def _prefix(entries: list[Entry], queue: Queue, lane: Lane, now_ns: int) -> tuple[Request, ...]:
    """The longest prefix that fits and in which nobody is late who need not be."""
    chosen: list[Request] = []
    samples, earliest_ns = 0, NEVER_NS
    for _, deadline_ns, _, _, request in entries:
        total = samples + request.samples
        if chosen and total > queue.max_batch:
            break
        earliest_with = min(earliest_ns, deadline_ns)
        if chosen and earliest_with < NEVER_NS and now_ns + lane.predict_ns(total) > earliest_with:
            break
        chosen.append(request)
        samples, earliest_ns = total, earliest_with
    return tuple(chosen)


def _dispatch(state: State, candidate: _Candidate, now_ns: int) -> Dispatch:
    queue, lane = candidate.queue, candidate.lane
    for request in candidate.requests:
        state.remove(request)
    predicted_ns = lane.predict_ns(candidate.samples)
    lane.in_flight += 1
    lane.free_at_ns = max(now_ns, lane.free_at_ns if lane.in_flight > 1 else 0) + predicted_ns
    return Dispatch(queue.key, lane, candidate.requests, candidate.samples, predicted_ns)


def _take_hopeless(state: State, queue: Queue, lane: Lane, now_ns: int) -> tuple[Request, ...]:
    """Heads that will be late even if they run alone at once, as long as others wait behind them."""
    given_up: list[Request] = []
    for entries in list(queue.by_shape.values()):
        while entries and len(state.waiting) > 1:
            request = entries[0][-1]
            if request.deadline_ns is None or now_ns + lane.predict_ns(request.samples) <= request.deadline_ns:
                break
            state.remove(request)
            given_up.append(request)
    return tuple(given_up)


def _free_lane(state: State, queue: Queue) -> Lane | None:
    free = [
        lane
        for lane in queue.lanes
        if not lane.stopping and lane.in_flight < lane.depth and not state.device_is_full(lane.device)
    ]
    return min(free, key=lambda lane: (lane.free_at_ns, lane.in_flight, lane.id), default=None)


def _urgency(request: Request) -> tuple[int, int, int]:
    due = request.arrival_ns + PATIENCE_NS if request.deadline_ns is None else request.deadline_ns
    return (request.priority, due, request.id)


def _predicted_lateness_ns(state: State, queue: Queue, request: Request, now_ns: int) -> int:
    """By how much the request is expected to miss what it asks for; 0 when it should be in time."""
    lanes = [lane for lane in queue.lanes if not lane.stopping]
    if not lanes or _idle(state, queue):
        return 0
    start_ns = now_ns + _backlog_ns(state, queue, _samples_ahead(queue, request), now_ns)
    own_ns = min(lane.predict_ns(request.samples) for lane in lanes)
    late = 0
    if request.deadline_ns is not None:
        late = start_ns + own_ns - request.deadline_ns
    if request.latest_start_ns is not None:
        late = max(late, start_ns - request.latest_start_ns)
    return max(0, late)


def _idle(state: State, queue: Queue) -> bool:
    return not queue.waiting and _free_lane(state, queue) is not None


def _samples_ahead(queue: Queue, request: Request) -> int:
    """How many samples of its own queue will be served before it: exact in requests, average in samples."""
    total = sum(len(entries) for entries in queue.by_shape.values())
    if not total:
        return queue.waiting
    entry = order_of(request)
    ahead = sum(bisect_left(entries, entry) for entries in queue.by_shape.values())
    return queue.waiting * ahead // total


def _backlog_ns(state: State, queue: Queue, own_samples: int, now_ns: int) -> int:
    """How long until a lane of this queue has worked off `own_samples` and its device's other queues."""
    lanes = [lane for lane in queue.lanes if not lane.stopping]
    if not lanes:
        return SECOND_NS
    device = lanes[0].device
    sharing = [
        other
        for other in state.queues.values()
        if other is not queue and other.waiting and any(lane.device == device for lane in other.lanes)
    ]
    work_ns = _work_ns(lanes, queue.max_batch, own_samples)
    work_ns += sum(_work_ns(other.lanes, other.max_batch, other.waiting) for other in sharing)
    return _wait_for_lane_ns(state, lanes, now_ns) + work_ns


def _wait_for_lane_ns(state: State, lanes: list[Lane], now_ns: int) -> int:
    """How long until one of the lanes may start a batch: when it is free, and its device is."""
    blockers = lanes
    if state.device_is_full(lanes[0].device):
        blockers = [lane for lane in state.lanes() if lane.device == lanes[0].device and lane.in_flight]
    elif any(lane.in_flight < lane.depth for lane in lanes):
        return 0
    return max(0, min(lane.free_at_ns for lane in blockers) - now_ns)


def _work_ns(lanes: list[Lane], max_batch: int, samples: int) -> int:
    full, rest = divmod(samples, max_batch)
    lane = lanes[0]
    total = full * lane.predict_ns(max_batch) + (lane.predict_ns(rest) if rest else 0)
    return total // len(lanes)
