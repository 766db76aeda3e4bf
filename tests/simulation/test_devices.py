"""One queue and several devices: a batch goes where it is done first."""

from __future__ import annotations

import pytest
from traffic import affine_ns, make_request, poisson_stream

from convoy.app.scheduling.queues import Lane
from convoy.app.scheduling.request import MILLISECOND_NS, SECOND_NS, ModelKey
from convoy.loadtest.simulation.simulator import Batch, Simulation, TrueLatency

MAX_BATCH = 8
FAST, SLOW = affine_ns(4.0, 0.5), affine_ns(40.0, 5.0)


def several(*truths: TrueLatency, slots: int = 1) -> tuple[Simulation, ModelKey, list[Lane]]:
    simulation = Simulation()
    key = simulation.add_model("model", max_batch=MAX_BATCH)
    lanes = []
    for number, truth in enumerate(truths):
        simulation.state.device_slots[f"gpu:{number}"] = slots
        lanes.append(simulation.add_lane(key, truth, device=f"gpu:{number}", depth=slots))
    return simulation, key, lanes


def ran_on(simulation: Simulation, lane: Lane) -> list[Batch]:
    return [batch for batch in simulation.batches if batch.dispatch.lane is lane]


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("per_second", [20, 400, 1500])
def test_equal_devices_share_evenly(per_second: int, slots: int) -> None:
    simulation, key, lanes = several(FAST, FAST, slots=slots)
    simulation.feed(poisson_stream(key, per_second=per_second, until_ns=10 * SECOND_NS, seed=1))
    simulation.run()
    shares = [sum(batch.dispatch.samples for batch in ran_on(simulation, lane)) for lane in lanes]
    assert sum(shares) == len(simulation.ends)
    assert min(shares) > 0.9 * max(shares)


def test_a_slow_device_is_left_alone_while_the_fast_one_is_done_sooner() -> None:
    simulation, key, (_, slow) = several(FAST, SLOW)
    simulation.feed(poisson_stream(key, per_second=300, until_ns=5 * SECOND_NS, seed=2))
    simulation.run()
    assert not ran_on(simulation, slow)
    assert max(end.latency_ns for end in simulation.ends.values()) < SLOW(1, 0)


def test_a_slow_device_helps_when_more_waits_than_the_fast_one_does_in_the_same_time() -> None:
    simulation, key, (fast, slow) = several(FAST, SLOW)
    batches = 120
    for number in range(batches * MAX_BATCH):
        simulation.arrive(make_request(number, key, 0))
    simulation.run()
    # Ten to one is what they can do; the slow one must not be what everybody waits for in the end.
    assert len(ran_on(simulation, slow)) == pytest.approx(batches / 11, abs=2)
    assert simulation.now_ns <= (batches / 11 * 10 + 2) * FAST(MAX_BATCH, 0)
    assert len(ran_on(simulation, fast)) + len(ran_on(simulation, slow)) == batches


def test_a_device_that_hangs_keeps_nobody_from_a_slower_one() -> None:
    hangs = lambda samples, now_ns: (4 if now_ns < SECOND_NS else 100_000) * MILLISECOND_NS  # noqa: E731
    simulation, key, (_, slow) = several(hangs, SLOW)
    for number in range(100):
        simulation.arrive(make_request(number, key, number * 9 * MILLISECOND_NS))
    simulation.arrive(make_request(1000, key, SECOND_NS))
    simulation.arrive(make_request(1001, key, SECOND_NS + MILLISECOND_NS))
    simulation.run()
    (rescued,) = ran_on(simulation, slow)
    assert [request.id for request in rescued.dispatch.requests] == [1001]
    # It waits about as long as the slow one is slower, and not until somebody gives the other up.
    assert rescued.started_ns - SECOND_NS < 4 * SLOW(1, 0)
