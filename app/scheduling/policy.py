"""Who is let in, and what runs next: pure decisions over a state, at a time that is given.

No clock, no await, no I/O: the same file decides in the server and in the simulator.

The rules, in the order in which they bind:
 1. A request is never split. A batch is the longest prefix of requests with equal shapes that fits the
    model's limit, in the order (priority, deadline, arrival).
 2. Work-conserving and late-bound: a lane that is free takes what is there, at once; there is no window.
    While it runs, the next batch grows by itself.
 3. A batch is cut where one request more would make another late.
 4. A request that cannot be in time any more is given up only when others wait behind it; the last one runs,
    because that costs little and teaches the latency model. Heads that could be in time are given up as well
    when a batch without them saves more requests than they and the batch after them.
 5. A request is let in when it fits into the batch that it would join, or the next one has room to grow.
 6. An idle lane with an empty queue admits everything that could still be in time by the clock, whatever
    the latency model says of it; so a model that was wrong for a while always recovers.

Rules 2 to 4 follow the early drop of Nexus (Shen et al., SOSP 2019) with late binding.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from enum import Enum
from itertools import islice

from app.scheduling.forecast import backlog_ns, lateness_ns
from app.scheduling.queues import NEVER_NS, Entry, Lane, Queue, State, count_samples, deadline_of, urgency
from app.scheduling.request import ModelKey, Outcome, Request


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
    if queue.waiting + request.samples > queue.max_waiting and not state.is_idle(queue):
        return Refuse(RefusalReason.QUEUE_FULL, backlog_ns(state, queue, now_ns))
    if request.expiry_ns is not None:
        if request.expiry_ns <= now_ns:
            return Refuse(RefusalReason.EXPIRED, 0)
        late_ns = lateness_ns(state, queue, request, now_ns)
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
        lane = state.free_lane(queue)
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
        return _Candidate(queue, lane, requests, count_samples(requests), urgency(requests[0]))
    entries = min(queue.by_shape.values(), key=lambda entries: urgency(entries[0][-1]))
    requests = _prefix(entries, queue, lane, now_ns)
    return _Candidate(queue, lane, requests, count_samples(requests), urgency(requests[0]))


def _prefix(entries: list[Entry], queue: Queue, lane: Lane, now_ns: int, first: int = 0) -> tuple[Request, ...]:
    """The longest run from `first` that fits and in which nobody is late who need not be."""
    start_ns = _start_ns(lane, now_ns)
    chosen: list[Request] = []
    samples, earliest_ns = 0, NEVER_NS
    for _, deadline_ns, _, _, request in islice(entries, first, None):
        total = samples + request.samples
        if chosen and total > queue.max_batch:
            break
        earliest_with = min(earliest_ns, deadline_ns)
        if chosen and earliest_with < NEVER_NS and start_ns + lane.predict_ns(total) > earliest_with:
            break
        chosen.append(request)
        samples, earliest_ns = total, earliest_with
    return tuple(chosen)


def _start_ns(lane: Lane, now_ns: int) -> int:
    """When a batch that is given to the lane now would begin: after the one that it has."""
    return max(now_ns, lane.free_at_ns) if lane.in_flight else now_ns


def _dispatch(state: State, candidate: _Candidate, now_ns: int) -> Dispatch:
    queue, lane = candidate.queue, candidate.lane
    for request in candidate.requests:
        state.remove(request)
    predicted_ns = lane.predict_ns(candidate.samples)
    lane.free_at_ns = _start_ns(lane, now_ns) + predicted_ns
    lane.in_flight += 1
    return Dispatch(queue.key, lane, candidate.requests, candidate.samples, predicted_ns)


def _take_hopeless(state: State, queue: Queue, lane: Lane, now_ns: int) -> tuple[Request, ...]:
    """The heads that are given up by rule 4."""
    given_up: list[Request] = []
    for entries in list(queue.by_shape.values()):
        late = _late_heads(entries, lane, now_ns)
        if late == len(entries) and sum(map(len, queue.by_shape.values())) == late:
            late -= 1
        for entry in entries[: late + _sacrifices(entries, queue, lane, now_ns, late)]:
            state.remove(entry[-1])
            given_up.append(entry[-1])
    return tuple(given_up)


def _late_heads(entries: list[Entry], lane: Lane, now_ns: int) -> int:
    """How many heads would be late even if they ran alone at once."""
    start_ns = _start_ns(lane, now_ns)
    for position, entry in enumerate(entries):
        if start_ns + lane.predict_ns(entry[-1].samples) <= entry[1]:
            return position
    return len(entries)


def _sacrifices(entries: list[Entry], queue: Queue, lane: Lane, now_ns: int, first: int) -> int:
    """How many requests from `first` on, in time if they ran now, cost more others than they are."""
    everybody = _fill(entries, queue, first)
    if first >= len(entries) or len(everybody) < 2:
        return 0
    in_time = _prefix(entries, queue, lane, now_ns, first)
    if len(in_time) == len(everybody):
        return 0
    start_ns = _start_ns(lane, now_ns)
    after_ns = start_ns + lane.predict_ns(count_samples(in_time))
    following = _fill(entries, queue, first + len(in_time))
    following_end_ns = after_ns + lane.predict_ns(count_samples(following))
    saved = len(in_time) + sum(deadline_of(request) >= following_end_ns for request in following)

    def fits(position: int) -> bool:
        end_ns = start_ns + lane.predict_ns(count_samples(_fill(entries, queue, position)))
        return end_ns <= entries[position][1]

    # Only among equals: nobody gives way to a lower class.
    equals = bisect_left(entries, (entries[first][0] + 1,), key=lambda entry: entry[:1])
    later = bisect_left(range(first, equals), True, key=fits) + first
    if later < equals and len(_fill(entries, queue, later)) > saved:
        return later - first
    return 0


def _fill(entries: list[Entry], queue: Queue, first: int) -> tuple[Request, ...]:
    """The longest run from `first` that fits into a batch, deadlines aside."""
    chosen: list[Request] = []
    samples = 0
    for entry in islice(entries, first, None):
        samples += entry[-1].samples
        if chosen and samples > queue.max_batch:
            break
        chosen.append(entry[-1])
    return tuple(chosen)
