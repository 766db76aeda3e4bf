"""What is admitted, and what runs next: pure decisions over a state, at a time that is given.

No clock, no await, no I/O: the same file decides in the server and in the simulator.

The rules, in the order in which they bind:
 1. A request is never split. A batch is the longest prefix of requests with equal shapes that fits the
    model's limit, in the order (level, deadline, arrival). The level is the request's priority, 1 the most urgent, or
    its model's default.
 2. Work-conserving and late-bound: a lane that is free takes what is there, at once; there is no window.
    While it runs, the next batch grows by itself. Where a device holds two batches, the second is started when
    it is full, or just so early that it can compute as soon as the first has ended; until then it grows.
 3. A batch is cut where one request more would make another late.
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
 9. One batch in eight of a device is for requests that have waited for a second while more urgent ones went first: the
    oldest, and those of its level and shape behind it. So none waits for ever.

Rules 2 to 4 follow the early drop of Nexus (Shen et al., SOSP 2019) with late binding.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from convoy.app.scheduling.early_drop import early_drops
from convoy.app.scheduling.forecast import backlog_ns, lateness_ns
from convoy.app.scheduling.queues import (
    NEVER_NS,
    PATIENCE_NS,
    Dispatch,
    Entry,
    Lane,
    LaneForecast,
    Queue,
    State,
    Timeline,
    count_samples,
    urgency,
)
from convoy.app.scheduling.request import Outcome, Request

# Of a device's batches, one in this many is for overdue requests. Of the requests that are late, alone and in the way
# of other models, one in this many is run, because what is expected of their model may be wrong.
ONE_IN = 8
# Where no request is overdue, the next look is after this time: decisions are many, overdue requests few.
LOOK_AGAIN_NS = PATIENCE_NS // 16


class RefusalReason(Enum):
    QUEUE_FULL = "queue_full"
    PREDICTED_LATE = "predicted_late"
    EXPIRED = "expired"


class Refuse(NamedTuple):
    """The request was not taken. A retry after `retry_after_ns` has a chance if no others come."""

    reason: RefusalReason
    retry_after_ns: int


class Drop(NamedTuple):
    """These requests have left the queue unanswered."""

    requests: tuple[Request, ...]
    outcome: Outcome


class Wait(NamedTuple):
    """Nothing to do before the next arrival, completion, or this time."""

    until_ns: int | None


Decision = Dispatch | Drop | Wait


def admit(state: State, request: Request, now_ns: int) -> Refuse | None:
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
    return None


def complete(state: State, dispatch: Dispatch, now_ns: int) -> None:
    """A batch has left its lane; what is behind it computes from now on."""
    dispatch.lane.in_flight -= 1
    timeline = state.timeline(dispatch.lane)
    timeline.batches.remove(dispatch)
    timeline.begun_ns = now_ns


def learn(dispatch: Dispatch, took_ns: int, staging_ns: int) -> None:
    """Teach the latency model what a batch took that has not failed.

    `took_ns`: from its start to its end less what it waited for the device; `staging_ns`: of that what came before
    computing.
    """
    lane = dispatch.lane
    lane.latency.observe(lane.padded(dispatch.samples), took_ns)
    if lane.depth > 1:  # else nothing is hidden
        lane.staging.observe(lane.padded(dispatch.samples), max(0, staging_ns))


def blame(state: State, dispatch: Dispatch, wanted: tuple[Request, ...]) -> tuple[Request, ...]:
    """A batch has failed: return the request that failed alone, or let the halves of the batch wait to be tried.

    `wanted` are the members whose callers still wait. Nothing is returned of others.
    """
    if len(dispatch.requests) == 1:
        return wanted
    state.enqueue_halves(wanted)
    return ()


def decide(state: State, now_ns: int) -> Decision:
    """The next thing to do at `now_ns`. Call until it says Wait."""
    if state.expiries and state.expiries[0][0] <= now_ns:
        return Drop(state.take_expired(now_ns), Outcome.EXPIRED)
    wake_ns = state.expiries[0][0] if state.expiries else NEVER_NS
    _raise_overdue(state, now_ns)
    plans: list[_Plan] = []
    for queue in state.queues.values():
        having_room = [lane for lane in queue.lanes if state.has_room(lane)] if queue.waiting else []
        if having_room:
            plans.append(_plan(state, queue, having_room, now_ns))
    if len(plans) > 1:
        plans.sort(key=_urgency)
    kept: list[Timeline] = []  # for a batch that is to start later and is more urgent than those that follow
    for plan in plans:
        timeline = plan.forecast.timeline
        if timeline in kept:
            continue
        if plan.start_ns <= now_ns:
            return _start(state, plan)
        kept.append(timeline)
        wake_ns = min(wake_ns, plan.start_ns)
    return Wait(None if wake_ns == NEVER_NS else wake_ns)


class _Plan(NamedTuple):
    """What a queue would run next, where and when; `is_best`: no other lane would finish it sooner.

    `requests` are the first of `entries`, which are a group: the longest run that fits into a batch, deadlines aside.
    """

    queue: Queue
    entries: list[Entry]
    requests: tuple[Request, ...]
    forecast: LaneForecast
    start_ns: int
    is_best: bool


def _plan(state: State, queue: Queue, having_room: list[Lane], now_ns: int) -> _Plan:
    """The next batch of a queue that has lanes with room."""
    entries = min(queue.groups.values(), key=lambda entries: urgency(entries[0]))
    requests = _run(entries, queue.max_batch)
    samples = count_samples(requests)
    forecast, is_best = _place(state, queue, having_room, entries[0], samples, now_ns)
    may_grow = len(requests) == len(entries) and samples < queue.max_batch and requests[0].id not in queue.raised
    start_ns = now_ns
    if forecast.lane not in having_room:
        start_ns = max(forecast.free_ns, now_ns + max(1, _doubt_ns(forecast, samples)))
    elif may_grow and forecast.timeline.batches:
        # Until then the device will not wait for it.
        start_ns = forecast.timeline.may_be_free_ns(now_ns) - forecast.lane.lead_ns(samples)
    return _Plan(queue, entries, requests, forecast, start_ns, is_best)


def _place(
    state: State, queue: Queue, having_room: list[Lane], first: Entry, samples: int, now_ns: int
) -> tuple[LaneForecast, bool]:
    """The lane for a queue's next batch, by rule 7, and whether no other would finish it sooner.

    It may be one that has no room yet.
    """
    if len(queue.lanes) == 1:  # nearly always
        return state.forecast(having_room[0], now_ns), True
    forecasts = [state.forecast(lane, now_ns) for lane in queue.usable_lanes]
    now = [one for one in forecasts if one.lane in having_room]
    best = min(now, key=lambda one: one.expected_end_ns(samples))
    best_ns, doubt_ns = best.expected_end_ns(samples), _doubt_ns(best, samples)
    busy = [one for one in forecasts if one not in now and one.expected_end_ns(samples) < best_ns - doubt_ns]
    if not busy:
        equals = [one for one in now if one.expected_end_ns(samples) <= best_ns + doubt_ns]
        # The one whose device has rested longest.
        return min(equals, key=lambda one: (len(one.timeline.batches), one.timeline.begun_ns, one.lane.id)), True
    # Better lanes are busy. What waits is worth a slower one when they could not do all of it in the same time.
    waiting = -(-queue.waiting // queue.max_batch)
    done_elsewhere = sum((best_ns - one.free_ns) // max(1, one.lane.expect_ns(queue.max_batch)) for one in busy)
    if waiting > max(1, done_elsewhere) and best.ends_ns(samples) <= first[1]:
        return best, False
    return min(busy, key=lambda one: one.free_ns), True


def _doubt_ns(forecast: LaneForecast, samples: int) -> int:
    """Predictions are no better than an eighth of what they predict: lanes so close to each other count as equal."""
    return forecast.lane.expect_ns(samples) // 8


def _urgency(plan: _Plan) -> tuple[int, int, int]:
    """By when the first request must start: else a slow model, always due later, would starve beside a fast one."""
    level, due_ns, number = urgency(plan.entries[0])
    return level, due_ns - plan.forecast.lane.behind_ns(plan.requests[0].samples), number


def _start(state: State, plan: _Plan) -> Dispatch | Drop:
    queue, forecast, requests = plan.queue, plan.forecast, plan.requests
    lane, timeline = forecast.lane, forecast.timeline
    if queue.dated:  # else none can be late
        hopeless = _take_hopeless(state, queue, forecast) if plan.is_best else ()
        if hopeless:
            return Drop(hopeless, Outcome.HOPELESS)
        requests = _run(plan.entries, queue.max_batch, forecast)
    for request in requests:
        state.remove(request)
    samples = count_samples(requests)
    hidden_ns = lane.hidden_ns(samples)
    ready_ns, takes_ns = forecast.now_ns + hidden_ns, lane.behind_ns(samples)
    predicted_ns = max(forecast.free_ns, ready_ns) + takes_ns - forecast.now_ns
    soonest_ns = max(0, lane.latency.soonest_ns(lane.padded(samples)) - hidden_ns)
    dispatch = Dispatch(queue.key, lane, requests, samples, predicted_ns, ready_ns, takes_ns, soonest_ns)
    timeline.batches.append(dispatch)
    timeline.batches_to_overdue -= 1
    lane.in_flight += 1
    return dispatch


def _run(entries: list[Entry], most: int, forecast: LaneForecast | None = None) -> tuple[Request, ...]:
    """The longest run from the first of at most `most` samples in which, by a forecast, none is late without need."""
    chosen: list[Request] = []
    samples, earliest_ns = 0, NEVER_NS
    for _, deadline_ns, _, _, request in entries:
        samples += request.samples
        earliest_ns = min(earliest_ns, deadline_ns)
        if chosen and (samples > most or (forecast is not None and forecast.ends_ns(samples) > earliest_ns)):
            break
        chosen.append(request)
    return tuple(chosen)


def _take_hopeless(state: State, queue: Queue, forecast: LaneForecast) -> tuple[Request, ...]:
    """The heads that are given up by rule 4."""
    given_up: list[Request] = []
    for entries in list(queue.groups.values()):
        in_time = (at for at, entry in enumerate(entries) if forecast.ends_ns(entry[-1].samples) <= entry[1])
        late = next(in_time, len(entries))
        if late == queue.requests and _keeps_last(state, queue, forecast):
            late -= 1
        heads = [entry[-1] for entry in entries[: late + early_drops(state, queue, entries, forecast, late)]]
        for request in heads:
            state.remove(request)
        given_up += heads
    return tuple(given_up)


def _keeps_last(state: State, queue: Queue, forecast: LaneForecast) -> bool:
    """Whether the last request that waits is run though it will be late: no other waits, or it is time to learn again.

    Counts those that would make another wait.
    """
    if not state.beside(queue, forecast.lane):
        return True
    queue.given_up_alone += 1
    return queue.given_up_alone % ONE_IN == 0


def _raise_overdue(state: State, now_ns: int) -> None:
    """Where a device owes a batch to overdue requests, by rule 9, put the oldest before all others."""
    latest_ns = now_ns - PATIENCE_NS
    longest_waiting = next(iter(state.waiting.values()), None)
    if longest_waiting is None or longest_waiting.arrival_ns > latest_ns:
        return
    for queue in state.queues.values():
        for lane in queue.lanes if queue.waiting else ():
            timeline = state.timeline(lane)
            if timeline.batches_to_overdue <= 0 and timeline.look_for_overdue_ns <= now_ns:
                overdue = _overdue(state, queue, lane, latest_ns)
                if overdue:
                    state.raise_up(overdue)
                    timeline.batches_to_overdue = ONE_IN
                else:
                    timeline.look_for_overdue_ns = now_ns + LOOK_AGAIN_NS


def _overdue(state: State, queue: Queue, lane: Lane, latest_ns: int) -> tuple[Request, ...]:
    """The next batch for overdue requests of the lane's device: the oldest that came by then, and those behind it."""
    queues = [queue, *(other for other, _ in state.beside(queue, lane))]
    top = min(entries[0][0] for one in queues for entries in one.groups.values())
    overdue = [
        entry
        for one in queues
        for entries in one.groups.values()
        for entry in entries
        # One of the most urgent level that has a deadline ends by then.
        if entry[2] <= latest_ns and (entry[0] > top or entry[1] == NEVER_NS) and not one.raised
    ]
    if not overdue:
        return ()
    first = min(overdue, key=lambda entry: entry[2:4])
    request = first[-1]
    queue = state.queues[request.key]
    alike = [entry for entry in queue.groups[request.shapes] if entry[0] == first[0] and entry[2] <= latest_ns]
    return _run([entry for entry in alike if entry >= first], queue.max_batch)
