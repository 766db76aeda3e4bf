"""The shell with real threads, which run when the test lets them, and with a clock that only the test moves."""

from __future__ import annotations

import asyncio
import random
import selectors
import threading
from collections.abc import Callable, Coroutine
from copy import deepcopy
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from convoy.app.engines.batch import BatchResult, EngineFailure, FailureScope, StageTimes
from convoy.app.scheduling.latency import LatencyModel
from convoy.app.scheduling.policy import RefusalReason, Refuse
from convoy.app.scheduling.queues import Dispatch, Lane
from convoy.app.scheduling.request import MILLISECOND_NS, SECOND_NS, Done, ModelKey, Outcome, Request, TensorRef
from convoy.app.scheduling.scheduler import Scheduler
from convoy.app.scheduling.slab import Slab, SlotState
from convoy.models.tensors import TensorBytes

KEY = ModelKey("model", 1)
NBYTES = 16


class Engine:
    """Copies each request's input to its output, backwards. `gate` holds it, `broken` kills it."""

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        self.gate = threading.Event()
        self.gate.set()
        self.poisonous: set[int] = set()
        self.broken: Exception | None = None
        self.batches: list[tuple[int, ...]] = []
        self.began: Callable[[int], object] = lambda number: None
        self.threads: set[str] = set()
        self.times = StageTimes(1, 2, 3)

    def __call__(self, requests: tuple[Request, ...]) -> BatchResult:
        self.batches.append(tuple(request.id for request in requests))
        self.began(len(self.batches))
        self.threads.add(threading.current_thread().name)
        inputs = [self.slab.tensor(request.inputs[0]) for request in requests]
        self.gate.wait()
        if self.broken is not None:
            raise self.broken
        if any(request.id in self.poisonous for request in requests):
            raise EngineFailure("somebody here is poisonous")
        answers = []
        for request, data in zip(requests, inputs, strict=True):
            (output,) = request.outputs
            assert output is not None
            place = self.slab.tensor(output)
            place[:] = bytes(data)[::-1]
            answers.append((TensorBytes((NBYTES,), place),))
        return BatchResult(tuple(answers), self.times)


