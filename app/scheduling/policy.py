"""Decide which requests to admit and what to run next: pure functions of a state and a given time.

There is no clock, await or I/O here: the same file decides in the server and in the simulator.

The rules, in the order of their precedence:
 1. A request is never split. A batch is the longest prefix of requests with equal shapes that fits the model's limit,
    in the order (level, deadline, arrival). The level is the request's priority (1 is the most urgent) or the model's
    default.
 2. Batching is work-conserving and late-binding: a free lane takes what is waiting at once, without a batching window,
    and the next batch grows while it runs. If a device holds two batches, the second starts when it is full, or just
    early enough to compute as soon as the first ends.
 3. A batch stops growing where one more request would make another late.
 4. A request that can no longer be in time is dropped only if other requests wait for the device. Otherwise it runs,
    because that costs little and updates the latency model. For the same reason one in eight runs even if requests of
    other models wait. Requests at the head that could be in time are dropped as well if that saves more requests than
    smaller batches would (`early_drop`).
 5. A request is admitted if it could be in time by itself, and if at most twice as many requests are ahead of it as can
    be served before its deadline.
 6. An idle lane with an empty queue admits every request whose deadline has not passed, whatever the latency model
    predicts. So a wrong model always recovers.
 7. With several devices, a batch goes to the one that is expected to finish it first, even if that one is busy and
    another is idle. A slower device is used when so much waits that it finishes before the faster ones would.
 8. With several models on a device, the most urgent level goes first and, within a level, the request that must start
    soonest to be in time.
 9. One batch in eight on each device goes to the oldest request that has waited for more than a second, and to those of
    its level and shape behind it. So no request starves.

Rules 2 to 4 follow the early drop of Nexus (Shen et al., SOSP 2019), with late binding.
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

# One in this many batches of a device is for overdue requests (rule 9). One in this many late requests runs although
# other models wait, to check the latency model (rule 4).
ONE_IN = 8
# How often to look for overdue requests: decisions are frequent, overdue requests are rare.
LOOK_AGAIN_NS = PATIENCE_NS // 16


class RefusalReason(Enum):
    QUEUE_FULL = "queue_full"
    PREDICTED_LATE = "predicted_late"
    EXPIRED = "expired"


class Refuse(NamedTuple):
    """The request was refused. A retry after `retry_after_ns` may succeed."""

    reason: RefusalReason
    retry_after_ns: int


class Drop(NamedTuple):
    """These requests were removed from the queue without an answer."""

    requests: tuple[Request, ...]
    outcome: Outcome


class Wait(NamedTuple):
    """Nothing to do until the next arrival, the next completion, or `until_ns`."""

    until_ns: int | None


Decision = Dispatch | Drop | Wait


def admit(state: State, request: Request, now_ns: int) -> Refuse | None:
    """Queue the request, or return why it is refused and when to retry."""
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
    """Record the end of a batch; the next one on its device computes from now on."""
    dispatch.lane.in_flight -= 1
    timeline = state.timeline(dispatch.lane)
    timeline.batches.remove(dispatch)
    timeline.begun_ns = now_ns


def learn(dispatch: Dispatch, took_ns: int, staging_ns: int) -> None:
    """Update the latency model with a batch that succeeded.

    `took_ns` is the time from start to end without the wait for the device; `staging_ns` is the part before computing.
    """
    lane = dispatch.lane
    lane.latency.observe(lane.padded(dispatch.samples), took_ns)
    if lane.depth > 1:  # otherwise staging does not overlap with computing
        lane.staging.observe(lane.padded(dispatch.samples), max(0, staging_ns))


def blame(state: State, dispatch: Dispatch, wanted: tuple[Request, ...]) -> tuple[Request, ...]:
    """Handle a failed batch: queue its halves for another try, or return the request if it failed alone.

    `wanted` are the requests whose callers still wait; the others are left out.
    """
    if len(dispatch.requests) == 1:
        return wanted
    state.enqueue_halves(wanted)
    return ()


def decide(state: State, now_ns: int) -> Decision:
    """Return the next thing to do at `now_ns`. Call until it returns Wait."""
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
    kept: list[Timeline] = []  # reserved for a more urgent batch that starts later
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
    """What a queue would run next, where and when. `is_best` means that no other lane would finish it sooner.

    `entries` is a group; `requests` are the first of it that fit into a batch, ignoring deadlines.
    """

    queue: Queue
    entries: list[Entry]
    requests: tuple[Request, ...]
    forecast: LaneForecast
    start_ns: int
    is_best: bool


def _plan(state: State, queue: Queue, having_room: list[Lane], now_ns: int) -> _Plan:
    """Plan the next batch of a queue that has lanes with room."""
    entries = min(queue.groups.values(), key=lambda entries: urgency(entries[0]))
    requests = _run(entries, queue.max_batch)
    samples = count_samples(requests)
    forecast, is_best = _place(state, queue, having_room, entries[0], samples, now_ns)
    may_grow = len(requests) == len(entries) and samples < queue.max_batch and requests[0].id not in queue.raised
    start_ns = now_ns
    if forecast.lane not in having_room:
        start_ns = max(forecast.free_ns, now_ns + max(1, _doubt_ns(forecast, samples)))
    elif may_grow and forecast.timeline.batches:
        # Until then the device is busy, and the batch can grow.
        start_ns = forecast.timeline.may_be_free_ns(now_ns) - forecast.lane.lead_ns(samples)
    return _Plan(queue, entries, requests, forecast, start_ns, is_best)


def _place(
    state: State, queue: Queue, having_room: list[Lane], first: Entry, samples: int, now_ns: int
) -> tuple[LaneForecast, bool]:
    """Choose the lane for a queue's next batch by rule 7. Returns whether no other lane would finish it sooner.

    The lane may be one that has no room yet.
    """
    if len(queue.lanes) == 1:  # the usual case
        return state.forecast(having_room[0], now_ns), True
    forecasts = [state.forecast(lane, now_ns) for lane in queue.usable_lanes]
    now = [one for one in forecasts if one.lane in having_room]
    best = min(now, key=lambda one: one.expected_end_ns(samples))
    best_ns, doubt_ns = best.expected_end_ns(samples), _doubt_ns(best, samples)
    busy = [one for one in forecasts if one not in now and one.expected_end_ns(samples) < best_ns - doubt_ns]
    if not busy:
        equals = [one for one in now if one.expected_end_ns(samples) <= best_ns + doubt_ns]
        # Prefer the device that has been idle for the longest time.
        return min(equals, key=lambda one: (len(one.timeline.batches), one.timeline.begun_ns, one.lane.id)), True
    # Faster lanes are busy. Use a slower one if they could not finish everything that waits in the same time.
    waiting = -(-queue.waiting // queue.max_batch)
    done_elsewhere = sum((best_ns - one.free_ns) // max(1, one.lane.expect_ns(queue.max_batch)) for one in busy)
    if waiting > max(1, done_elsewhere) and best.ends_ns(samples) <= first[1]:
        return best, False
    return min(busy, key=lambda one: one.free_ns), True


def _doubt_ns(forecast: LaneForecast, samples: int) -> int:
    """The error of a prediction, about one eighth: lanes this close to each other count as equal."""
    return forecast.lane.expect_ns(samples) // 8


def _urgency(plan: _Plan) -> tuple[int, int, int]:
    """The latest start of the first request. By deadline alone a slow model would starve beside a fast one."""
    level, due_ns, number = urgency(plan.entries[0])
    return level, due_ns - plan.forecast.lane.behind_ns(plan.requests[0].samples), number


def _start(state: State, plan: _Plan) -> Dispatch | Drop:
    queue, forecast, requests = plan.queue, plan.forecast, plan.requests
    lane, timeline = forecast.lane, forecast.timeline
    if queue.dated:  # without deadlines no request can be late
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
    """The longest prefix with at most `most` samples in which no request becomes late because of a larger batch."""
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
    """Remove and return the requests that rule 4 drops."""
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
    """Whether to run the last waiting request although it will be late: no other model waits, or it is one in eight.

    Counts the requests that would make another model wait.
    """
    if not state.beside(queue, forecast.lane):
        return True
    queue.given_up_alone += 1
    return queue.given_up_alone % ONE_IN == 0


def _raise_overdue(state: State, now_ns: int) -> None:
    """Apply rule 9: if a device's next batch is due to overdue requests, move the oldest to the front."""
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
    """The next batch of requests on the lane's device that arrived by `latest_ns`, from the oldest on."""
    queues = [queue, *(other for other, _ in state.beside(queue, lane))]
    top = min(entries[0][0] for one in queues for entries in one.groups.values())
    overdue = [
        entry
        for one in queues
        for entries in one.groups.values()
        for entry in entries
        # A request of the most urgent level with a deadline ends by its deadline anyway.
        if entry[2] <= latest_ns and (entry[0] > top or entry[1] == NEVER_NS) and not one.raised
    ]
    if not overdue:
        return ()
    first = min(overdue, key=lambda entry: entry[2:4])
    request = first[-1]
    queue = state.queues[request.key]
    alike = [entry for entry in queue.groups[request.shapes] if entry[0] == first[0] and entry[2] <= latest_ns]
    return _run([entry for entry in alike if entry >= first], queue.max_batch)
