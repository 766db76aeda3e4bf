"""Levels of priority in virtual time: the most urgent first, and nobody for ever behind them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from traffic import affine_ns, make_request, poisson_stream

from convoy.app.scheduling.policy import LOOK_AGAIN_NS, ONE_IN
from convoy.app.scheduling.queues import PATIENCE_NS, Dispatch
from convoy.app.scheduling.request import MILLISECOND_NS, SECOND_NS, ModelKey, Request
from convoy.loadtest.simulation.simulator import Simulation

LEVELS, DEFAULT = 4, 2
FIXED_MS, PER_SAMPLE_MS = 8.0, 1.0
UNTIL_NS = 8 * SECOND_NS
FIRST_OF_THE_PATIENT = 1 << 32


@dataclass(frozen=True)
class Flood:
    """A stream that alone asks for `load` times what the device can do, of one level, for one of the models."""

    load: float
    priority: int
    within_ms: int | None
    seed: int


@dataclass(frozen=True)
class Scene:
    """`patient` are (arrival in ms, priority, model, shape) of requests without a deadline."""

    models: int
    max_batch: int
    floods: tuple[Flood, ...]
    patient: tuple[tuple[int, int, int, int], ...]

    @property
    def batch_ms(self) -> float:
        return FIXED_MS + PER_SAMPLE_MS * self.max_batch


scenes = st.builds(
    Scene,
    models=st.integers(1, 3),
    max_batch=st.sampled_from([1, 4, 16]),
    floods=st.lists(
        st.builds(
            Flood,
            load=st.sampled_from([0.5, 0.95, 1.5]),
            priority=st.integers(0, LEVELS + 1),
            within_ms=st.sampled_from([None, 100, 3000]),
            seed=st.integers(0, 9),
        ),
        min_size=1,
        max_size=3,
    ).map(tuple),
    patient=st.lists(
        st.tuples(st.integers(0, 200), st.integers(0, LEVELS), st.integers(0, 2), st.integers(1, 2)),
        min_size=1,
        max_size=12,
    ).map(tuple),
)


def level(request: Request) -> int:
    return request.priority if 1 <= request.priority <= LEVELS else DEFAULT


def due_ns(request: Request) -> float:
    return math.inf if request.deadline_ns is None else request.deadline_ns


class Watched:
    """A scene played. `raised_at`: after how many batches there was one that went before the more urgent."""

    def __init__(self, scene: Scene) -> None:
        self.simulation = simulation = Simulation()
        simulation.state.device_slots["device"] = 1
        self.keys = [self._add_model(str(number), scene) for number in range(scene.models)]
        self.raised_at: list[int] = []
        simulation.on_dispatch = self.look
        for number, flood in enumerate(scene.floods):
            key = self.keys[number % len(self.keys)]
            simulation.feed(self._flood(key, flood, number, scene))
        for number, (arrival_ms, priority, model, shape) in enumerate(scene.patient):
            key, arrival_ns = self.keys[model % len(self.keys)], arrival_ms * MILLISECOND_NS
            own_id = FIRST_OF_THE_PATIENT + number
            simulation.arrive(make_request(own_id, key, arrival_ns, shape=(shape,), priority=priority))
        simulation.run(UNTIL_NS)

    def _add_model(self, name: str, scene: Scene) -> ModelKey:
        # Few enough wait that a flood is turned away, and not what the test is about.
        key = self.simulation.add_model(
            name, max_batch=scene.max_batch, max_waiting=40 + len(scene.patient), levels=LEVELS, default_level=DEFAULT
        )
        self.simulation.add_lane(key, affine_ns(FIXED_MS, PER_SAMPLE_MS))
        return key

    def _flood(self, key: ModelKey, flood: Flood, number: int, scene: Scene) -> Iterator[Request]:
        per_second = flood.load * 1000 * scene.max_batch / scene.batch_ms
        within_ns = None if flood.within_ms is None else flood.within_ms * MILLISECOND_NS
        stream = poisson_stream(
            key,
            per_second=per_second,
            until_ns=UNTIL_NS,
            seed=flood.seed,
            within_ns=within_ns,
            first_id=number << 24,
        )
        for request in stream:
            request.priority = flood.priority
            yield request

    def look(self, dispatch: Dispatch) -> None:
        """What goes is what its level says, but for those who are overdue."""
        state, now_ns = self.simulation.state, self.simulation.now_ns
        first = dispatch.requests[0]
        waiting = [entry[-1] for q in state.queues.values() for entries in q.groups.values() for entry in entries]
        passed = [one for one in waiting if level(one) < level(first)]
        own = [one for one in waiting if one.key == first.key and one.shapes == first.shapes]
        passed += [one for one in own if level(one) == level(first) and due_ns(one) < due_ns(first)]
        if passed:
            assert first.arrival_ns + PATIENCE_NS <= now_ns, "only who is overdue goes before the more urgent"
            self.raised_at.append(len(self.simulation.batches))


@given(scenes)
@settings(max_examples=40, deadline=None)
def test_nobody_waits_for_ever_and_the_most_urgent_go_first(scene: Scene) -> None:
    watched = Watched(scene)
    begun_ns = defaultdict(
        lambda: UNTIL_NS,
        {one.id: batch.started_ns for batch in watched.simulation.batches for one in batch.dispatch.requests},
    )
    # Before one of them at most all who came earlier and were overdue too go, of the floods those who waited.
    most_before = watched.simulation.state.queues[watched.keys[0]].max_waiting * scene.models // scene.max_batch + 1
    turns = (most_before + len(scene.patient)) * ONE_IN
    bound_ns = PATIENCE_NS + LOOK_AGAIN_NS + round(turns * scene.batch_ms * MILLISECOND_NS)
    for number, (arrival_ms, *_) in enumerate(scene.patient):
        own_id = FIRST_OF_THE_PATIENT + number
        if own_id in watched.simulation.ends and own_id not in begun_ns:
            continue  # turned away at the door
        waited_ns = begun_ns[own_id] - arrival_ms * MILLISECOND_NS
        assert waited_ns <= min(bound_ns, UNTIL_NS - 1), f"request {number} waited for {waited_ns / SECOND_NS:.1f} s"
    apart = [after - before for before, after in pairwise(watched.raised_at)]
    assert min(apart, default=ONE_IN) >= ONE_IN, "of eight batches one is for the overdue"


def test_who_waits_behind_a_stream_that_takes_all_there_is_waits_little_over_a_second() -> None:
    flood = Flood(load=1.5, priority=1, within_ms=None, seed=1)
    scene = Scene(models=1, max_batch=16, floods=(flood,), patient=((0, 4, 0, 1), (9, 4, 0, 2), (20, 3, 0, 3)))
    watched = Watched(scene)
    begun_ms = {
        one.id - FIRST_OF_THE_PATIENT: batch.started_ns / MILLISECOND_NS
        for batch in watched.simulation.batches
        for one in batch.dispatch.requests
    }
    # Of three shapes, so that each is a batch of its own; the first to come is the first to go.
    for turns, (arrival_ms, *_) in enumerate(scene.patient[1:], start=1):
        assert 1000 <= begun_ms[turns] - arrival_ms <= 1063 + (ONE_IN * turns + 1) * scene.batch_ms
