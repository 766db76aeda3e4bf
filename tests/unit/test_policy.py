"""Each rule of the policy by one small case; `tests/simulation` tries them all at once."""

from __future__ import annotations

from itertools import count

import pytest

from convoy.app.scheduling import queues
from convoy.app.scheduling.latency import LatencyModel
from convoy.app.scheduling.policy import Drop, RefusalReason, Refuse, Wait, admit, blame, complete, decide, learn
from convoy.app.scheduling.queues import PATIENCE_NS, Dispatch, Lane, Queue, State
from convoy.app.scheduling.request import ModelKey, Outcome, Request

# Every batch takes 1000 + 100 per sample, in nanoseconds; predictions add two per cent.
FIXED, EACH = 1000, 100
A, B = ModelKey("a", 1), ModelKey("b", 1)
ids = count()


def took(samples: int) -> int:
    return FIXED + EACH * samples


def predicted(samples: int) -> int:
    """What is promised: no batch of these tests was ever late, so there is no margin."""
    return took(samples)


def make_lane(number: int = 0, *, depth: int = 1, sizes: tuple[int, ...] = tuple(range(1, 9))) -> Lane:
    latency, staging = LatencyModel({size: took(size) for size in (1, 2, 4, 8)}), LatencyModel({1: 1, 8: 1})
    return Lane(number, "device", sizes, latency, depth, staging=staging)


def make_state(*keys: ModelKey, max_waiting: int = 100, slots: int | None = None, depth: int = 1) -> State:
    state = State()
    if slots is not None:
        state.device_slots["device"] = slots
    for number, key in enumerate(keys or (A,)):
        state.queues[key] = Queue(key, 8, max_waiting, 3, 2, [make_lane(number, depth=depth)])
    return state


def ask(
    state: State,
    now: int = 0,
    *,
    key: ModelKey = A,
    samples: int = 1,
    shape: int = 1,
    priority: int = 0,
    deadline: int | None = None,
    latest_start: int | None = None,
) -> Request | Refuse:
    """A new request, let in; or why not."""
    request = Request(next(ids), key, samples, ((shape,),), (), (), (), (), now, priority, deadline, latest_start)
    return admit(state, request, now) or request


def let_in(state: State, now: int = 0, **wishes) -> Request:
    request = ask(state, now, **wishes)
    assert isinstance(request, Request)
    return request


def occupy(state: State, now: int = 0, key: ModelKey = A) -> Dispatch:
    """A batch that keeps the lane busy."""
    let_in(state, now, key=key)
    return dispatched(state, now)


def dispatched(state: State, now: int) -> Dispatch:
    decision = decide(state, now)
    assert isinstance(decision, Dispatch)
    return decision


def finish(state: State, batch: Dispatch, now: int) -> None:
    complete(state, batch, now)
    learn(batch, took(batch.samples), 200)


# Rules 1 to 3: what makes a batch


def test_a_free_lane_takes_what_is_there_at_once() -> None:
    state = make_state()
    request = let_in(state, 5)
    batch = dispatched(state, 5)
    assert (batch.requests, batch.samples, batch.key) == ((request,), 1, A)
    assert batch.predicted_ns == predicted(1)
    assert decide(state, 5) == Wait(None)


def test_while_a_lane_runs_the_next_batch_grows_up_to_its_limit_without_splitting_anybody() -> None:
    state = make_state()
    running = occupy(state)
    requests = [let_in(state, now, samples=3) for now in range(3)]
    assert decide(state, 3) == Wait(None)
    finish(state, running, 1100)
    assert dispatched(state, 1100).requests == tuple(requests[:2])


def test_only_equal_shapes_share_a_batch() -> None:
    state = make_state()
    running = occupy(state)
    one, other, third = (let_in(state, now, shape=shape) for now, shape in enumerate((1, 2, 1)))
    finish(state, running, 1100)
    batch = dispatched(state, 1100)
    assert batch.requests == (one, third)
    finish(state, batch, 2300)
    assert dispatched(state, 2300).requests == (other,)


