"""What the policy promises whatever happens: random models, lanes, requests, departures and poison."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st
from traffic import affine_ns, make_request

from convoy.app.scheduling.policy import RefusalReason, Refuse
from convoy.app.scheduling.queues import Dispatch
from convoy.app.scheduling.request import MILLISECOND_NS, ModelKey, Outcome, Request
from convoy.loadtest.simulation.simulator import Simulation

HORIZON_MS = 300
milliseconds = st.integers(0, HORIZON_MS)
limits = st.one_of(st.none(), st.integers(0, 150))


@dataclass(frozen=True)
class ModelPlan:
    max_batch: int
    max_waiting: int
    fixed_ms: float
    per_sample_ms: float
    lanes: int
    depth: int
    buckets: bool


@dataclass(frozen=True)
class RequestPlan:
    model: int
    arrival_ms: int
    samples: int
    shape: int
    priority: int
    deadline_ms: int | None
    latest_start_ms: int | None
    leaves_after_ms: int | None
    poisonous: bool


@dataclass(frozen=True)
class Plan:
    models: tuple[ModelPlan, ...]
    requests: tuple[RequestPlan, ...]
    device_slots: int | None


model_plans = st.builds(
    ModelPlan,
    max_batch=st.integers(1, 8),
    max_waiting=st.integers(8, 40),
    fixed_ms=st.floats(0.5, 20.0),
    per_sample_ms=st.floats(0.1, 5.0),
    lanes=st.integers(1, 2),
    depth=st.integers(1, 2),
    buckets=st.booleans(),
)
request_plans = st.builds(
    RequestPlan,
    model=st.integers(0, 1),
    arrival_ms=milliseconds,
    samples=st.sampled_from([1, 1, 1, 2, 5]),
    shape=st.sampled_from([1, 1, 1, 2]),
    priority=st.sampled_from([0, 0, 0, 1, 3]),
    deadline_ms=limits,
    latest_start_ms=limits,
    leaves_after_ms=st.one_of(st.none(), st.none(), st.integers(0, 100)),
    poisonous=st.sampled_from([False] * 9 + [True]),
)
plans = st.builds(
    Plan,
    models=st.lists(model_plans, min_size=1, max_size=2).map(tuple),
    requests=st.lists(request_plans, min_size=1, max_size=60).map(tuple),
    device_slots=st.one_of(st.none(), st.integers(1, 2)),
)
rushes = st.builds(
    Plan,
    models=st.lists(model_plans, min_size=1, max_size=2).map(tuple),
    # Many at few moments: that is where queues grow.
    requests=st.lists(
        request_plans.map(lambda plan: replace(plan, arrival_ms=plan.arrival_ms // 100)),
        min_size=10,
        max_size=60,
    ).map(tuple),
    device_slots=st.one_of(st.none(), st.integers(1, 2)),
)


class Watched:
    """A simulation of a plan whose every step is checked against the promises."""

    def __init__(self, plan: Plan) -> None:
        self.simulation = simulation = Simulation()
        self.state = simulation.state
        if plan.device_slots is not None:
            self.state.device_slots["device"] = plan.device_slots
        keys = [self._add_model(str(number), model) for number, model in enumerate(plan.models)]
        self.requests = [self._add_request(number, keys, r) for number, r in enumerate(plan.requests)]
        self.dispatched: Counter[int] = Counter()
        simulation.on_dispatch = self.check_batch
        simulation.on_rest = self.check_rest
        simulation.run()

    def _add_model(self, name: str, plan: ModelPlan) -> ModelKey:
        key = self.simulation.add_model(
            name, max_batch=plan.max_batch, max_waiting=plan.max_waiting, levels=3, default_level=2
        )
        buckets = tuple(sorted({1, 4, plan.max_batch})) if plan.buckets else None
        if buckets is not None and plan.max_batch < 4:
            buckets = tuple(range(1, plan.max_batch + 1))
        for _ in range(plan.lanes):
            true_ns = affine_ns(plan.fixed_ms, plan.per_sample_ms)
            self.simulation.add_lane(key, true_ns, batch_sizes=buckets, depth=plan.depth)
        return key

    def _add_request(self, number: int, keys: list[ModelKey], plan: RequestPlan) -> Request:
        key = keys[plan.model % len(keys)]
        arrival_ns = plan.arrival_ms * MILLISECOND_NS

        def later(delay_ms: int | None) -> int | None:
            return None if delay_ms is None else arrival_ns + delay_ms * MILLISECOND_NS

        request = make_request(
            number,
            key,
            arrival_ns,
            samples=min(plan.samples, self.state.queues[key].max_batch),
            shape=(plan.shape,),
            priority=plan.priority,
            deadline_ns=later(plan.deadline_ms),
            latest_start_ns=later(plan.latest_start_ms),
        )
        self.simulation.arrive(request)
        if plan.leaves_after_ms is not None:
            self.simulation.leave(request, arrival_ns + plan.leaves_after_ms * MILLISECOND_NS)
        if plan.poisonous:
            self.simulation.poisonous.add(number)
        return request

    def check_batch(self, dispatch: Dispatch) -> None:
        queue, now_ns = self.state.queues[dispatch.key], self.simulation.now_ns
        assert dispatch.requests
        assert dispatch.samples == sum(request.samples for request in dispatch.requests) <= queue.max_batch
        assert {request.key for request in dispatch.requests} == {dispatch.key}
        (shapes,) = {request.shapes for request in dispatch.requests}
        assert dispatch.lane in queue.lanes
        assert dispatch.lane.in_flight <= dispatch.lane.depth
        for request in dispatch.requests:
            assert request.expiry_ns is None or now_ns < request.expiry_ns
            assert request.id not in self.state.waiting
            assert request.id not in self.simulation.ends
        again = any(self.dispatched[request.id] for request in dispatch.requests)
        assert not again or not any(p.id in self.simulation.ends for p in dispatch.requests)
        order = [queue.order_of(request) for request in dispatch.requests]
        behind = queue.groups.get(shapes, [])
        if not again:
            assert order == sorted(order)
            assert not behind or order[-1] < behind[0], "a request was overtaken in its own queue"
        self.dispatched.update(request.id for request in dispatch.requests)

    def check_rest(self) -> None:
        for queue in self.state.queues.values():
            waiting = [entry[-1] for entries in queue.groups.values() for entry in entries]
            assert queue.waiting == sum(request.samples for request in waiting)
            first_tries = [request for request in waiting if not self.dispatched[request.id]]
            assert sum(request.samples for request in first_tries) <= queue.max_waiting
            if queue.waiting:
                idle = [not self.state.timeline(lane).batches and self.state.has_room(lane) for lane in queue.lanes]
                # One of several lanes may, when the others are expected to be done sooner than it would be.
                assert not all(idle), "every lane idles while requests wait"
        for device, slots in self.state.device_slots.items():
            lanes = [lane for queue in self.state.queues.values() for lane in queue.lanes if lane.device == device]
            assert sum(lane.in_flight for lane in lanes) <= slots

    def check_end(self) -> None:
        ends = self.simulation.ends
        assert set(ends) == {request.id for request in self.requests}, "a request was lost"
        assert not self.state.waiting
        assert all(lane.in_flight == 0 for queue in self.state.queues.values() for lane in queue.lanes)
        for queue in self.state.queues.values():
            assert (queue.waiting, queue.groups, queue.raised, queue.dated) == (0, {}, {}, 0)
        assert not self.state.expiries


@given(st.one_of(plans, rushes))
@settings(max_examples=250, deadline=None)
def test_nobody_is_lost_and_every_promise_is_kept_at_every_step(plan: Plan) -> None:
    watched = Watched(plan)
    watched.check_end()
    for end in watched.simulation.ends.values():
        request = end.request
        runs = watched.dispatched[request.id]
        match end.outcome:
            case Outcome.ANSWERED:
                assert runs >= 1
                assert request.id not in watched.simulation.poisonous
            case Outcome.MODEL_FAILED:
                assert request.id in watched.simulation.poisonous
            case Outcome.EXPIRED:
                assert request.expiry_ns is not None
                assert request.expiry_ns <= end.at_ns
            case Outcome.HOPELESS:
                assert request.deadline_ns is not None
                assert end.at_ns < request.deadline_ns
            case Refuse(reason):
                assert runs == 0
                assert reason is RefusalReason.QUEUE_FULL or request.expiry_ns is not None
            case None:
                assert plan.requests[request.id].leaves_after_ms is not None
            case _:
                raise AssertionError(end)


@given(plans)
@settings(max_examples=60, deadline=None)
def test_the_same_plan_ends_the_same_way(plan: Plan) -> None:
    first, again = [
        [(number, end.outcome, end.at_ns) for number, end in Watched(plan).simulation.ends.items()] for _ in range(2)
    ]
    assert first == again


@given(
    model=model_plans,
    bad=st.sets(st.integers(0, 39)),
    count=st.integers(1, 40),
    gone=st.sets(st.integers(0, 39), max_size=5),
)
@settings(max_examples=150, deadline=None)
def test_exactly_the_poisonous_fail_within_two_runs_a_request(
    model: ModelPlan, bad: set[int], count: int, gone: set[int]
) -> None:
    requests = tuple(
        RequestPlan(0, 0, 1, 1, 0, None, None, 1 if number in gone else None, number in bad) for number in range(count)
    )
    model = replace(model, max_waiting=1000)
    watched = Watched(Plan((model,), requests, None))
    watched.check_end()
    for number, end in watched.simulation.ends.items():
        if number in gone and end.outcome is None:
            continue
        assert end.outcome is (Outcome.MODEL_FAILED if number in bad else Outcome.ANSWERED)
    assert len(watched.simulation.batches) <= 2 * count
