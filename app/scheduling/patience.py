"""Whose turn it is although others are more urgent. Pure, and part of the policy.

A request is overdue when it has waited for `PATIENCE_NS` and others go first: of a more urgent level, of its own model
or of one with which it shares a device, or with a deadline where it has none. Of a device's batches, one in
`ONE_BATCH_IN` is for overdue requests: the one that came first and as many behind it as fit. So however many urgent
requests come, an overdue one waits for that many batches for each batch of older ones, and the urgent ones lose no more
than that part of the device.

One with a deadline is given up when it cannot be in time any more, overdue or not: it ends by then.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from convoy.app.scheduling.queues import NEVER_NS, PATIENCE_NS, Entry, Queue, State, Timeline

ONE_BATCH_IN = 8
# Where no request is overdue, the next look is after this time: decisions are many, overdue requests few.
LOOK_AGAIN_NS = PATIENCE_NS // 16


class _Overdue(NamedTuple):
    """The request at `first` of a queue's entries of one shape."""

    arrival_ns: int
    queue: Queue
    entries: list[Entry]
    first: int


def raise_overdue(state: State, now_ns: int) -> None:
    """Where a device owes a batch to overdue requests, put them before all others."""
    if now_ns < state.look_for_overdue_ns:
        return
    latest_ns = now_ns - PATIENCE_NS
    overdue = [one for queue in state.queues.values() if queue.waiting for one in _overdue(queue, latest_ns)]
    kept_waiting = [one for one in overdue if _is_passed_over(state, one)]
    if not kept_waiting:
        state.look_for_overdue_ns = now_ns + LOOK_AGAIN_NS
    for one in sorted(kept_waiting, key=lambda one: one.arrival_ns):
        timeline = _owes_a_turn(state, one.queue)
        if timeline is not None and not one.queue.raised:
            timeline.next_overdue_turn = timeline.turns + ONE_BATCH_IN
            state.raise_up(one.queue, one.entries, one.first, _end_of_batch(one, latest_ns))


def _overdue(queue: Queue, latest_ns: int) -> Iterator[_Overdue]:
    """The first of each level, with and without a deadline, that came by `latest_ns`."""
    for entries in queue.by_shape.values():
        first = 0
        while first < len(entries):
            level, deadline_ns, arrival_ns, _, _ = entries[first]
            if arrival_ns <= latest_ns:
                yield _Overdue(arrival_ns, queue, entries, first)
            behind = (level + 1,) if deadline_ns == NEVER_NS else (level, NEVER_NS)
            first = bisect_left(entries, behind, first)


def _owes_a_turn(state: State, queue: Queue) -> Timeline | None:
    for lane in queue.usable_lanes:
        timeline = state.timeline(lane)
        if timeline.turns >= timeline.next_overdue_turn:
            return timeline
    return None


def _is_passed_over(state: State, one: _Overdue) -> bool:
    """Whether others go first and could go on doing so for ever."""
    level, deadline_ns, _, _, _ = one.entries[one.first]
    if deadline_ns == NEVER_NS and one.entries[0][1] < NEVER_NS:
        return True
    queues = [one.queue, *(other for lane in one.queue.usable_lanes for other, _ in state.beside(one.queue, lane))]
    return any(entries[0][0] < level for queue in queues for entries in queue.by_shape.values())


def _end_of_batch(one: _Overdue, latest_ns: int) -> int:
    """The end of the batch: requests behind the first that fit, are of its level, and came by `latest_ns`, too."""
    samples, end, level = 0, one.first, one.entries[one.first][0]
    for entry in one.entries[one.first :]:
        samples += entry[-1].samples
        if samples > one.queue.max_batch or entry[0] != level or entry[2] > latest_ns:
            break
        end += 1
    return end
