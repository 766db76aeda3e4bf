"""Whom to give up so that more are in time: small queues before one device, with times that can be reckoned."""

from __future__ import annotations

from itertools import count

import pytest

from convoy.app.scheduling.early_drop import early_drops
from convoy.app.scheduling.latency import LatencyModel
from convoy.app.scheduling.queues import Lane, Queue, State
from convoy.app.scheduling.request import ModelKey, Request

A, B = ModelKey("a", 1), ModelKey("b", 1)
DEVICE = "device"
MAX_BATCH = 8


def make_state(fixed: int, per_sample: int, *keys: ModelKey, max_batch: int = MAX_BATCH) -> State:
    """One device; a batch of b takes `fixed + per_sample * b`, and a little more as its margin."""
    state = State({DEVICE: 1})
    for number, key in enumerate(keys or (A,)):
        sizes = tuple(range(1, max_batch + 1))
        latency = LatencyModel({size: fixed + per_sample * size for size in (1, 2, 4, max_batch)})
        state.queues[key] = Queue(key, max_batch, 1000, 3, 2, [Lane(number, DEVICE, sizes, latency)])
    return state


def give_up(state: State, deadlines: list[int], *, priorities: list[int] | None = None) -> int:
    """How many heads are given up at time 0 when requests with these deadlines wait."""
    queue, ids = state.queues[A], count()
    for deadline, priority in zip(deadlines, priorities or [0] * len(deadlines), strict=True):
        state.enqueue(Request(next(ids), A, 1, ((1,),), (), (), (), (), 0, priority, deadline))
    entries = queue.groups[((1,),)]
    return early_drops(state, queue, entries, state.forecast(queue.lanes[0], 0), 0)


def test_nobody_is_given_up_when_all_are_in_time_in_one_batch() -> None:
    assert give_up(make_state(1000, 100), [2000] * 8) == 0


def test_one_head_goes_when_it_would_cost_all_others() -> None:
    # With the head, a batch of one; the seven would have to wait 1100 for a batch of 1700.
    assert give_up(make_state(1000, 100), [1200] + [2000] * 7) == 1


def test_heads_stay_when_batches_after_theirs_are_in_time() -> None:
    # Nearly no fixed cost: one after the other, everybody is in time.
    assert give_up(make_state(10, 100), [150, 300, 450, 600, 750, 900, 1050, 1200]) == 0


def test_what_the_device_owes_to_other_models_delays_those_who_stay() -> None:
    deadlines = [300] + [1100] * 7
    assert give_up(make_state(100, 100), deadlines) == 0
    state = make_state(100, 100, A, B)
    state.enqueue(Request(1 << 20, B, 1, ((1,),), (), (), (), (), 0, 0, 10_000))
    assert give_up(state, deadlines) == 1


def test_a_head_goes_when_its_batch_takes_the_time_of_several_to_come() -> None:
    # Both batches would be in time. But the first takes as long as four requests in a full one.
    assert give_up(make_state(1000, 100), [1200] + [3200] * 7) == 1


def test_a_head_stays_when_it_costs_only_its_batch() -> None:
    # Both are in time one after the other, and the second batch takes nobody's time worth a whole request.
    assert give_up(make_state(100, 1000), [1200, 2400]) == 0


@pytest.mark.parametrize(("important", "given_up"), [(0, 1), (3, 0)])
def test_nobody_gives_way_to_a_lower_class(important: int, given_up: int) -> None:
    priorities = [0] + [important] * 7
    assert give_up(make_state(1000, 100), [1200] + [2000] * 7, priorities=priorities) == given_up


def test_requests_without_deadlines_are_never_given_up() -> None:
    state = make_state(1000, 100)
    queue = state.queues[A]
    for number in range(20):
        state.enqueue(Request(number, A, 1, ((1,),), (), (), (), (), 0))
    assert early_drops(state, queue, queue.groups[((1,),)], state.forecast(queue.lanes[0], 0), 0) == 0


def test_a_tight_request_is_not_given_up_for_time_that_nobody_needs() -> None:
    # The others have a hundred times the time that they need: the device will be idle again soon.
    assert give_up(make_state(1000, 100), [1200] + [200_000] * 7) == 0
