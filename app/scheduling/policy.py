"""What is admitted, and what runs next: pure decisions over a state, at a time that is given.

No clock, no await, no I/O: the same file decides in the server and in the simulator.

The rules, in the order in which they bind:
 1. A request is never split. A batch is the longest prefix of requests with equal shapes that fits the
    model's limit, in the order (level, deadline, arrival). The level is the request's priority, 1 the most urgent, or
    its model's default.
 2. Work-conserving and late-bound: a lane that is free takes what is there, at once; there is no window.
    While it runs, the next batch grows by itself. Where a device holds two batches, the second is started when
    it is full, or just so early that it can compute as soon as the first has ended; until then it grows.
 3. A batch is cut where one request more would make another late, and a large one where it would take more than
    half of its first request's time: so that a request that comes when it begins is in time in the next.
 4. A request that cannot be in time any more is given up only when others wait for the device, of its own model or
    of another; else it runs, because that costs little and teaches the latency model. For the same reason one in
    eight runs of those that are in the way of other models alone. Heads that could be in time are given up as well
    when that saves more requests than smaller batches that keep them.
 5. A request is admitted when it could be in time by itself, and at most twice as many requests that could be in
    time wait before it as can be served until its deadline.
 6. An idle lane with an empty queue admits everything that could still be in time by the clock, whatever
    the latency model says of it; so a model that was wrong for a while always recovers.
 7. Among several devices a batch goes to the one that is expected to finish it first, even if that is busy
    and another is idle; a slower one is used when so much waits that it finishes before the faster ones would.
 8. Among several models on a device, that one goes first whose first request is of the most urgent level and, among
    equals, must start soonest to be in time.
 9. One batch in eight of a device is for requests that have waited for a second while more urgent ones went first, so
    that none waits for ever (`patience`).

Rules 2 to 4 follow the early drop of Nexus (Shen et al., SOSP 2019) with late binding.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from convoy.app.scheduling.early_drop import early_drops, most_samples
from convoy.app.scheduling.forecast import backlog_ns, lateness_ns
from convoy.app.scheduling.patience import raise_overdue
from convoy.app.scheduling.queues import (
    NEVER_NS,
    Entry,
    Lane,
    LaneForecast,
    Queue,
    State,
    Timeline,
    count_samples,
    deadline_of,
    urgency,
)
from convoy.app.scheduling.request import ModelKey, Outcome, Request

# Predictions are no better than this part of what they predict: lanes so close to each other count as equal.
_DOUBT = 8


class Placement(NamedTuple):
    """`is_best`: no other lane would finish the batch sooner."""

    forecast: LaneForecast
    is_best: bool


class LookAgain(NamedTuple):
    """Every lane that has room would finish the batch later than one that has none. So long as that holds."""

    at_ns: int


def place(
    state: State, queue: Queue, having_room: list[Lane], first: Request, samples: int, now_ns: int
) -> Placement | LookAgain:
    """Where the next batch of a queue goes, of whose lanes some have room."""
    if len(queue.lanes) == 1:  # nearly always
        return Placement(state.forecast(having_room[0], now_ns), is_best=True)
    chosen = _soonest(state, having_room, samples, now_ns)
    doubt_ns = chosen.lane.expect_ns(samples) // _DOUBT
    ends_ns = chosen.expected_end_ns(samples) - doubt_ns
    sooner = [
        forecast
        for forecast in (state.forecast(lane, now_ns) for lane in queue.usable_lanes if lane not in having_room)
        if forecast.expected_end_ns(samples) < ends_ns
    ]
    if not sooner:
        return Placement(chosen, is_best=True)
    # Better lanes are busy. What waits is worth a slower one when they could not do all of it in the same time.
    waiting = -(-queue.waiting // queue.max_batch)
    done_elsewhere = sum((ends_ns - one.free_ns) // max(1, one.lane.expect_ns(queue.max_batch)) for one in sooner)
    if waiting > max(1, done_elsewhere) and chosen.ends_ns(samples) <= deadline_of(first):
        return Placement(chosen, is_best=False)
    return LookAgain(max(now_ns + max(1, doubt_ns), min(one.free_ns for one in sooner)))


def _soonest(state: State, lanes: list[Lane], samples: int, now_ns: int) -> LaneForecast:
    """The lane that ends first; among those that are as good, the one whose device has rested longest."""
    forecasts = [state.forecast(lane, now_ns) for lane in lanes]
    best = min(forecasts, key=lambda one: one.expected_end_ns(samples))
    enough_ns = best.expected_end_ns(samples) + best.lane.expect_ns(samples) // _DOUBT
    equals = [one for one in forecasts if one.expected_end_ns(samples) <= enough_ns]

    def rested(one: LaneForecast) -> tuple[int, int, int]:
        return len(one.timeline.batches), one.timeline.begun_ns, one.lane.id

    return min(equals, key=rested)


class Admit(NamedTuple):
    """The request waits in its queue now."""


class RefusalReason(Enum):
    QUEUE_FULL = "queue_full"
    PREDICTED_LATE = "predicted_late"
    EXPIRED = "expired"


class Refuse(NamedTuple):
    """The request was not taken. A retry after `retry_after_ns` has a chance if no others come."""

    reason: RefusalReason
    retry_after_ns: int


class Dispatch(NamedTuple):
    """Run these requests as one batch on this lane. They have left the queue."""

    key: ModelKey
    lane: Lane
    requests: tuple[Request, ...]
    samples: int
    predicted_ns: int


class Drop(NamedTuple):
    """These requests have left the queue unanswered."""

    requests: tuple[Request, ...]
    outcome: Outcome


class Wait(NamedTuple):
    """Nothing to do before the next arrival, completion, or this time."""

    until_ns: int | None


Decision = Dispatch | Drop | Wait
_ADMITTED = Admit()
# Of the requests that are late, alone and in the way of other models, one in this many is run, because what is expected
# of their model may be wrong.
_LEARN_FROM_ONE_IN = 8


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
    return _ADMITTED


def complete(state: State, decision: Dispatch, now_ns: int) -> None:
    """A batch has left its lane."""
    lane = decision.lane
    lane.in_flight -= 1
    state.timeline(lane).leave(decision.requests[0].id, now_ns)


def learn(decision: Dispatch, took_ns: int, staging_ns: int | None = None) -> None:
    """Teach the latency model what a batch took that has not failed.

    `took_ns`: from its start to its end less what it waited for the device; `staging_ns`: of that what came before
    computing.
    """
    lane = decision.lane
    lane.latency.observe(lane.padded(decision.samples), took_ns)
    if staging_ns is not None:
        lane.staging.observe(lane.padded(decision.samples), max(0, staging_ns))


def blame(state: State, decision: Dispatch, wanted: tuple[Request, ...]) -> Request | None:
    """A batch has failed: the request that is to blame, or None after putting the halves back to be tried.

    `wanted` are the members whose callers still wait. Only a request that failed alone is to blame.
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
    raise_overdue(state, now_ns)
    expiry_ns = state.next_expiry_ns
    wake_ns = NEVER_NS if expiry_ns is None else expiry_ns
    plans: list[_Plan] = []
    for queue in state.queues.values():
        plan = _plan(state, queue, now_ns) if queue.waiting else None
        if isinstance(plan, _Plan):
            plans.append(plan)
        elif plan is not None:
            wake_ns = min(wake_ns, plan.at_ns)
    kept: list[Timeline] = []  # for a batch that is to start later and is more urgent than those that follow
    if len(plans) > 1:
        plans.sort(key=_urgency)
    for plan in plans:
        timeline = plan.placement.forecast.timeline
        if timeline in kept:
            continue
        if plan.start_ns <= now_ns:
            return _start(state, plan)
        kept.append(timeline)
        wake_ns = min(wake_ns, plan.start_ns)
    return Wait(None if wake_ns == NEVER_NS else wake_ns)