def test_the_order_is_level_then_deadline_then_arrival() -> None:
    state = make_state()
    running = occupy(state)
    last = let_in(state, 1, priority=3)
    patient = let_in(state, 2)
    far = let_in(state, 3, deadline=90_000)
    near = let_in(state, 4, deadline=80_000)
    later = let_in(state, 5, deadline=90_000)
    first = let_in(state, 6, priority=1)
    finish(state, running, 1100)
    assert dispatched(state, 1100).requests == (first, near, far, later, patient, last)


@pytest.mark.parametrize("priority", [0, 2, 4, 1 << 53])
def test_who_names_no_level_of_the_model_is_of_its_default(priority: int) -> None:
    state = make_state()
    running = occupy(state)
    before, own, behind = (let_in(state, now, priority=level) for now, level in enumerate((1, priority, 3)))
    ordinary = let_in(state, 5)
    finish(state, running, 1100)
    assert dispatched(state, 1100).requests == (before, own, ordinary, behind)


# Rule 9: nobody waits for ever


def served_after(state: State, waits: Request, now: int, stream: dict[str, object]) -> int:
    """How many batches begin before it where more of the stream come than can be served."""
    for begun in range(100):
        for _ in range(9):
            ask(state, now, **stream)  # type: ignore[arg-type]
        batch = dispatched(state, now)
        if waits in batch.requests:
            return begun
        now += took(batch.samples)
        finish(state, batch, now)
    return 100


@pytest.mark.parametrize(
    ("own", "stream"),
    [
        pytest.param({"priority": 3}, {"priority": 1}, id="less-urgent"),
        pytest.param({"priority": 3}, {}, id="less-urgent-than-the-default"),
        pytest.param({}, {"deadline": 2 * PATIENCE_NS}, id="without-a-deadline"),
        pytest.param({"priority": 3, "shape": 2}, {"priority": 2}, id="of-another-shape"),
        pytest.param({"priority": 3, "key": B}, {"priority": 2}, id="of-another-model"),
    ],
)
def test_who_has_waited_for_a_second_goes_first_once(own: dict[str, object], stream: dict[str, object]) -> None:
    state = make_state(A, B, max_waiting=1 << 30, slots=1)
    waits = let_in(state, 0, **own)
    assert served_after(state, waits, 0, stream) == 100
    assert served_after(state, waits, PATIENCE_NS, stream) == 0


def test_one_batch_in_eight_is_for_those_who_are_overdue_and_full_of_them() -> None:
    state = make_state(max_waiting=1 << 30)
    running = occupy(state)
    overdue = [let_in(state, 0, priority=3) for _ in range(16)]
    for _ in range(200):
        let_in(state, 1, priority=1)
    now = PATIENCE_NS
    finish(state, running, now)
    batches = []
    for _ in range(16):
        batch = dispatched(state, now)
        now += took(batch.samples)
        finish(state, batch, now)
        batches.append(batch.requests)
    assert (batches[0], batches[8]) == (tuple(overdue[:8]), tuple(overdue[8:]))
    assert all(request.priority == 1 for batch in batches[1:8] + batches[9:] for request in batch)


def test_whoever_is_overdue_can_leave() -> None:
    state = make_state()
    running = occupy(state)
    overdue, urgent = let_in(state, 0, priority=3), let_in(state, 1, priority=1)
    decide(state, PATIENCE_NS)
    state.remove(overdue)
    finish(state, running, PATIENCE_NS)
    assert dispatched(state, PATIENCE_NS).requests == (urgent,)
    assert not state.queues[A].raised


def test_a_batch_is_cut_where_one_more_would_make_another_late() -> None:
    state = make_state()
    running = occupy(state)
    first = let_in(state, 1, deadline=predicted(1) + predicted(2))
    second = let_in(state, 2, deadline=50_000)
    third = let_in(state, 3, deadline=50_000)
    finish(state, running, 1100)
    batch = dispatched(state, 1100)
    assert batch.requests == (first, second)
    finish(state, batch, 2300)
    assert dispatched(state, 2300).requests == (third,)