class Shop:
    """A scheduler, its slab and everything that it reported."""

    def __init__(
        self,
        *,
        max_batch: int = 8,
        max_waiting: int = 10_000,
        lanes: int = 1,
        depth: int = 1,
    ) -> None:
        self.now_ns = 0
        self.slab = Slab(1 << 20)
        self.scheduler = Scheduler(self.slab, self, lambda: self.now_ns)
        self.scheduler.add_queue(KEY, max_batch=max_batch, max_waiting=max_waiting, levels=3, default_level=2)
        self.futures: dict[int, asyncio.Future[Done]] = {}
        self._ended: dict[int, Done] = {}
        self.ran: list[list[Done]] = []
        self.failed: list[str] = []
        self.counted: list[int] = []  # those that failed while somebody waited for them
        self.lost: list[tuple[Lane, str]] = []
        self.depth = depth
        self.engines: list[Engine] = []
        self.lanes = [self.add_lane() for _ in range(lanes)]
        self._ids = count()

    def add_lane(self, device: str = "device") -> Lane:
        """Its batches are predicted to take 1 ms."""
        number = len(self.engines)
        self.engines.append(Engine(self.slab))
        latency = LatencyModel({1: 1e6})
        lane = Lane(number, device, tuple(range(1, 9)), latency, self.depth)
        self.scheduler.add_lane(KEY, lane, self.engines[-1])
        return lane

    def batch_ran(self, dispatch: Dispatch, answers: BatchResult, done: list[Done], now_ns: int) -> None:
        assert all(one.request.id in self.ended for one in done), "nobody waits for what is written down of his batch"
        self.ran.append(done)

    def batch_failed(self, dispatch: Dispatch, reason: str) -> None:
        self.failed.append(reason)

    def request_failed(self, done: Done) -> None:
        assert done.outcome is not Outcome.ANSWERED
        assert done.request.id not in self.ended, "it is counted before whoever waits is told"
        self.counted.append(done.request.id)

    def lane_lost(self, key: ModelKey, lane: Lane, reason: str, scope: FailureScope) -> None:
        self.lost.append((lane, reason))

    def make(
        self,
        *,
        deadline_ns: int | None = None,
        samples: int = 1,
        priority: int = 0,
    ) -> Request:
        """A request whose input holds its own number, ready to be submitted."""
        number = next(self._ids)
        source, place = self.slab.reserve(NBYTES), self.slab.reserve(NBYTES)
        assert source is not None
        assert place is not None
        source.view[:] = number.to_bytes(NBYTES)
        return Request(
            id=number,
            key=KEY,
            samples=samples,
            shapes=((NBYTES,),),
            slots=(source.ref, place.ref),
            inputs=(TensorRef(source.ref, 0, NBYTES),),
            wanted=(0,),
            outputs=(TensorRef(place.ref, 0, NBYTES),),
            arrival_ns=self.now_ns,
            priority=priority,
            deadline_ns=deadline_ns,
        )

    def submit(self, **wishes) -> Request:
        request = self.make(**wishes)
        assert self.take(request)
        return request

    def take(self, request: Request) -> bool:
        future = self.scheduler.submit(request)
        if isinstance(future, Refuse):
            return False
        self.futures[request.id] = future
        return True

    @property
    def ended(self) -> dict[int, Done]:
        """How requests ended that were not cancelled, by their ids. Answers are checked and their slots freed."""
        for number, future in self.futures.items():
            if number not in self._ended and future.done() and not future.cancelled():
                done = self._ended[number] = future.result()
                assert done.request.id == number
                if done.outcome is Outcome.ANSWERED:
                    (answer,) = done.answers
                    assert bytes(answer.data) == number.to_bytes(NBYTES)[::-1], "somebody else's answer"
                    assert self.states(done.request) == {SlotState.ANSWERED}
                    self.slab.free(*done.request.slots)
        return self._ended

    def cancel(self, request: Request) -> bool:
        """Whether somebody waited for it until now."""
        future = self.futures[request.id]
        was_awaited = not future.done()
        future.cancel()
        self.scheduler.cancel(request)
        return was_awaited

    def states(self, request: Request) -> set[SlotState]:
        return {self.slab.state(slot) for slot in request.slots}

    def outcome(self, request: Request) -> Outcome | None:
        done = self.ended.get(request.id)
        return done.outcome if done is not None else None

    async def until(self, happened: Callable[[], bool]) -> None:
        while not happened():  # noqa: ASYNC110 - the threads know of no event
            await asyncio.sleep(0)

    async def rest(self) -> None:
        """Until nothing waits or runs."""
        await self.until(lambda: not self.scheduler.unfinished and not list(self.scheduler.running()))

    async def in_engine(self, batches: int = 1, engine: int = 0) -> None:
        """Until an engine has begun so many batches."""
        await self.until(lambda: len(self.engines[engine].batches) >= batches)

    async def close(self) -> None:
        for engine in self.engines:
            engine.gate.set()
        await self.rest()
        for lane in list(self.scheduler.state.queues[KEY].lanes):
            await self.scheduler.stop_lane(lane)


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer whenever there is nothing else to do."""

    def __init__(self) -> None:
        super().__init__(selectors.SelectSelector())
        self.now_s = 0.0
        selector = self._selector
        select = selector.select

        def jump(timeout: float | None = None):
            events = select(0 if timeout else timeout)
            if not events and timeout:
                self.now_s += timeout
            return events

        selector.select = jump

    def time(self) -> float:
        return self.now_s

    def now_ns(self) -> int:
        return round(self.now_s * SECOND_NS)


def _virtual_loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


def with_shop(test: Callable[[Any], Coroutine[None, None, None]], **options) -> None:
    """Run a test in a shop; afterwards every slot must be free and nothing unfinished."""

    async def main() -> None:
        shop = Shop(**options)
        await test(shop)
        await shop.close()
        await shop.until(lambda: len(shop.ended) >= 0 and shop.slab.slots_in_use == 0)
        assert shop.slab.used_bytes == 0
        assert not shop.scheduler.state.waiting

    asyncio.run(main())


# Answers


def test_a_request_is_answered_once_and_its_slots_come_back() -> None:
    async def scenario(shop: Shop) -> None:
        request = shop.submit()
        assert shop.states(request) == {SlotState.QUEUED}
        assert shop.scheduler.unfinished == 1
        await shop.rest()
        done = shop.ended[request.id]
        assert (done.outcome, done.batch_samples, done.times) == (Outcome.ANSWERED, 1, StageTimes(1, 2, 3))
        assert [d.request for d in shop.ran[0]] == [request]

    with_shop(scenario)


def test_requests_of_one_turn_share_a_batch_and_later_ones_the_next() -> None:
    async def scenario(shop: Shop) -> None:
        engine = shop.engines[0]
        engine.gate.clear()
        first = [shop.submit() for _ in range(3)]
        await shop.in_engine()
        second = []
        for _ in range(4):
            second.append(shop.submit())
            await asyncio.sleep(0)
        engine.gate.set()
        await shop.rest()
        assert engine.batches == [tuple(r.id for r in first), tuple(r.id for r in second)]
        assert shop.ended[second[0].id].batch_samples == 4
        assert threading.current_thread().name not in engine.threads

    with_shop(scenario)


def test_an_engine_has_its_next_batch_before_the_answers_of_the_last_are_given() -> None:
    async def scenario(shop: Shop) -> None:
        (engine,) = shop.engines
        seen: list[set[SlotState]] = []
        first, _, _, last = [shop.submit() for _ in range(4)]
        shop.futures[first.id].add_done_callback(lambda _: seen.append(shop.states(last)))
        await shop.rest()
        assert len(engine.batches) == 2
        assert seen == [{SlotState.COPYING}]

    with_shop(scenario, max_batch=2)


def test_the_time_in_the_queue_and_in_the_engine_is_told_and_learned() -> None:
    async def scenario(shop: Shop) -> None:
        engine = shop.engines[0]
        engine.gate.clear()
        shop.submit()
        await shop.in_engine()
        waiting = shop.submit()
        shop.now_ns = 7 * MILLISECOND_NS
        before_ns = shop.lanes[0].latency.expect_ns(1)
        engine.gate.set()
        await shop.rest()
        assert shop.ended[waiting.id].queue_ns == 7 * MILLISECOND_NS
        assert shop.lanes[0].latency.expect_ns(1) != before_ns

    with_shop(scenario)


def test_what_a_batch_waited_for_its_device_is_waiting_and_no_part_of_what_it_takes() -> None:
    async def scenario(shop: Shop) -> None:
        engine, lane = shop.engines[0], shop.lanes[0]
        staging = deepcopy(lane.staging)
        engine.gate.clear()
        engine.times = StageTimes(150_000, 700_000, 100_000, waited_ns=30 * MILLISECOND_NS)
        request = shop.submit()
        await shop.in_engine()
        shop.now_ns = 31 * MILLISECOND_NS
        engine.gate.set()
        await shop.rest()
        assert shop.ended[request.id].queue_ns == 30 * MILLISECOND_NS
        assert lane.latency.expect_ns(1) == MILLISECOND_NS, "as it would have taken alone, and as was expected"
        staging.observe(1, 200_000)  # copying in, and what it took to hand it over
        assert lane.staging.expect_ns(1) == staging.expect_ns(1)

    with_shop(scenario, depth=2)


def test_an_engine_of_two_places_is_called_by_two_threads_at_once() -> None:
    async def scenario(shop: Shop) -> None:
        engine = shop.engines[0]
        engine.gate.clear()
        requests = [shop.submit(samples=8) for _ in range(3)]
        await shop.in_engine(batches=2)
        assert len(engine.threads) == 2
        assert len(list(shop.scheduler.running())) == 2
        assert shop.states(requests[2]) == {SlotState.QUEUED}
        engine.gate.set()
        await shop.rest()
        assert len(engine.batches) == 3

    with_shop(scenario, depth=2)


def test_a_bug_in_the_observer_costs_nobody_an_answer() -> None:
    async def scenario(shop: Shop) -> None:
        complaints: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context["message"]))

        shop.batch_ran = lambda *args: 1 / 0  # type: ignore[method-assign]
        others = [shop.submit() for _ in range(12)]
        await shop.rest()
        assert [shop.outcome(request) for request in others] == [Outcome.ANSWERED] * 12
        assert complaints

    with_shop(scenario)


def test_who_is_refused_keeps_his_slots() -> None:
    async def scenario(shop: Shop) -> None:
        shop.engines[0].gate.clear()
        shop.submit()
        await shop.in_engine()
        shop.submit(samples=8)
        refused = shop.make()
        refusal = shop.scheduler.submit(refused)
        assert isinstance(refusal, Refuse)
        assert refusal.reason is RefusalReason.QUEUE_FULL
        assert shop.states(refused) == {SlotState.FILLING}
        for slot in refused.slots:
            shop.slab.free(slot)

    with_shop(scenario, max_waiting=8)


# Cancelling


def test_who_leaves_the_queue_gives_his_slots_back_at_once() -> None:
    async def scenario(shop: Shop) -> None:
        engine = shop.engines[0]
        engine.gate.clear()
        running = shop.submit()
        await shop.in_engine()
        gone, stays = shop.submit(), shop.submit()
        assert shop.cancel(gone)
        assert shop.states(gone) == {SlotState.FREE}
        engine.gate.set()
        await shop.rest()
        assert set(shop.ended) == {running.id, stays.id}
        assert engine.batches == [(running.id,), (stays.id,)]
        assert not shop.cancel(stays)
        assert not shop.cancel(gone)
        assert shop.counted == [], "whoever cancels counts it"

    with_shop(scenario)


def test_who_leaves_a_running_batch_keeps_his_slots_there_until_it_returns() -> None:
    async def scenario(shop: Shop) -> None:
        engine = shop.engines[0]
        engine.gate.clear()
        gone, stays = shop.submit(), shop.submit()
        await shop.in_engine()
        assert shop.cancel(gone)
        assert not shop.cancel(gone), "it counts once"
        assert shop.states(gone) == {SlotState.COPYING}
        engine.gate.set()
        await shop.rest()
        assert shop.states(gone) == {SlotState.FREE}
        assert set(shop.ended) == {stays.id}
        assert [[done.request.id for done in batch] for batch in shop.ran] == [[stays.id]], "nobody answered the other"

    with_shop(scenario)


# Failing batches


def test_only_the_poisonous_request_fails() -> None:
    async def scenario(shop: Shop) -> None:
        requests = [shop.submit() for _ in range(8)]
        shop.engines[0].poisonous = {requests[5].id}
        await shop.rest()
        failed = {number for number, done in shop.ended.items() if done.outcome is Outcome.MODEL_FAILED}
        assert failed == {requests[5].id}
        assert shop.ended[requests[5].id].reason == "somebody here is poisonous"
        assert len(shop.ended) == 8
        assert len(shop.engines[0].batches) <= 16
        assert len(shop.failed) == 4

    with_shop(scenario)


def test_who_has_left_is_not_tried_again() -> None:
    async def scenario(shop: Shop) -> None:
        engine = shop.engines[0]
        engine.gate.clear()
        requests = [shop.submit() for _ in range(4)]
        engine.poisonous = {requests[0].id}
        await shop.in_engine()
        shop.cancel(requests[0])
        shop.cancel(requests[3])
        engine.gate.set()
        await shop.rest()
        assert engine.batches[1:] == [(requests[1].id,), (requests[2].id,)]
        assert set(shop.ended) == {requests[1].id, requests[2].id}
        assert shop.counted == [], "whoever cancelled has counted them"

    with_shop(scenario)


def test_a_failed_batch_that_nobody_waits_for_ends() -> None:
    async def scenario(shop: Shop) -> None:
        engine = shop.engines[0]
        engine.gate.clear()
        requests = [shop.submit() for _ in range(3)]
        engine.poisonous = {requests[0].id}
        await shop.in_engine()
        for request in requests:
            shop.cancel(request)
        engine.gate.set()
        await shop.rest()
        assert shop.ended == {}
        assert len(engine.batches) == 1
        assert shop.counted == []

    with_shop(scenario)


def test_who_leaves_while_he_waits_to_be_tried_again_leaves() -> None:
    async def scenario(shop: Shop) -> None:
        engine = shop.engines[0]
        requests = [shop.submit() for _ in range(4)]
        engine.poisonous = {requests[0].id}
        # The failed batch's halves wait from one turn of the loop to the next.
        await shop.until(lambda: len(shop.failed) == 1)
        shop.cancel(requests[3])
        await shop.rest()
        assert set(shop.ended) == {r.id for r in requests[:3]}
        assert shop.outcome(requests[1]) is shop.outcome(requests[2]) is Outcome.ANSWERED

    with_shop(scenario)


def test_whatever_a_runner_raises_is_a_failure_of_the_batch() -> None:
    async def scenario(shop: Shop) -> None:
        shop.engines[0].broken = ZeroDivisionError("in the engine")
        request = shop.submit()
        await shop.rest()
        assert shop.outcome(request) is Outcome.MODEL_FAILED
        assert shop.ended[request.id].reason == "ZeroDivisionError: in the engine"
        shop.engines[0].broken = None
        again = shop.submit()
        await shop.rest()
        assert shop.outcome(again) is Outcome.ANSWERED

    with_shop(scenario)


# Lost lanes


def test_a_fatal_failure_ends_the_batch_and_the_lane_and_the_next_lane_goes_on() -> None:
    async def scenario(shop: Shop) -> None:
        engine = shop.engines[0]
        engine.gate.clear()
        engine.broken = EngineFailure("the device fell off the bus", FailureScope.ENGINE)
        running = [shop.submit(), shop.submit()]
        await shop.in_engine()
        waiting = shop.submit()
        engine.gate.set()
        await shop.until(lambda: bool(shop.lost))
        assert [shop.outcome(r) for r in running] == [Outcome.ENGINE_LOST] * 2
        assert all(shop.states(r) == {SlotState.FREE} for r in running)
        assert shop.lost == [(shop.lanes[0], "the device fell off the bus")]
        assert shop.states(waiting) == {SlotState.QUEUED}
        shop.add_lane()
        await shop.rest()
        assert shop.outcome(waiting) is Outcome.ANSWERED
        assert shop.engines[1].batches == [(waiting.id,)]

    with_shop(scenario)


@pytest.mark.parametrize(("scope", "lost"), [(FailureScope.ENGINE, 1), (FailureScope.DEVICE, 2)])
def test_a_lost_engine_leaves_its_device_to_others_and_a_lost_device_does_not(scope: FailureScope, lost: int) -> None:
    async def scenario(shop: Shop) -> None:
        shop.add_lane(device="other")
        shop.engines[0].broken = EngineFailure("it is gone", scope)
        shop.submit()
        await shop.rest()
        assert [lane for lane, _ in shop.lost] == shop.lanes[:lost]

    with_shop(scenario, lanes=2)


def test_a_hung_lane_is_given_up_and_its_slots_stay_until_it_returns() -> None:
    async def scenario(shop: Shop) -> None:
        engine, lane = shop.engines[0], shop.lanes[0]
        engine.gate.clear()
        hung, gone = shop.submit(), shop.submit()
        await shop.in_engine()
        shop.cancel(gone)
        waiting = shop.submit()
        ((running_lane, running),) = shop.scheduler.running()
        assert (running_lane, running.started_ns) == (lane, 0)
        shop.scheduler.give_up_lane(lane, "it hangs")
        shop.scheduler.give_up_lane(lane, "it still hangs")
        assert shop.outcome(hung) is Outcome.ENGINE_LOST
        assert gone.id not in shop.ended
        assert shop.counted == [hung.id]
        assert shop.lost == [(lane, "it hangs")]
        assert shop.states(hung) == shop.states(gone) == {SlotState.COPYING}
        shop.add_lane()
        await shop.until(lambda: shop.outcome(waiting) is Outcome.ANSWERED)
        assert shop.states(hung) == {SlotState.COPYING}
        engine.gate.set()
        await shop.until(lambda: shop.slab.slots_in_use == 0)
        assert len(shop.ended) == 2
        assert shop.ran == [[shop.ended[waiting.id]]]

    with_shop(scenario)


def test_a_lane_that_was_given_up_tells_when_no_thread_is_in_its_engine_any_more() -> None:
    async def scenario(shop: Shop) -> None:
        engine, lane = shop.engines[0], shop.lanes[0]
        engine.gate.clear()
        shop.submit()
        await shop.in_engine()
        shop.scheduler.give_up_lane(lane, "it hangs")
        returned = asyncio.ensure_future(shop.scheduler.until_returned(lane))
        for _ in range(3):
            await asyncio.sleep(0)
        assert not returned.done()
        assert not shop.scheduler.has_returned(lane)
        engine.gate.set()
        await returned
        await shop.until(lambda: shop.scheduler.has_returned(lane))
        await shop.scheduler.until_returned(lane)

    with_shop(scenario)


def test_a_lane_that_is_given_up_between_two_batches_has_returned() -> None:
    async def scenario(shop: Shop) -> None:
        shop.submit()
        await shop.rest()
        shop.scheduler.give_up_lane(shop.lanes[0], "its device is gone")
        assert shop.scheduler.has_returned(shop.lanes[0])
        await shop.scheduler.until_returned(shop.lanes[0])

    with_shop(scenario)


def test_a_device_that_is_given_up_takes_its_own_lanes_and_no_other() -> None:
    async def scenario(shop: Shop) -> None:
        other = shop.add_lane(device="other")
        shop.scheduler.give_up_device("device", "it has left the bus")
        assert shop.lost == [(lane, "it has left the bus") for lane in shop.lanes]
        assert shop.scheduler.state.queues[KEY].lanes == [other]
        request = shop.submit()
        await shop.rest()
        assert shop.outcome(request) is Outcome.ANSWERED
        assert shop.engines[-1].batches == [(request.id,)]

    with_shop(scenario, lanes=2)


def test_a_lane_that_returns_after_the_loop_has_closed_bothers_nobody() -> None:
    engines = []

    async def main() -> None:
        shop = Shop()
        engines.append(shop.engines[0])
        shop.engines[0].gate.clear()
        shop.submit()
        await shop.in_engine()
        shop.scheduler.give_up_lane(shop.lanes[0], "it hangs")

    asyncio.run(main())
    thread = next(t for t in threading.enumerate() if t.name in engines[0].threads)
    engines[0].gate.set()
    thread.join()


# Stopping


def test_stopping_a_lane_waits_for_its_batch_and_leaves_the_queue_to_the_others() -> None:
    async def scenario(shop: Shop) -> None:
        for engine in shop.engines:
            engine.gate.clear()
        first = shop.submit()
        await shop.in_engine()
        stopping, again = (asyncio.ensure_future(shop.scheduler.stop_lane(shop.lanes[0])) for _ in range(2))
        second, third = shop.submit(), None
        await shop.in_engine(engine=1)
        third = shop.submit()
        assert not stopping.done()
        assert not shop.scheduler.state.has_room(shop.lanes[0])
        assert not await shop.scheduler.stop_lane(shop.lanes[0], within_s=0)
        shop.engines[0].gate.set()
        assert [await stopping, await again] == [True, False], "one caller closes its engine"
        assert not await shop.scheduler.stop_lane(shop.lanes[0])
        assert shop.outcome(first) is Outcome.ANSWERED
        assert shop.scheduler.state.queues[KEY].lanes == [shop.lanes[1]]
        shop.engines[1].gate.set()
        await shop.rest()
        assert len(shop.engines[0].batches) == 1
        assert shop.outcome(second) is shop.outcome(third) is Outcome.ANSWERED

    with_shop(scenario, lanes=2)


def test_stopping_an_idle_lane_ends_its_threads() -> None:
    async def scenario(shop: Shop) -> None:
        shop.submit()
        await shop.rest()
        threads = [t for t in threading.enumerate() if t.name in shop.engines[0].threads]
        await shop.scheduler.stop_lane(shop.lanes[0])
        for thread in threads:
            thread.join()

    with_shop(scenario)


def test_stopping_a_lane_that_is_then_given_up_returns() -> None:
    async def scenario(shop: Shop) -> None:
        shop.engines[0].gate.clear()
        shop.submit()
        await shop.in_engine()
        stopping = asyncio.ensure_future(shop.scheduler.stop_lane(shop.lanes[0]))
        await asyncio.sleep(0)
        shop.scheduler.give_up_lane(shop.lanes[0], "it hangs")
        assert not await stopping

    with_shop(scenario)


def test_removing_a_queue_tells_those_who_wait() -> None:
    async def scenario(shop: Shop) -> None:
        await shop.scheduler.stop_lane(shop.lanes[0])
        requests = [shop.submit(samples=2) for _ in range(3)]
        shop.cancel(requests[1])
        assert shop.scheduler.waiting_samples(KEY) == 4
        other = ModelKey("other", 1)
        shop.scheduler.add_queue(other, max_batch=1, max_waiting=1)
        kept = replace(shop.make(), key=other)
        assert shop.take(kept)
        shop.scheduler.remove_queue(KEY, "the model was unloaded")
        assert shop.states(kept) == {SlotState.QUEUED}
        shop.scheduler.remove_queue(other, "the model was unloaded")
        assert shop.scheduler.waiting_samples(KEY) == shop.scheduler.waiting_samples(other) == 0
        assert shop.outcome(kept) is Outcome.STOPPED
        assert set(shop.ended) == {requests[0].id, requests[2].id, kept.id}
        assert {(d.outcome, d.reason) for d in shop.ended.values()} == {(Outcome.STOPPED, "the model was unloaded")}
        assert shop.slab.slots_in_use == 0
        shop.scheduler.add_queue(KEY, max_batch=1, max_waiting=1)

    with_shop(scenario)


# Probes


def test_a_probe_runs_in_the_lanes_thread_and_holds_the_lane() -> None:
    async def scenario(shop: Shop) -> None:
        gate, ran_in = threading.Event(), []

        def job() -> None:
            ran_in.append(threading.current_thread().name)
            gate.wait()

        probe = asyncio.ensure_future(shop.scheduler.probe(shop.lanes[0], job))
        await asyncio.sleep(0)
        assert not shop.scheduler.state.has_room(shop.lanes[0])
        request = shop.submit()
        await shop.until(lambda: bool(ran_in))
        assert shop.states(request) == {SlotState.QUEUED}
        gate.set()
        await probe
        await shop.rest()
        assert shop.outcome(request) is Outcome.ANSWERED
        assert set(ran_in) == shop.engines[0].threads

    with_shop(scenario)


def test_a_probe_raises_what_its_job_raises() -> None:
    async def scenario(shop: Shop) -> None:
        def job() -> None:
            raise LookupError("the canary sings wrong")

        with pytest.raises(LookupError, match="sings wrong"):
            await shop.scheduler.probe(shop.lanes[0], job)
        assert shop.scheduler.state.has_room(shop.lanes[0])

    with_shop(scenario)


def test_a_probe_may_be_abandoned_with_its_lane() -> None:
    async def scenario(shop: Shop) -> None:
        gate, begun = threading.Event(), threading.Event()

        def job() -> None:
            begun.set()
            gate.wait()

        probe = asyncio.ensure_future(shop.scheduler.probe(shop.lanes[0], job))
        await shop.until(begun.is_set)
        probe.cancel()
        shop.scheduler.give_up_lane(shop.lanes[0], "the canary hangs")
        waiting = shop.submit()
        shop.add_lane()
        await shop.until(lambda: shop.outcome(waiting) is Outcome.ANSWERED)
        gate.set()

    with_shop(scenario)


# Timers


@pytest.mark.parametrize("pause_s", [None, 0.001], ids=["in-one-turn", "one-after-the-other"])
def test_a_timer_ends_who_has_waited_for_too_long(pause_s: float | None) -> None:
    async def main() -> None:
        loop = _virtual_loop()
        shop = Shop(lanes=0)
        shop.scheduler = Scheduler(shop.slab, shop, loop.now_ns)
        shop.scheduler.add_queue(KEY, max_batch=8, max_waiting=100)
        ended_ns: dict[int, int] = {}

        def note(future: asyncio.Future[Done]) -> None:
            done = future.result()
            assert done.outcome is Outcome.EXPIRED
            ended_ns[done.request.id] = loop.now_ns()

        delays_ms = [500, 20, 20, 90, 10_000]
        for delay_ms in delays_ms:
            request = shop.make(deadline_ns=delay_ms * MILLISECOND_NS)
            assert shop.take(request)
            shop.futures[request.id].add_done_callback(note)
            if pause_s is not None:  # a timer is set by then, and the next may have to come before it
                await asyncio.sleep(pause_s)
        gone = shop.make(deadline_ns=50 * MILLISECOND_NS)
        assert shop.take(gone)
        shop.cancel(gone)
        await asyncio.sleep(20)
        for number, delay_ms in enumerate(delays_ms):
            assert delay_ms <= ended_ns[number] / MILLISECOND_NS < delay_ms + 1
        assert shop.slab.slots_in_use == 0
        assert not shop.scheduler.unfinished

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())


# Everything at once


@pytest.mark.parametrize(("lanes", "depth", "seed"), [(1, 1, 1), (2, 2, 2)])
def test_thousands_of_requests_with_departures_poison_and_lost_lanes(lanes: int, depth: int, seed: int) -> None:
    chance = random.Random(seed)
    total = 5000

    async def scenario(shop: Shop) -> None:
        cancelled: set[int] = set()
        counted_by_who_cancels: list[int] = []
        submitted: list[Request] = []
        poisonous: set[int] = set()
        while len(submitted) < total:
            for _ in range(chance.randint(1, 12)):
                shop.now_ns += chance.randint(0, MILLISECOND_NS // 10)
                is_dated = chance.random() < 0.2
                deadline_ns = shop.now_ns + chance.randint(1, 20) * MILLISECOND_NS if is_dated else None
                request = shop.make(
                    deadline_ns=deadline_ns, samples=chance.choice([1, 1, 1, 3]), priority=chance.choice([0, 0, 1, 3])
                )
                if chance.random() < 0.02:
                    poisonous.add(request.id)
                    for engine in shop.engines:
                        engine.poisonous = set(poisonous)
                if not shop.take(request):
                    for slot in request.slots:
                        shop.slab.free(slot)
                    continue
                submitted.append(request)
            for _ in range(chance.randint(0, 3)):
                gone = chance.choice(submitted[-20:])
                if gone.id not in shop.ended:
                    cancelled.add(gone.id)
                if shop.cancel(gone):
                    counted_by_who_cancels.append(gone.id)
            if chance.random() < 0.01:
                lane = chance.choice(shop.scheduler.state.queues[KEY].lanes)
                shop.scheduler.give_up_lane(lane, "chaos")
                shop.add_lane()
                shop.engines[-1].poisonous = set(poisonous)
            for _ in range(chance.randint(0, 3)):
                await asyncio.sleep(0)
        await shop.rest()
        ran = [done.request.id for batch in shop.ran for done in batch]
        assert sorted([*shop.counted, *counted_by_who_cancels, *ran]) == sorted(request.id for request in submitted)
        for request in submitted:
            if request.id in cancelled:
                assert request.id not in shop.ended
                continue
            outcome = shop.outcome(request)
            assert outcome is not None, "a request was lost"
            if outcome is Outcome.ANSWERED:
                assert request.id not in poisonous
            if outcome is Outcome.MODEL_FAILED:
                assert request.id in poisonous
        seen = {done.outcome for done in shop.ended.values()}
        assert {Outcome.ANSWERED, Outcome.MODEL_FAILED, Outcome.ENGINE_LOST} <= seen

    with_shop(scenario, lanes=lanes, depth=depth)
