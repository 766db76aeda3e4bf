"""Which lane a batch goes to: the one that is expected to finish it first, busy or not.

Pure, and part of the policy. Knows lanes and how much waits; knows no request but the first.
"""

from __future__ import annotations

from typing import NamedTuple

from convoy.app.scheduling.queues import Lane, LaneForecast, Queue, State, deadline_of
from convoy.app.scheduling.request import Request

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
        timeline = state.timeline(one.lane)
        return len(timeline.batches), timeline.begun_ns, one.lane.id

    return min(equals, key=rested)