def test_padding_is_filled_for_nothing() -> None:
    state = make_state()
    state.queues[A].lanes = [make_lane(sizes=(1, 4, 8))]
    running = occupy(state)
    requests = [let_in(state, now, deadline=predicted(1) + predicted(4)) for now in range(4)]
    finish(state, running, 1100)
    batch = dispatched(state, 1100)
    assert batch.requests == tuple(requests)
    assert batch.predicted_ns == predicted(4)


def test_a_lane_of_two_places_knows_that_the_second_batch_runs_after_the_first() -> None:
    state = make_state(depth=2)
    occupy(state)
    tight, loose = let_in(state, 1, deadline=2 * predicted(1) + 50), let_in(state, 1, deadline=50_000)
    batch = dispatched(state, 1)
    assert batch.requests == (tight,)
    assert loose.id in state.waiting


# Rule 2, where a device holds two batches


@pytest.fixture
def woken_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """These lanes are a thousand times faster than real ones, and so are their threads."""
    monkeypatch.setattr(queues, "WAKING_NS", 50)


def staged_state(*keys: ModelKey) -> tuple[State, Dispatch]:
    """Two places, one of them taken at 0; a batch is known to take 200 before it can compute."""
    state = make_state(*keys, depth=2, slots=2)
    for lane in [lane for queue in state.queues.values() for lane in queue.lanes]:
        lane.staging = LatencyModel({1: 200, 8: 200})
    return state, occupy(state)


def latest_start(state: State) -> int:
    """When the second batch must be started, by what the first takes at the least."""
    lane = state.queues[A].lanes[0]
    return lane.latency.soonest_ns(1) - lane.lead_ns(1)


@pytest.mark.usefixtures("woken_in_time")
def test_the_second_batch_is_started_when_its_copy_must_begin_and_not_before() -> None:
    state, _ = staged_state()
    first = let_in(state, 1)
    at_ns = latest_start(state)
    assert 1 < at_ns < took(1) - 200
    assert decide(state, 1) == Wait(at_ns)
    second = let_in(state, 100)
    assert decide(state, 100) == Wait(at_ns)
    assert dispatched(state, at_ns).requests == (first, second)


@pytest.mark.usefixtures("woken_in_time")
def test_an_expiry_wakes_before_the_start() -> None:
    state, _ = staged_state()
    let_in(state, 1, latest_start=2000)
    assert decide(state, 1) == Wait(latest_start(state))
    state.enqueue(Request(next(ids), A, 1, ((1,),), (), (), (), (), 1, 0, None, 20))
    assert decide(state, 1) == Wait(20)


@pytest.mark.usefixtures("woken_in_time")
def test_a_second_batch_that_cannot_grow_is_started_at_once() -> None:
    state, _ = staged_state()
    requests = [let_in(state, 1, samples=3) for _ in range(2)]
    assert isinstance(decide(state, 1), Wait)
    let_in(state, 2, samples=3)  # does not fit any more
    assert dispatched(state, 2).requests == tuple(requests)


@pytest.mark.usefixtures("woken_in_time")
def test_what_is_tried_again_does_not_wait_to_grow() -> None:
    state, running = staged_state()
    let_in(state, 1), let_in(state, 1)
    batch = dispatched(state, latest_start(state))
    finish(state, running, 1100)
    complete(state, batch, 2000)
    assert blame(state, batch, batch.requests) == ()
    assert [dispatched(state, 2000).samples for _ in range(2)] == [1, 1]


@pytest.mark.usefixtures("woken_in_time")
def test_the_more_urgent_batch_keeps_the_second_place_while_it_grows() -> None:
    state, _ = staged_state(A, B)
    urgent = let_in(state, 1, key=B, deadline=50_000)
    for _ in range(8):
        let_in(state, 1)
    at_ns = latest_start(state)
    assert decide(state, 1) == Wait(at_ns)
    assert dispatched(state, at_ns).requests == (urgent,)