class _Plan(NamedTuple):
    """What a queue would run next, where and when. `entries` are of one shape; None: a batch to be tried again.

    `requests` are the longest run that fits, deadlines aside.
    """

    queue: Queue
    entries: list[Entry] | None
    placement: Placement
    requests: tuple[Request, ...]
    start_ns: int


def _plan(state: State, queue: Queue, now_ns: int) -> _Plan | LookAgain | None:
    having_room = state.having_room(queue)
    if not having_room:
        return None
    entries = None if queue.retries else _most_urgent(queue)
    requests = queue.retries[0] if entries is None else _fill(entries, queue)
    samples = count_samples(requests)
    placement = place(state, queue, having_room, requests[0], samples, now_ns)
    if not isinstance(placement, Placement):
        return placement
    may_grow = entries is not None and len(requests) == len(entries) and samples < queue.max_batch
    start_ns = _latest_start_ns(placement.forecast, samples) if may_grow else now_ns
    return _Plan(queue, entries, placement, requests, start_ns)


def _most_urgent(queue: Queue) -> list[Entry]:
    return min(queue.by_shape.values(), key=lambda entries: urgency(entries[0]))


def _urgency(plan: _Plan) -> tuple[int, int, int]:
    """By when the first request must start: else a slow model, always due later, would starve beside a fast one."""
    first, lane = plan.requests[0], plan.placement.forecast.lane
    level, due_ns, number = urgency(plan.queue.order_of(first))
    return level, due_ns - lane.behind_ns(first.samples), number


