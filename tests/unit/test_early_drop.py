"""Whom to give up so that more are in time: small queues before one device, with times that can be reckoned."""

from __future__ import annotations

from itertools import count

import pytest

from convoy.app.scheduling.early_drop import early_drops, most_samples
from convoy.app.scheduling.latency import LatencyModel
from convoy.app.scheduling.queues import Entry, Lane, LaneForecast, Queue, State, Timeline
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


@pytest.mark.parametrize(
    ("per_sample", "others", "given_up"),
    [
        pytest.param(100, 0, 0, id="the-device-will-be-idle-again-soon"),
        pytest.param(100, 2, 1, id="others-keep-it-busy"),
        pytest.param(5, 2, 0, id="batches-that-are-mostly-fixed-cost-hardly-grow"),
    ],
)
def test_time_is_dear_where_other_models_need_it(per_sample: int, others: int, given_up: int) -> None:
    keys = [A, *(ModelKey(f"other-{number}", 1) for number in range(others))]
    state = make_state(1000, per_sample, *keys, max_batch=64)
    for number, key in enumerate(key for key in keys[1:] for _ in range(64)):
        state.enqueue(Request((1 << 20) + number, key, 1, ((1,),), (), (), (), (), 0, 0, 200_000))
    assert give_up(state, [1200] + [200_000] * 63) == given_up


def heads(count: int, deadline_ns: int | None) -> list[Entry]:
    requests = [Request(number, A, 1, ((1,),), (), (), (), (), 0, 0, deadline_ns) for number in range(count)]
    return [broad_queue(0).order_of(request) for request in requests]


@pytest.mark.parametrize(
    ("waiting", "deadline", "most"),
    [
        pytest.param(33, 30_000, 140, id="half-of-its-time"),
        pytest.param(33, 5000, 100, id="no-longer-than-ten-alone"),
        pytest.param(32, 5000, 256, id="few-wait"),
        pytest.param(33, None, 256, id="no-deadline"),
    ],
)
def test_a_large_batch_takes_half_of_the_first_requests_time(waiting: int, deadline: int | None, most: int) -> None:
    assert most_samples(broad_queue(waiting), heads(1, deadline), broad_forecast(0), 0) == most


@pytest.mark.parametrize(
    ("now_ns", "most"),
    [pytest.param(0, 140, id="the-rest-is-in-time"), pytest.param(5000, 256, id="the-rest-would-be-late")],
)
def test_it_is_not_shortened_at_the_cost_of_those_who_wait(now_ns: int, most: int) -> None:
    assert most_samples(broad_queue(280), heads(280, 30_000), broad_forecast(now_ns), 0) == most


def test_where_a_request_costs_little_beyond_its_sample_batches_of_32_are_allowed() -> None:
    lane = Lane(0, DEVICE, tuple(range(1, 257)), LatencyModel({size: 10 + 100 * size for size in (1, 16, 256)}))
    queue = Queue(A, 256, 1000, lanes=[lane], waiting=33)
    assert most_samples(queue, heads(1, 1000), LaneForecast(lane, Timeline(), 0, 0), 0) == 32


def broad_forecast(now_ns: int) -> LaneForecast:
    latency = LatencyModel({size: 1000 + 100 * size for size in (1, 16, 256)})
    return LaneForecast(Lane(0, DEVICE, tuple(range(1, 257)), latency), Timeline(), now_ns, now_ns)


def broad_queue(waiting: int) -> Queue:
    return Queue(A, 256, 1000, lanes=[broad_forecast(0).lane], waiting=waiting)