def test_a_batch_that_ends_early_or_late_moves_what_is_expected_of_the_one_behind() -> None:
    for ended_ns in (700, 1500):
        state, running = staged_state()
        let_in(state, 1)
        behind = dispatched(state, 1)
        timeline = state.timeline(behind.lane)
        assert timeline.free_at_ns(1) == predicted(1) + predicted(1) - 200
        finish(state, running, ended_ns)
        assert timeline.free_at_ns(ended_ns) == ended_ns + predicted(1) - 200


def test_what_runs_in_a_lost_lane_delays_nobody() -> None:
    state = make_state(A, B, slots=2, depth=2)
    lost = occupy(state).lane
    state.drop_lane(state.queues[A], lost)
    assert state.timeline(lost).free_at_ns(5) == 5


# Rule 4: giving up


def test_who_cannot_be_in_time_is_given_up_only_when_others_wait_behind() -> None:
    state = make_state()
    running = occupy(state)
    late = let_in(state, 1, deadline=predicted(1) + predicted(1))
    finish(state, running, 2000)  # later than predicted: now `late` has too little time left
    assert dispatched(state, 2000).requests == (late,)

    state = make_state()
    running = occupy(state)
    late = let_in(state, 1, deadline=predicted(1) + predicted(1))
    behind = let_in(state, 1, deadline=9000)
    finish(state, running, 2000)
    assert decide(state, 2000) == Drop((late,), Outcome.HOPELESS)
    assert dispatched(state, 2000).requests == (behind,)


def test_somebody_who_waits_for_another_device_is_no_reason_to_give_up() -> None:
    state = make_state(A, B)
    running, other = occupy(state), occupy(state, key=B)
    late = let_in(state, 1, deadline=predicted(1) + predicted(1))
    let_in(state, 1, key=B)
    finish(state, running, 2000)
    assert dispatched(state, 2000).requests == (late,)
    finish(state, other, 2000)


def test_who_is_late_and_in_the_way_of_another_model_is_given_up_but_for_one_in_eight() -> None:
    """What is expected of its model may be wrong, and nothing else would correct that where others always wait."""
    state = make_state(A, B, slots=1)
    ran = []
    for turn in range(24):
        now = turn * 100_000
        running = occupy(state, now, key=B)
        late = let_in(state, now, key=A, deadline=now + predicted(1) + predicted(1))
        other = let_in(state, now, key=B, deadline=now + 50_000)
        now += 2000
        finish(state, running, now)
        decision = decide(state, now)
        if isinstance(decision, Drop):
            assert decision == Drop((late,), Outcome.HOPELESS)
            decision = decide(state, now)
        else:
            assert isinstance(decision, Dispatch)
            assert decision.requests == (late,)
            ran.append(turn)
            now += took(1)
            finish(state, decision, now)
            decision = decide(state, now)
        assert isinstance(decision, Dispatch)
        assert decision.requests == (other,)
        finish(state, decision, now + took(1))
    assert ran == [7, 15, 23]


def test_a_head_gives_way_when_that_saves_more_than_it() -> None:
    state = make_state()
    running = occupy(state)
    head = let_in(state, 1, deadline=predicted(1) + predicted(1))
    others = []
    for request in [Request(next(ids), A, 1, ((1,),), (), (), (), (), 2, 0, 3750) for _ in range(6)]:
        state.enqueue(request)  # past admission, as if predictions had been better then
        others.append(request)
    now = predicted(1)
    finish(state, running, now)
    assert head.deadline_ns is not None
    assert now + predicted(1) <= head.deadline_ns
    assert now + predicted(1) + predicted(6) > 3750 >= now + predicted(6)
    assert decide(state, now) == Drop((head,), Outcome.HOPELESS)
    assert dispatched(state, now).requests == tuple(others)