def _latest_start_ns(forecast: LaneForecast, samples: int) -> int:
    """Until then the batch may grow, and the device will not wait for it."""
    if not forecast.timeline.batches:
        return forecast.now_ns
    return forecast.timeline.may_be_free_ns(forecast.now_ns) - forecast.lane.lead_ns(samples)


def _start(state: State, plan: _Plan) -> Dispatch | Drop:
    queue, forecast, requests = plan.queue, plan.placement.forecast, plan.requests
    if queue.dated:  # else none can be late
        hopeless = _take_hopeless(state, queue, forecast) if plan.placement.is_best else ()
        if hopeless:
            return Drop(hopeless, Outcome.HOPELESS)
        if plan.entries is not None:
            requests = _prefix(plan.entries, queue, forecast)
    if plan.entries is None:
        for request in requests:
            state.remove(request)
    else:
        state.remove_heads(queue, plan.entries, len(requests))
    lane, samples = forecast.lane, count_samples(requests)
    batch = lane.in_flight_batch(requests[0].id, samples, forecast.now_ns)
    ends_ns = max(forecast.free_ns, batch.ready_ns) + batch.takes_ns
    forecast.timeline.begin(batch)
    lane.in_flight += 1
    return Dispatch(queue.key, lane, requests, samples, ends_ns - forecast.now_ns)


def _prefix(entries: list[Entry], queue: Queue, forecast: LaneForecast) -> tuple[Request, ...]:
    """The longest run from the first that fits and in which no request is late without need."""
    chosen: list[Request] = []
    samples, earliest_ns = 0, NEVER_NS
    most = most_samples(queue, entries, forecast, 0)
    for _, deadline_ns, _, _, request in entries:
        total = samples + request.samples
        if chosen and total > most:
            break
        earliest_with = min(earliest_ns, deadline_ns)
        if chosen and earliest_with < NEVER_NS and forecast.ends_ns(total) > earliest_with:
            break
        chosen.append(request)
        samples, earliest_ns = total, earliest_with
    return tuple(chosen)


def _take_hopeless(state: State, queue: Queue, forecast: LaneForecast) -> tuple[Request, ...]:
    """The heads that are given up by rule 4."""
    given_up: list[Request] = []
    for entries in list(queue.by_shape.values()):
        late = _late_heads(entries, forecast)
        if late == len(entries) and queue.requests == late and _keeps_last(state, queue, forecast):
            late -= 1
        for entry in entries[: late + early_drops(state, queue, entries, forecast, late)]:
            state.remove(entry[-1])
            given_up.append(entry[-1])
    return tuple(given_up)


def _keeps_last(state: State, queue: Queue, forecast: LaneForecast) -> bool:
    """Whether the last request that waits is run though it will be late: no other waits, or it is time to learn again.

    Counts those that would make another wait.
    """
    if not state.beside(queue, forecast.lane):
        return True
    queue.given_up_alone += 1
    return queue.given_up_alone % _LEARN_FROM_ONE_IN == 0


def _late_heads(entries: list[Entry], forecast: LaneForecast) -> int:
    """How many heads would be late even if they ran alone at once."""
    for position, entry in enumerate(entries):
        if forecast.ends_ns(entry[-1].samples) <= entry[1]:
            return position
    return len(entries)


def _fill(entries: list[Entry], queue: Queue) -> tuple[Request, ...]:
    """The longest run from the first that fits into a batch, deadlines aside."""
    chosen: list[Request] = []
    samples = 0
    for entry in entries:
        samples += entry[-1].samples
        if chosen and samples > queue.max_batch:
            break
        chosen.append(entry[-1])
    return tuple(chosen)
