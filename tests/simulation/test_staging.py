"""Two batches on one device: the second is started late enough to grow and early enough to lose no time."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from traffic import affine_ns, make_request, poisson_stream

from convoy.app.scheduling import queues
from convoy.app.scheduling.request import MILLISECOND_NS, SECOND_NS, ModelKey
from convoy.loadtest.simulation.simulator import Batch, Simulation, TrueLatency

FIXED_MS, PER_SAMPLE_MS, STAGING_MS, MAX_BATCH = 10.0, 0.25, 2, 64
TRUTH = affine_ns(FIXED_MS, PER_SAMPLE_MS)


def noisy(truth: TrueLatency, seed: int, by: float) -> TrueLatency:
    """The truth within `by` either way, evenly."""
    chance = random.Random(seed)
    return lambda samples, now_ns: truth(samples, now_ns) * chance.uniform(1 - by, 1 + by)


def one_device(truth: TrueLatency = TRUTH, *, slots: int = 2) -> tuple[Simulation, ModelKey]:
    simulation = Simulation()
    simulation.state.device_slots["device"] = slots
    key = simulation.add_model("model", max_batch=MAX_BATCH)
    simulation.add_lane(key, truth, depth=slots, staging_ns=STAGING_MS * MILLISECOND_NS)
    return simulation, key


def lost_ns(batches: list[Batch]) -> int:
    """How long the device stood still though somebody in the next batch had come early enough to be copied."""
    lost = 0
    for before, batch in pairwise(batches):
        first_ns = min(request.arrival_ns for request in batch.dispatch.requests)
        lost += max(0, batch.began_ns - max(before.ended_ns, first_ns + STAGING_MS * MILLISECOND_NS))
    return lost


def run_load(simulation: Simulation, key: ModelKey, load: float) -> list[Batch]:
    """A share of what the device could do with full batches."""
    per_second = load * 1000 * MAX_BATCH / (FIXED_MS - STAGING_MS + PER_SAMPLE_MS * MAX_BATCH)
    simulation.feed(poisson_stream(key, per_second=per_second, until_ns=8 * SECOND_NS, seed=4))
    simulation.run()
    assert all(end.good for end in simulation.ends.values())
    return simulation.batches[20:]  # the first ones find out what staging takes


@pytest.mark.parametrize("load", [0.2, 0.6, 0.9])
def test_where_latencies_are_as_expected_the_device_never_waits_for_a_copy(load: float) -> None:
    simulation, key = one_device()
    assert lost_ns(run_load(simulation, key, load)) == 0


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("load", [0.2, 0.6, 0.9])
def test_where_they_are_off_by_a_fifth_it_hardly_ever_does(load: float, seed: int) -> None:
    simulation, key = one_device(noisy(TRUTH, seed, by=0.2))
    batches = run_load(simulation, key, load)
    assert lost_ns(batches) < 0.002 * simulation.now_ns


def test_who_comes_while_a_batch_computes_still_joins_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    late, key = one_device()
    run_load(late, key, 0.5)
    monkeypatch.setattr(queues, "WAKING_NS", SECOND_NS)  # the second batch is started as soon as there is a place
    early, key = one_device()
    run_load(early, key, 0.5)
    late_ns, early_ns = (sum(end.latency_ns for end in one.ends.values()) for one in (late, early))
    assert late_ns < 0.85 * early_ns


def test_copies_are_hidden_and_what_a_batch_takes_is_learned_as_if_it_ran_alone() -> None:
    seconds = 4
    answered = {}
    for slots in (1, 2):
        simulation, key = one_device(slots=slots)
        for number in range(MAX_BATCH * 400):
            simulation.arrive(make_request(number, key, 0))
        simulation.run(until_ns=seconds * SECOND_NS)
        answered[slots] = len(simulation.ends)
        (lane,) = simulation.state.queues[key].lanes
        assert lane.latency.expect_ns(MAX_BATCH) == pytest.approx(TRUTH(MAX_BATCH, 0), rel=1e-3)
    full_ms = FIXED_MS + PER_SAMPLE_MS * MAX_BATCH
    assert answered[2] / answered[1] == pytest.approx(full_ms / (full_ms - STAGING_MS), rel=0.02)


def test_an_overdue_batch_does_not_hold_the_next_one_back() -> None:
    """Nobody knows when it ends, so the next one is copied at once and ready for whenever that is."""
    simulation, key = one_device(lambda samples, now_ns: (10 if now_ns < SECOND_NS else 500) * MILLISECOND_NS)
    for number in range(60):
        simulation.arrive(make_request(number, key, number * 15 * MILLISECOND_NS))
    simulation.arrive(make_request(100, key, 2 * SECOND_NS))
    simulation.arrive(make_request(101, key, 2 * SECOND_NS + 20 * MILLISECOND_NS))
    simulation.run()
    slow, behind = simulation.batches[-2:]
    assert behind.started_ns == 2 * SECOND_NS + 20 * MILLISECOND_NS
    assert behind.began_ns == slow.ended_ns