def test_nobody_gives_way_to_a_lower_class() -> None:
    state = make_state()
    head = Request(next(ids), A, 1, ((1,),), (), (), (), (), 0, 0, predicted(1))
    state.enqueue(head)
    for _ in range(6):
        state.enqueue(Request(next(ids), A, 1, ((1,),), (), (), (), (), 0, 3, predicted(7)))
    assert dispatched(state, 0).requests == (head,)


def test_what_has_expired_leaves_the_queue_and_the_timer_says_when() -> None:
    state = make_state()
    occupy(state)
    starts, ends = let_in(state, 1, latest_start=1500), let_in(state, 1, deadline=5000)
    assert decide(state, 1) == Wait(1500)
    assert decide(state, 1500) == Drop((starts,), Outcome.EXPIRED)
    assert decide(state, 1500) == Wait(5000)
    assert decide(state, 5000) == Drop((ends,), Outcome.EXPIRED)


def test_who_waits_expires_in_time_however_many_with_later_deadlines_have_left() -> None:
    state = make_state(max_waiting=1000)
    occupy(state)
    left = [let_in(state, 0, deadline=10**9) for _ in range(200)]
    first, last = let_in(state, 0, latest_start=10**6), let_in(state, 0, deadline=10**7)
    for request in left:
        state.remove(request)
    assert decide(state, 10**6) == Drop((first,), Outcome.EXPIRED)
    assert len(state.expiries) < 64
    assert decide(state, 10**6) == Wait(10**7)
    assert decide(state, 10**7) == Drop((last,), Outcome.EXPIRED)


def test_nobody_is_woken_for_requests_that_have_left() -> None:
    state = make_state()
    gone = let_in(state, 0, deadline=5000)
    batch = dispatched(state, 0)
    assert decide(state, 0) == Wait(None)
    finish(state, batch, 1100)
    assert gone.id not in state.waiting


# Rules 5 and 6: who is let in


def test_the_queue_is_bounded_in_samples() -> None:
    state = make_state(max_waiting=4)
    occupy(state)
    let_in(state, 1, samples=3)
    refusal = ask(state, 1, samples=2)
    assert isinstance(refusal, Refuse)
    assert refusal.reason is RefusalReason.QUEUE_FULL
    assert refusal.retry_after_ns > 0
    let_in(state, 1, samples=1)


def test_an_idle_lane_with_an_empty_queue_takes_even_what_is_larger_than_the_queue() -> None:
    state = make_state(max_waiting=4)
    let_in(state, 0, samples=8)
    dispatched(state, 0)
    assert isinstance(ask(state, 1, samples=8), Refuse)


def test_what_has_expired_is_refused() -> None:
    assert ask(make_state(), 10, deadline=10) == Refuse(RefusalReason.EXPIRED, 0)
    assert ask(make_state(), 10, latest_start=9) == Refuse(RefusalReason.EXPIRED, 0)


def test_an_idle_lane_takes_what_its_model_thinks_impossible() -> None:
    state = make_state()
    let_in(state, 0, deadline=1)
    assert isinstance(decide(state, 0), Dispatch)


def test_twice_as_many_are_let_in_as_can_be_served_in_time() -> None:
    state = make_state()
    occupy(state)
    deadline = predicted(1) + predicted(8)
    for _ in range(16):
        let_in(state, 0, deadline=deadline)
    refusal = ask(state, 0, deadline=deadline)
    assert isinstance(refusal, Refuse)
    assert refusal.reason is RefusalReason.PREDICTED_LATE
    let_in(state, 0, deadline=20 * predicted(8))
    let_in(state, 0)


def test_who_cannot_be_in_time_any_more_takes_nobodys_place() -> None:
    state = make_state()
    occupy(state)
    doomed, deadline = predicted(1) + predicted(1) - 1, predicted(1) + predicted(8)
    for _ in range(16):
        state.enqueue(Request(next(ids), A, 1, ((1,),), (), (), (), (), 0, 0, doomed))
    for _ in range(16):
        let_in(state, 0, deadline=deadline)
    assert isinstance(ask(state, 0, deadline=deadline), Refuse)
    assert isinstance(ask(state, 0, deadline=doomed), Refuse)


