"""The decoders' policy in virtual time: who goes first, who never goes, and what must hold whatever comes."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.app.scheduling.decoding import (
    DecodeJob,
    Decoding,
    NotDecoded,
    Why,
    admit,
    answered,
    decide,
    ended,
    withdraw,
)
from convoy.app.scheduling.latency import LatencyModel
from convoy.app.scheduling.policy import ONE_IN
from convoy.app.scheduling.queues import PATIENCE_NS, RAISED_LEVEL
from convoy.app.scheduling.request import MILLISECOND_NS, SECOND_NS, ModelKey

MODEL, OTHER = ModelKey("m", 1), ModelKey("other", 1)
TINY = 1_000_000  # ns


@dataclass
class Decoders:
    """Threads in virtual time. `answer_ns`: what follows decoding; None: no answer ever comes.

    A job of so many units takes as many nanoseconds, which is known from the start.
    """

    state: Decoding
    memory_bytes: int = 1 << 40
    answer_ns: int | None = 0
    true_ns: Callable[[DecodeJob], int] = lambda job: job.units
    now_ns: int = 0
    began: dict[int, int] = field(default_factory=dict)
    ended_at: dict[int, int] = field(default_factory=dict)
    refused: dict[int, tuple[Why, int]] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    used_bytes: int = 0
    most_ahead: Counter[ModelKey] = field(default_factory=Counter)
    most_at_once: int = 0
    _working: int = 0
    _ahead: Counter[ModelKey] = field(default_factory=Counter)
    _events: list[tuple[int, int, Callable[[], None]]] = field(default_factory=list)
    _ids: count[int] = field(default_factory=count)

    def at(self, now_ns: int, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (now_ns, next(self._ids), event))

    def arrive(self, job: DecodeJob) -> None:
        self.at(job.arrival_ns, lambda: self._arrive(job))

    def leave(self, job: DecodeJob, now_ns: int) -> None:
        self.at(now_ns, lambda: self._leave(job))

    def run(self, until_ns: int = 1 << 62) -> Decoders:
        while self._events and self._events[0][0] <= until_ns:
            self.now_ns = self._events[0][0]
            while self._events and self._events[0][0] == self.now_ns:
                heapq.heappop(self._events)[2]()
            self._decide()
        return self

    def _arrive(self, job: DecodeJob) -> None:
        refusal = admit(self.state, job, self.now_ns)
        if refusal is not None:
            self._refused(refusal)

    def _refused(self, refusal: NotDecoded) -> None:
        assert refusal.job.id not in self.began
        self.refused[refusal.job.id] = (refusal.why, self.now_ns)

    def _leave(self, job: DecodeJob) -> None:
        self.left.add(job.id)
        if job.id not in self.began and job.id not in self.refused:
            withdraw(self.state, job)

    def _reserve(self, job: DecodeJob) -> bool:
        if self.used_bytes + job.needs_bytes > self.memory_bytes:
            return False
        self.used_bytes += job.needs_bytes
        return True

    def _decide(self) -> None:
        while (decision := decide(self.state, self.now_ns, self._reserve)) is not None:
            if isinstance(decision, NotDecoded):
                self._refused(decision)
                continue
            self._begin(decision)

    def _begin(self, job: DecodeJob) -> None:
        assert job.id not in self.left, "nobody waits for it"
        self._working += 1
        self.most_at_once = max(self.most_at_once, self._working)
        self.began[job.id] = self.now_ns
        if job.key is not None and job.most_ahead:
            self._ahead[job.key] += 1
            self.most_ahead[job.key] = max(self.most_ahead[job.key], self._ahead[job.key])
        self.at(self.now_ns + self.true_ns(job), lambda: self._return(job))

    def _return(self, job: DecodeJob) -> None:
        self._working -= 1
        ended(self.state, job, self.true_ns(job))
        self.used_bytes -= job.needs_bytes
        self.ended_at[job.id] = self.now_ns
        if job.most_ahead and self.answer_ns is not None:
            self.at(self.now_ns + self.answer_ns, lambda: self._answer(job))

    def _answer(self, job: DecodeJob) -> None:
        assert job.key is not None
        self._ahead[job.key] -= 1
        answered(self.state, job.key, self.answer_ns)


def decoders(threads: int = 1, max_waiting: int = 1 << 20, **more: object) -> Decoders:
    state = Decoding(threads, max_waiting)
    state.costs["known"] = LatencyModel({1: 1.0, SECOND_NS: SECOND_NS})
    return Decoders(state, **more)  # type: ignore[arg-type]


def job(number: int, units: int, arrival_ns: int = 0, within_ns: int | None = None, **more: object) -> DecodeJob:
    deadline_ns = None if within_ns is None else arrival_ns + within_ns
    return DecodeJob(number, "known", units, arrival_ns, deadline_ns, **{"key": MODEL, **more})  # type: ignore[arg-type]


# --- who goes first


def test_the_urgent_go_first_and_what_is_owed_before_them() -> None:
    play = decoders()
    play.arrive(job(0, TINY * 9))
    for number, level in enumerate((3, 2, 1, RAISED_LEVEL), 1):
        play.arrive(job(number, TINY, 1, level=level))
    play.run()
    assert sorted(range(5), key=lambda number: play.began[number]) == [0, 4, 3, 2, 1]


def test_who_must_be_computed_by_a_time_is_decoded_by_then_or_not_at_all() -> None:
    play = decoders()
    play.arrive(job(0, 9 * TINY))
    play.arrive(job(1, TINY, 1, latest_start_ns=10 * TINY + 2))
    play.arrive(job(2, TINY, 2, latest_start_ns=10 * TINY + 2))
    play.arrive(job(3, TINY, 3, level=2, latest_start_ns=11 * TINY + 5))
    play.arrive(job(4, TINY, 4, latest_start_ns=3))
    play.arrive(job(5, TINY, 5))  # more urgent than one that was let in before it
    play.arrive(job(6, TINY, 6, level=3))
    play.run()
    assert sorted(play.began) == [0, 1, 5, 6]
    assert {number: why for number, (why, _) in play.refused.items()} == {
        2: Why.PREDICTED_LATE,
        3: Why.HOPELESS,
        4: Why.EXPIRED,
    }


def test_equals_go_by_deadline_and_then_as_they_came_whatever_their_size() -> None:
    play = decoders()
    play.arrive(job(0, 9 * TINY))
    play.arrive(job(1, 50 * TINY, 1))
    play.arrive(job(2, TINY, 2))
    play.arrive(job(3, 90 * TINY, 3, SECOND_NS))
    play.run()
    assert sorted(range(4), key=lambda number: play.began[number]) == [0, 3, 1, 2]


def test_who_names_no_deadline_is_not_stuck_behind_a_flood_of_those_who_do() -> None:
    """More with deadlines than can be decoded at all: of the time, one part in so many is for the oldest."""
    large, small = 160 * MILLISECOND_NS, 20 * MILLISECOND_NS
    play = decoders()
    for number in range(15 * 1000 // 20):
        play.arrive(job(number, small, number * small * 9 // 10, within_ns=60 * SECOND_NS))
    large_ones = [job(100_000 + number, large, number) for number in range(4)]
    for one in large_ones:
        play.arrive(one)
    play.run(until_ns=12 * SECOND_NS)
    began = sorted(play.began[one.id] for one in large_ones if one.id in play.began)
    assert len(began) == 4, "all of them went within twelve seconds"
    turn_ns = ONE_IN * large
    assert began[0] <= PATIENCE_NS + 2 * turn_ns
    for before, after in pairwise(began):
        assert after - before <= turn_ns + large + small


# --- who never goes


def test_who_cannot_be_in_time_by_wait_decoding_and_answer_is_refused_at_once() -> None:
    play = decoders(answer_ns=30 * MILLISECOND_NS)
    for number in range(20):  # the model is known to take 30 ms behind decoding
        play.arrive(job(number, 10 * MILLISECOND_NS, number * 10 * MILLISECOND_NS, most_ahead=100))
    at = 95 * MILLISECOND_NS
    play.arrive(job(100, 10 * MILLISECOND_NS, at, 35 * MILLISECOND_NS, most_ahead=100))
    play.arrive(job(101, 10 * MILLISECOND_NS, at, 120 * MILLISECOND_NS, most_ahead=100))
    play.run()
    assert play.refused == {100: (Why.PREDICTED_LATE, at)}


@pytest.mark.parametrize(("within_ms", "is_refused"), [(310, True), (335, False)])
def test_the_wait_for_the_answers_to_those_ahead_is_predicted(within_ms: int, is_refused: bool) -> None:
    """Two at a time take 100 ms to be answered, and four more must be before it: 200 ms, and then its own."""
    play = decoders(threads=4, answer_ns=100 * MILLISECOND_NS)
    for number in range(7):
        arrival_ns = 0 if number < 2 else 50 * MILLISECOND_NS
        play.arrive(job(number, TINY, arrival_ns, 400 * MILLISECOND_NS, most_ahead=2))
    play.arrive(job(7, TINY, 150 * MILLISECOND_NS, within_ms * MILLISECOND_NS, most_ahead=2))
    play.run(until_ns=150 * MILLISECOND_NS)
    assert (7 in play.refused) is is_refused


def test_where_three_times_too_much_comes_what_is_decoded_is_in_time() -> None:
    """Though each takes up to a half more or less than predicted, and its answer is 10 ms on its way."""
    chance = random.Random(3)
    off = [chance.uniform(0.5, 1.5) for _ in range(3000)]
    within_ns, answer_ns = 500 * MILLISECOND_NS, 10 * MILLISECOND_NS
    play = decoders(answer_ns=answer_ns, true_ns=lambda one: int(one.units * off[one.id]))
    jobs = [job(number, 9 * TINY, number * 3 * TINY, within_ns, most_ahead=16) for number in range(3000)]
    for one in jobs:
        play.arrive(one)
    play.run()
    began = [one for one in jobs if one.id in play.ended_at]
    in_time = [one for one in began if play.ended_at[one.id] + 2 * answer_ns <= one.arrival_ns + within_ns]
    assert len(began) > 900, "and the thread is never idle"
    assert len(in_time) > 0.97 * len(began)


def test_who_is_alone_is_tried_whatever_is_predicted() -> None:
    """So a prediction that was wrong is found out: after some tries the job is known to be short."""
    play = decoders(true_ns=lambda one: one.units // 100)
    for number in range(40):
        play.arrive(job(number, SECOND_NS, number * SECOND_NS, 50 * MILLISECOND_NS))
    play.run()
    assert not play.refused
    assert play.state.cost("known").expect_ns(SECOND_NS) < 50 * MILLISECOND_NS


# --- memory, batches ahead, hand-overs


def test_a_smaller_one_may_pass_who_does_not_fit_but_not_for_ever() -> None:
    play = decoders(threads=2, memory_bytes=100)
    play.arrive(job(0, 400 * MILLISECOND_NS, 0, needs_bytes=60))
    play.arrive(job(1, 100 * MILLISECOND_NS, 1, needs_bytes=100))
    for number in range(2, 2000):
        play.arrive(job(number, 100 * MILLISECOND_NS, 2 + number, needs_bytes=30))
    play.run()
    assert play.began[2] < play.began[1] < PATIENCE_NS + 400 * MILLISECOND_NS
    assert not play.refused


def test_what_fits_with_nothing_else_decoded_is_refused_else() -> None:
    play = decoders(memory_bytes=100)
    play.used_bytes = 50  # of requests that are computed
    play.arrive(job(0, TINY, needs_bytes=60))
    play.arrive(job(1, TINY, needs_bytes=50))
    play.run()
    assert play.refused == {0: (Why.NO_ROOM, 0)}
    assert 1 in play.ended_at


def test_two_batches_ahead_and_no_more() -> None:
    """And a model whose engine stands still holds up nobody else."""
    play = decoders(threads=4, answer_ns=None)
    for number in range(50):
        play.arrive(job(number, TINY, 0, most_ahead=8))
    play.arrive(job(100, TINY, 1, key=OTHER, most_ahead=8))
    play.run()
    assert play.most_ahead[MODEL] == 8 == sum(number < 50 for number in play.began)
    assert 100 in play.began


# --- whatever comes

jobs = st.lists(
    st.tuples(
        st.integers(0, 3000),  # arrival, ms
        st.sampled_from([10_000, 200_000, TINY, 30 * TINY, 300 * TINY]),  # units
        st.sampled_from([None, 5, 200, 5000]),  # within, ms
        st.sampled_from([MODEL, OTHER, None]),
        st.integers(RAISED_LEVEL, 3),
        st.integers(0, 120),  # memory
        st.sampled_from([None, 0, 10, 1000]),  # leaves after, ms
        st.sampled_from([None, None, 5, 200]),  # is to be computed within, ms
    ),
    min_size=1,
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(
    jobs=jobs,
    threads=st.integers(1, 3),
    answer_ms=st.sampled_from([0, 3, 500]),
    seed=st.integers(0, 9),
)
def test_whatever_comes(jobs: list[tuple[object, ...]], threads: int, answer_ms: int, seed: int) -> None:
    """Each ends exactly once; nobody is decoded whom nobody awaits; memory, queue, threads and lead are kept."""
    chance = random.Random(seed)
    off = {number: chance.choice((0.3, 1, 1, 5)) for number in range(len(jobs))}
    play = decoders(
        threads,
        max_waiting=20,
        memory_bytes=100,
        answer_ns=answer_ms * MILLISECOND_NS,
        true_ns=lambda one: int(one.units * off[one.id]),
    )
    made = []
    for number, (at_ms, units, within, key, level, needs, leaves, starts) in enumerate(jobs):
        one = job(
            number,
            units,  # type: ignore[arg-type]
            at_ms * MILLISECOND_NS,  # type: ignore[operator]
            None if within is None else within * MILLISECOND_NS,  # type: ignore[operator]
            key=key,
            most_ahead=0 if key is None else 4,
            level=level,
            needs_bytes=needs,
            latest_start_ns=None if starts is None else (at_ms + starts) * MILLISECOND_NS,  # type: ignore[operator]
        )
        made.append(one)
        play.arrive(one)
        if leaves is not None:
            play.leave(one, one.arrival_ns + leaves * MILLISECOND_NS)  # type: ignore[operator]
    play.run()
    for one in made:
        outcomes = (one.id in play.ended_at) + (one.id in play.refused)
        assert outcomes == 1 or (outcomes == 0 and one.id in play.left)
        if one.id in play.began and one.expiry_ns is not None and one.level:
            assert play.began[one.id] < one.expiry_ns
        if one.needs_bytes > play.memory_bytes:
            assert one.id not in play.began
    assert all(most <= 4 for most in play.most_ahead.values())
    assert (play.used_bytes, play.state.waiting) == (0, {})
    assert not play.state.running
    assert play.most_at_once <= threads
    assert not play.state.lines


@given(
    speed=st.floats(0.2, 5),
    fixed=st.floats(0.4, 2.5),
    unit=st.floats(0.4, 2.5),
    sides=st.lists(st.sampled_from([32, 256, 2000]), min_size=1, max_size=2, unique=True),
)
def test_costs_are_learned(speed: float, fixed: float, unit: float, sides: list[int]) -> None:
    """On a machine of another speed, from one or two sizes that come in turns: what is predicted is about right."""
    cost, sizes = Decoding(1, 1).cost("JPEG"), [side * side for side in sides]
    fixed_ns, unit_ns = speed * fixed * 300e3, speed * unit * 10
    for _ in range(400):
        for units in sizes:
            cost.observe(units, int(fixed_ns + unit_ns * units))
    for units in sizes:
        truth_ns = fixed_ns + unit_ns * units
        assert truth_ns / 1.7 <= cost.expect_ns(units) <= 1.7 * truth_ns
