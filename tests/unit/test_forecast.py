"""How long who comes now would wait: backlogs before one lane or several, with times that can be reckoned."""

from __future__ import annotations

import pytest

from convoy.app.scheduling.forecast import backlog_ns, lateness_ns
from convoy.app.scheduling.latency import LatencyModel
from convoy.app.scheduling.policy import decide
from convoy.app.scheduling.queues import Dispatch, Lane, Queue, State
from convoy.app.scheduling.request import SECOND_NS, ModelKey, Request

KEY = ModelKey("model", 1)
MAX_BATCH = 8
FIXED_NS, EACH_NS = 1000, 100


def make_state(*devices: str, slots: int | None = None, slower: int = 1) -> State:
    """A lane on each device; the first takes 1000 ns a batch and 100 ns a sample, the others `slower` times that."""
    state = State()
    lanes = []
    for number, device in enumerate(devices):
        if slots is not None:
            state.device_slots[device] = slots
        factor = slower if number else 1
        latency = LatencyModel({size: factor * (FIXED_NS + EACH_NS * size) for size in (1, 2, 4, 8)})
        lanes.append(Lane(number, device, tuple(range(1, MAX_BATCH + 1)), latency))
    state.queues[KEY] = Queue(KEY, MAX_BATCH, 1000, 3, 2, lanes)
    return state


def make_request(number: int, deadline_ns: int | None = None, latest_start_ns: int | None = None) -> Request:
    return Request(number, KEY, 1, ((1,),), (), (), (), (), 0, 0, deadline_ns, latest_start_ns)


def wait(state: State, requests: int, deadline_ns: int | None = None) -> Queue:
    for number in range(requests):
        state.enqueue(make_request(number, deadline_ns))
    return state.queues[KEY]


@pytest.mark.parametrize(
    ("state", "backlog"),
    [
        pytest.param(make_state("a"), 2 * 1800 + 1400, id="two-full-batches-and-four"),
        pytest.param(make_state("a", "b"), 2 * 900 + 700, id="half-with-two-devices"),
        pytest.param(make_state("a", "a", slots=1), 2 * 1800 + 1400, id="not-with-two-lanes-of-one-device"),
        pytest.param(make_state("a", "b", slots=1), 2 * 900 + 700, id="two-devices-of-one-place-each"),
        # In 3600 ns the first does two batches and the second one: 1200 ns from one to the next.
        pytest.param(make_state("a", "b", slower=2), 2 * 1200 + 933, id="a-third-less-with-one-half-as-fast"),
    ],
)
def test_a_backlog_is_worked_off_by_all_devices_at_once(state: State, backlog: int) -> None:
    assert backlog_ns(state, wait(state, 20), 0) == backlog


def test_what_waits_for_no_lane_waits_for_a_second() -> None:
    state = make_state()
    assert backlog_ns(state, wait(state, 20), 0) == SECOND_NS


@pytest.mark.parametrize(
    ("ahead", "late"),
    [
        pytest.param(0, 0, id="nobody"),
        # The lane is free at 1100. Then 3 batches of 1800 and one of 1100, of which half counts: 3250 of 2900.
        pytest.param(24, 350, id="three-batches"),
        pytest.param(32, 1250, id="four-batches"),
    ],
)
def test_each_full_batch_that_waits_before_a_request_makes_it_later(ahead: int, late: int) -> None:
    state = make_state("a")
    assert lateness_ns(state, state.queues[KEY], make_request(999, 4000), 0) == 0, "nothing runs and nobody waits"
    state.enqueue(make_request(1000))
    assert isinstance(decide(state, 0), Dispatch)
    queue = wait(state, ahead, deadline_ns=3900)
    assert lateness_ns(state, queue, make_request(999, 4000), 0) == late


def test_who_must_have_begun_by_then_counts_all_that_waits_before() -> None:
    state = make_state("a")
    state.enqueue(make_request(1000))
    assert isinstance(decide(state, 0), Dispatch)
    queue = wait(state, 16, deadline_ns=90_000)
    begins_ns = 1100 + 2 * 1800
    assert lateness_ns(state, queue, make_request(999, 100_000, begins_ns), 0) == 0
    assert lateness_ns(state, queue, make_request(999, 100_000, begins_ns - 1), 0) == 1