def test_a_start_in_time_is_enough_for_who_asks_for_no_more() -> None:
    state = make_state()
    occupy(state)
    let_in(state, 0, latest_start=predicted(1) + 1)
    assert isinstance(ask(state, 0, latest_start=predicted(1) - 1), Refuse)


def test_another_models_queue_counts_where_it_surely_goes_first_on_the_same_device() -> None:
    deadline = predicted(1) + predicted(2)
    for slots, priority, refused in ((1, 0, True), (None, 0, False), (1, 3, False)):
        state = make_state(A, B, slots=slots)
        occupy(state, key=B)
        if slots is None:
            occupy(state, key=A)
        let_in(state, 0, priority=3, deadline=90_000)
        for _ in range(8):
            let_in(state, 0, key=B, priority=priority, deadline=90_000)
        verdict = ask(state, 0, priority=3, deadline=deadline)
        assert isinstance(verdict, Refuse) is refused, (slots, priority)


def test_retry_after_tells_when_there_would_be_room() -> None:
    state = make_state()
    occupy(state)
    deadline = predicted(1) + predicted(1)
    while not isinstance(refusal := ask(state, 0, deadline=deadline), Refuse):
        pass
    assert isinstance(ask(state, 0, deadline=deadline + refusal.retry_after_ns - 1), Refuse)
    let_in(state, 0, deadline=deadline + refusal.retry_after_ns)


# Between models and lanes


def test_the_most_urgent_model_goes_first_and_patience_ends() -> None:
    state = make_state(A, B, slots=1)
    let_in(state, 0, key=A)
    let_in(state, 10, key=B, deadline=PATIENCE_NS - 1)
    batch = dispatched(state, 10)
    assert batch.key == B
    assert isinstance(decide(state, 10), Wait)
    let_in(state, 20, key=B, deadline=PATIENCE_NS + 1)
    finish(state, batch, 1100)
    assert dispatched(state, 1100).key == A


def test_lanes_that_stop_get_nothing_and_the_one_that_is_free_soonest_gets_the_most() -> None:
    state = make_state()
    first, second = state.queues[A].lanes[0], make_lane(1)
    state.queues[A].lanes.append(second)
    batch = occupy(state)
    assert batch.lane is first
    assert occupy(state, 1).lane is second
    finish(state, batch, 1100)
    first.stopping = True
    let_in(state, 1101)
    assert isinstance(decide(state, 1101), Wait)


# Blame


@pytest.mark.parametrize("wanted", [8, 7, 1])
def test_a_failed_batch_is_halved_and_goes_before_everything_else(wanted: int) -> None:
    state = make_state()
    requests = [let_in(state) for _ in range(8)]
    batch = dispatched(state, 0)
    let_in(state, 1, priority=1)
    complete(state, batch, 1100)
    assert blame(state, batch, tuple(requests[:wanted])) == ()
    halves = []
    while len(halves) < 2 and len(state.waiting) > 1:
        half = dispatched(state, 1100)
        halves.append(half.requests)
        complete(state, half, 1100)
        learn(half, took(half.samples), 200)
    assert sum(halves, ()) == tuple(requests[:wanted])
    assert max(map(len, halves)) - min(map(len, halves)) <= 1
    assert state.queues[A].waiting == 1


def test_who_fails_alone_is_to_blame() -> None:
    state = make_state()
    request = let_in(state)
    batch = dispatched(state, 0)
    complete(state, batch, 1100)
    assert blame(state, batch, (request,)) == (request,)
    assert not state.waiting


def test_a_failure_teaches_nothing() -> None:
    state = make_state()
    batch = occupy(state)
    complete(state, batch, 900_000)
    assert batch.lane.behind_ns(1) == predicted(1)
    assert batch.lane.in_flight == 0
