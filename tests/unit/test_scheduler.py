"""The shell with real threads, which run when the test lets them, and with a clock that only the test moves."""

from __future__ import annotations

import asyncio
import random
import selectors
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from itertools import count
from statistics import fmean
from typing import Any

import pytest

from convoy.app.batch import BatchResult, EngineFailure, FailureScope, StageTimes
from convoy.app.scheduling.latency import LatencyModel
from convoy.app.scheduling.policy import Dispatch, RefusalReason, Refuse
from convoy.app.scheduling.queues import Lane
from convoy.app.scheduling.request import MILLISECOND_NS, SECOND_NS, Done, ModelKey, Outcome, Request, TensorPlace
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
        inputs = [self.slab.tensors(request.slots, request.inputs)[0] for request in requests]
        self.gate.wait()
        if self.broken is not None:
            raise self.broken
        if any(request.id in self.poisonous for request in requests):
            raise EngineFailure("somebody here is poisonous")
        answers = []
        for request, data in zip(requests, inputs, strict=True):
            (place,) = self.slab.tensors(request.slots, request.outputs)
            assert place is not None
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
        here_below_ns: int = 0,
        queues_one: bool = False,
    ) -> None:
        self.now_ns = 0
        self.slab = Slab(1 << 20)
        self.loop_is_busy = True  # all the time, or never
        self.scheduler = Scheduler(
            self.slab, self, lambda: self.now_ns, lambda: self.now_ns if self.loop_is_busy else 0
        )
        self.scheduler.add_queue(KEY, max_batch=max_batch, max_waiting=max_waiting, levels=3, default_level=2)
        self.ended: dict[int, Done] = {}
        self.ran: list[list[Done]] = []
        self.failed: list[str] = []
        self.counted: list[int] = []  # those that failed while somebody waited for them
        self.lost: list[tuple[Lane, str]] = []
        self.depth, self.queues_one = depth, queues_one
        self.engines: list[Engine] = []
        self.lanes = [self.add_lane(here_below_ns) for _ in range(lanes)]
        self._ids = count()

    def add_lane(self, here_below_ns: int = 0, device: str = "device") -> Lane:
        """Its batches are predicted to take 1 ms."""
        number = len(self.engines)
        self.engines.append(Engine(self.slab))
        latency = LatencyModel({1: 1e6})
        lane = Lane(number, device, tuple(range(1, 9)), latency, self.depth, queues_one=self.queues_one)
        self.scheduler.add_lane(KEY, lane, self.engines[-1], here_below_ns=here_below_ns)
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
        comes_alone: bool = False,
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
            inputs=(TensorPlace(0, 0, NBYTES),),
            wanted=(0,),
            outputs=(TensorPlace(1, 0, NBYTES),),
            arrival_ns=self.now_ns,
            priority=priority,
            deadline_ns=deadline_ns,
            comes_alone=comes_alone,
        )

    def submit(self, **wishes) -> Request:
        request = self.make(**wishes)
        assert self.scheduler.submit(request, lambda done: self.on_done(done)) is None
        return request

    def on_done(self, done: Done) -> None:
        number = done.request.id
        assert number not in self.ended, "a request ended twice"
        self.ended[number] = done
        if done.outcome is Outcome.ANSWERED:
            (answer,) = done.answers
            assert bytes(answer.data) == number.to_bytes(NBYTES)[::-1], "somebody else's answer"
            for slot in done.request.slots:
                assert self.slab.state(slot) is SlotState.ANSWERED
                self.slab.free(slot)

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


class TimedShop(Shop):
    """A shop whose clock is that of its `VirtualLoop`; an engine's gate may move it."""

    def __init__(self, **options) -> None:
        self.loop = _virtual_loop()
        super().__init__(**options)

    @property
    def now_ns(self) -> int:  # type: ignore[override]
        return self.loop.now_ns()

    @now_ns.setter
    def now_ns(self, now_ns: int) -> None:
        self.loop.now_s = now_ns / SECOND_NS

    async def until(self, happened: Callable[[], bool]) -> None:
        while not happened():  # noqa: ASYNC110 - as above
            await asyncio.sleep(1e-6)  # with nothing, no time would pass


def _virtual_loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


def with_shop(test: Callable[[Any], Coroutine[None, None, None]], make: type[Shop] = Shop, **options) -> None:
    """Run a test in a shop; afterwards every slot must be free and nothing unfinished."""

    async def main() -> None:
        shop = make(**options)
        await test(shop)
        await shop.close()
        await shop.until(lambda: shop.slab.slots_in_use == 0)
        assert shop.slab.used_bytes == 0
        assert not shop.scheduler.state.waiting

    with asyncio.Runner(loop_factory=VirtualLoop if make is TimedShop else None) as runner:
        runner.run(main())


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


def test_short_batches_run_in_the_loops_own_thread_and_long_ones_do_not() -> None:
    async def scenario(shop: Shop) -> None:
        (lane,), (here,) = shop.lanes, shop.engines
        requests = [shop.submit() for _ in range(3)]
        await shop.rest()
        assert here.batches == [tuple(request.id for request in requests)]
        assert here.threads == {threading.current_thread().name}
        assert {shop.ended[request.id].batch_samples for request in requests} == {3}
        for _ in range(20):  # now it is believed to take longer
            lane.latency.observe(1, 10_000_000)
        shop.submit()
        await shop.rest()
        assert here.threads > {threading.current_thread().name}

    with_shop(scenario, here_below_ns=5_000_000)


class _Takes(threading.Event):
    """An engine's gate that lets a batch take so long on the shop's clock."""

    def __init__(self, shop: Shop, milliseconds: float) -> None:
        super().__init__()
        self.shop, self.ns = shop, int(milliseconds * MILLISECOND_NS)

    def wait(self, timeout: float | None = None) -> bool:
        self.shop.now_ns += self.ns
        return True


@pytest.mark.parametrize(
    ("samples", "takes_ms", "between_ms", "runs_here"),
    [
        pytest.param(1, 1.0, 2, False, id="the engine has a third"),
        pytest.param(1, 1.0, 7, True, id="the engine has an eighth"),
        pytest.param(1, 1.0, 1000, True, id="nobody asks"),
        pytest.param(1, 1.3, 1000, False, id="above twice the limit"),
        pytest.param(40, 2.0, 7, True, id="cheap, and the engine has less than a quarter"),
        pytest.param(40, 2.0, 5, False, id="cheap, and the engine has more"),
        pytest.param(40, 2.3, 1000, True, id="cheap, and below four times the limit"),
        pytest.param(40, 2.5, 1000, False, id="cheap, and above four times the limit"),
        pytest.param(20, 2.0, 1000, False, id="not so cheap"),
    ],
)
def test_a_longer_batch_runs_on_the_loop_where_the_engine_has_little_of_a_samples_time(
    samples: int, takes_ms: float, between_ms: int, runs_here: bool
) -> None:
    """The limit is 0.6 ms."""

    async def scenario(shop: Shop) -> None:
        (engine,) = shop.engines
        engine.gate = _Takes(shop, takes_ms)
        for _ in range(60):
            engine.threads.clear()
            shop.submit(samples=samples)
            await shop.rest()
            shop.now_ns += between_ms * MILLISECOND_NS
        assert engine.threads == {"MainThread" if runs_here else "lane-0.0"}

    with_shop(scenario, here_below_ns=600_000, max_batch=64)


@pytest.mark.parametrize(
    ("settings", "between_ms", "waited_ms", "each_turn", "first_batch"),
    [
        pytest.param({}, 7, 0, [2, 2, 2, 2], 6, id="the engine has little"),
        pytest.param({}, 7, 0, [2, 2, 0, 2], 4, id="a turn brings nothing"),
        pytest.param({}, 7, 0, [2, 0, 2], 2, id="the first brings nothing"),
        pytest.param({}, 7, 0, [1, 2], 1, id="alone"),
        pytest.param({}, 1, 0, [2, 2], 2, id="the engine has half"),
        pytest.param({}, 7, 3, [2, 2], 2, id="the oldest has waited"),
        pytest.param({"max_batch": 2}, 7, 0, [2, 2], 2, id="a batch is full"),
        pytest.param({"max_waiting": 4}, 7, 0, [3, 3], 3, id="the queue would be full"),
        pytest.param({"here_below_ns": 0}, 7, 0, [2, 2], 2, id="in a thread"),
    ],
)
def test_a_batch_on_the_loop_waits_for_those_that_are_being_read_where_the_engine_has_little_of_their_time(
    settings: dict[str, int], between_ms: int, waited_ms: int, each_turn: list[int], first_batch: int
) -> None:
    async def scenario(shop: Shop) -> None:
        (engine,) = shop.engines
        engine.gate = _Takes(shop, 1.0)
        for _ in range(60):
            shop.submit()
            await shop.rest()
            shop.now_ns += between_ms * MILLISECOND_NS
        engine.batches.clear()
        for requests in each_turn:
            for _ in range(requests):
                shop.submit()
            shop.now_ns += waited_ms * MILLISECOND_NS
            await asyncio.sleep(0)
        await shop.rest()
        assert len(engine.batches[0]) == first_batch
        assert sum(map(len, engine.batches)) == sum(each_turn)

    with_shop(scenario, **{"here_below_ns": 5_000_000, **settings})


@pytest.mark.parametrize(
    ("time_left_ms", "other_model", "first_batch"), [(100, False, 4), (40, False, 2), (100, True, 2)]
)
def test_nobody_in_a_hurry_and_no_other_model_waits_for_those_that_are_being_read(
    time_left_ms: int, other_model: bool, first_batch: int
) -> None:
    other = ModelKey("other", 1)

    async def scenario(shop: Shop) -> None:
        (engine,) = shop.engines
        shop.scheduler.add_queue(other, max_batch=1, max_waiting=8)
        engine.gate = _Takes(shop, 1.0)
        for _ in range(60):
            shop.submit()
            await shop.rest()
            shop.now_ns += 7 * MILLISECOND_NS
        engine.batches.clear()
        if other_model:
            foreign = shop.make()
            foreign.key = other
            assert shop.scheduler.submit(foreign, lambda _: None) is None
        for _ in range(2):
            for _ in range(2):
                shop.submit(deadline_ns=shop.now_ns + time_left_ms * MILLISECOND_NS)
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        assert sum(map(len, engine.batches)) == 4
        assert len(engine.batches[0]) == first_batch
        shop.scheduler.remove_queue(other, "the test is over")
        await shop.rest()

    with_shop(scenario, here_below_ns=5_000_000)


async def _come_together(shop: TimedShop, requests: int, *, takes_ms: float = 1.0, between_ms: float = 20.0) -> None:
    """So many at a time, so often that it is known, and known that no more come."""
    shop.engines[0].gate, shop.loop_is_busy = _Takes(shop, takes_ms), False
    for _ in range(80):
        for _ in range(requests):
            shop.submit(comes_alone=True)
        await shop.rest()
        await asyncio.sleep(between_ms / 1000)
    shop.loop_is_busy = True


@pytest.mark.parametrize(
    ("before", "wishes", "between_ms", "come_ms", "batches"),
    [
        pytest.param(3, {}, 9, [0, 0.5, 1.5, 4], [(3, 1.5), (1, 6)], id="as many as the last had"),
        pytest.param(3, {}, 9, [0, 0.5, 3], [(2, 2), (1, 5)], id="no more come in time"),
        pytest.param(3, {}, 9, [0, 0.5, 0.5, 0.5], [(4, 0.5)], id="more than the last had"),
        pytest.param(1, {}, 9, [0, 0.5], [(1, 0), (1, 1)], id="the last were alone"),
        pytest.param(3, {"comes_alone": False}, 9, [0, 0.5], [(1, 0), (1, 1)], id="its wire has read who is there"),
        pytest.param(3, {"left_ms": 40}, 9, [0, 0.5], [(1, 0), (1, 1)], id="in a hurry"),
        pytest.param(3, {"left_ms": 60}, 9, [0, 0.5], [(2, 2)], id="in no hurry"),
        pytest.param(3, {}, 1, [0, 0.5], [(1, 0), (1, 1)], id="the engine has half"),
    ],
)
def test_requests_that_come_one_after_the_other_wait_for_as_many_as_shared_the_last_batches(
    before: int,
    wishes: dict[str, Any],
    between_ms: int,
    come_ms: list[float],
    batches: list[tuple[int, float]],
) -> None:
    """A batch takes 1 ms. Of each that ran: how many requests it had, and when it began, after the first had come."""
    wishes = {"comes_alone": True, "left_ms": None, **wishes}
    left_ms, comes_alone = wishes["left_ms"], wishes["comes_alone"]

    async def scenario(shop: TimedShop) -> None:
        await _come_together(shop, before, between_ms=between_ms)
        began_ns, ran = shop.now_ns, len(shop.ran)
        ended_ms: list[float] = []

        def batch_ran(_dispatch: Dispatch, _answers: BatchResult, done: list[Done], now_ns: int) -> None:
            shop.ran.append(done)
            ended_ms.append((now_ns - began_ns) / MILLISECOND_NS)

        shop.batch_ran = batch_ran  # type: ignore[method-assign]
        for come in come_ms:
            await asyncio.sleep(max(0.0, (began_ns + come * MILLISECOND_NS - shop.now_ns) / SECOND_NS))
            deadline_ns = None if left_ms is None else began_ns + left_ms * MILLISECOND_NS
            shop.submit(comes_alone=comes_alone, deadline_ns=deadline_ns)
        await asyncio.sleep(1)
        assert [len(done) for done in shop.ran[ran:]] == [requests for requests, _ in batches]
        assert [ended - 1 for ended in ended_ms] == pytest.approx([start for _, start in batches], abs=0.01)

    with_shop(scenario, TimedShop, here_below_ns=5_000_000)


def test_clients_who_are_read_without_rest_become_one_group() -> None:
    async def scenario(shop: TimedShop) -> None:
        # A loop reads two of 8 clients every 0.2 ms, and each asks again with its answer.
        shop.engines[0].gate = _Takes(shop, 0.05)
        unread, asked = 8, 0
        while len(shop.ended) < 1600:
            for _ in range(min(2, unread)):
                shop.submit(comes_alone=True)
                asked += 1
            await asyncio.sleep(0.0002)
            unread = 8 + len(shop.ended) - asked
        assert fmean(len(done) for done in shop.ran[-20:]) > 6

    with_shop(scenario, TimedShop, here_below_ns=50_000_000)


def test_nobody_waits_often_for_more_than_come_together() -> None:
    async def scenario(shop: TimedShop) -> None:
        await _come_together(shop, 4)
        shop.loop_is_busy = False
        queued_ms: list[float] = []
        for _ in range(1024):
            requests = [shop.submit(comes_alone=True) for _ in range(4)]
            await shop.rest()
            queued_ms.append(shop.ended[requests[-1].id].queue_ns / MILLISECOND_NS)
            await asyncio.sleep(0.02)
        held = [ms for ms in queued_ms if ms]
        assert held == pytest.approx([2] * len(held), abs=0.01)
        assert 1 <= len(held) <= 2 + 1024 / 256

    with_shop(scenario, TimedShop, here_below_ns=5_000_000)


def test_nobody_waits_often_for_clients_that_have_gone() -> None:
    async def scenario(shop: TimedShop) -> None:
        await _come_together(shop, 8)
        queued_ms = []
        for _ in range(20):
            request = shop.submit(comes_alone=True)
            await shop.rest()
            queued_ms.append(shop.ended[request.id].queue_ns / MILLISECOND_NS)
            await asyncio.sleep(0.02)
        assert queued_ms == pytest.approx([2] * 4 + [0] * 16, abs=0.01)

    with_shop(scenario, TimedShop, here_below_ns=50_000_000)


def test_who_comes_when_the_loop_was_idle_is_not_waited_for_again() -> None:
    async def scenario(shop: TimedShop) -> None:
        await _come_together(shop, 3)
        shop.loop_is_busy = False
        queued_ms = []
        for _ in range(12):
            first = shop.submit(comes_alone=True)
            for _ in range(2):
                await asyncio.sleep(0.0003)
                shop.submit(comes_alone=True)
            await shop.rest()
            queued_ms.append(shop.ended[first.id].queue_ns / MILLISECOND_NS)
            await asyncio.sleep(0.02)
        assert queued_ms[0] == pytest.approx(0.6, abs=0.01)
        assert queued_ms[-4:] == [0, 0, 0, 0]

    with_shop(scenario, TimedShop, here_below_ns=5_000_000)


@pytest.mark.parametrize("period_ms", [1.5, 1.9, 2, 3])
def test_a_quick_client_is_not_slowed_down_to_the_pace_of_another(period_ms: float) -> None:
    async def answered(shop: TimedShop, comes_alone: bool) -> int:
        """In a second, of one who asks 0.3 ms after each answer, beside one who asks at fixed times."""
        shop.engines[0].gate, shop.loop_is_busy = _Takes(shop, 0.1), False
        ends_ns = shop.now_ns + SECOND_NS
        counts = [0, 0]

        async def client(number: int, pause_ms: float) -> None:
            while shop.now_ns < ends_ns:
                own_id = shop.submit(comes_alone=comes_alone).id
                await shop.until(partial(shop.ended.__contains__, own_id))
                counts[number] += 1
                await asyncio.sleep(pause_ms / 1000)

        await asyncio.gather(client(0, 0.3), client(1, period_ms - 0.1))
        return counts[0]

    async def scenario(shop: TimedShop) -> None:
        alone = await answered(shop, comes_alone=False)
        assert await answered(shop, comes_alone=True) > 0.75 * alone

    with_shop(scenario, TimedShop, here_below_ns=5_000_000)


def test_requests_that_come_together_by_another_wire_are_not_waited_for() -> None:
    async def scenario(shop: TimedShop) -> None:
        shop.engines[0].gate = _Takes(shop, 0.2)
        for _ in range(60):
            for _ in range(8):
                shop.submit()
            await shop.rest()
            await asyncio.sleep(0.01)
            lone = shop.submit(comes_alone=True)
            await shop.rest()
            assert shop.ended[lone.id].queue_ns == 0
            await asyncio.sleep(0.01)

    with_shop(scenario, TimedShop, here_below_ns=50_000_000)


def test_nobody_of_another_wire_is_held_back() -> None:
    async def scenario(shop: TimedShop) -> None:
        await _come_together(shop, 4)
        held = shop.submit(comes_alone=True)
        await asyncio.sleep(0.0005)
        other = shop.submit()
        await shop.rest()
        assert shop.ended[held.id].queue_ns == pytest.approx(500_000, abs=10_000)
        assert shop.ended[other.id].queue_ns == 0

    with_shop(scenario, TimedShop, here_below_ns=5_000_000)


def test_a_request_is_held_back_once_and_for_two_milliseconds_whenever_it_arrived() -> None:
    async def scenario(shop: TimedShop) -> None:
        await _come_together(shop, 6)
        first = shop.make(comes_alone=True)
        first.arrival_ns = shop.now_ns - 300_000
        assert shop.scheduler.submit(first, shop.on_done) is None
        await asyncio.sleep(0.0005)
        shop.submit(comes_alone=True)
        await shop.rest()
        assert shop.ended[first.id].queue_ns == pytest.approx(2_000_000, abs=10_000)

    with_shop(scenario, TimedShop, here_below_ns=50_000_000)


def test_what_a_full_batch_leaves_behind_is_not_held_back_when_it_has_waited() -> None:
    async def scenario(shop: TimedShop) -> None:
        await _come_together(shop, 4, takes_ms=2.5)
        six = [shop.submit(comes_alone=True) for _ in range(6)]
        await shop.rest()
        assert shop.ended[six[-1].id].queue_ns == pytest.approx(2_500_000, abs=10_000)

    with_shop(scenario, TimedShop, here_below_ns=50_000_000, max_batch=4)


def test_a_batch_that_is_held_back_goes_with_what_is_decided_meanwhile_and_leaves_nothing_behind() -> None:
    async def scenario(shop: TimedShop) -> None:
        await _come_together(shop, 4)
        gone, began_ns = shop.submit(comes_alone=True), shop.now_ns
        await asyncio.sleep(0.001)
        shop.scheduler.cancel(gone.id)
        await asyncio.sleep(0.0005)
        shop.submit(comes_alone=True)
        await shop.rest()
        assert shop.now_ns - began_ns <= 4 * MILLISECOND_NS
        assert gone.id not in shop.ended
        held = shop.submit(comes_alone=True)
        await asyncio.sleep(0.0005)
        hurried = shop.submit(comes_alone=True, deadline_ns=shop.now_ns + 20 * MILLISECOND_NS)
        await shop.rest()
        assert {done.request for done in shop.ran[-1]} == {held, hurried}
        assert shop.ended[hurried.id].queue_ns == 0

    with_shop(scenario, TimedShop, here_below_ns=5_000_000)


@pytest.mark.parametrize(
    ("here_below_ms", "requests", "state_of_next", "threads"),
    [
        pytest.param(0.0, 2, SlotState.COPYING, {"lane-0.0"}, id="in a thread"),
        pytest.param(50.0, 32, SlotState.COPYING, {"MainThread", "lane-0.0"}, id="short, beside many answers"),
        pytest.param(50.0, 30, SlotState.QUEUED, {"MainThread"}, id="short, beside few answers"),
    ],
)
def test_an_engine_has_its_next_batch_before_the_answers_of_the_last_are_given(
    here_below_ms: float, requests: int, state_of_next: SlotState, threads: set[str]
) -> None:
    async def scenario(shop: Shop) -> None:
        (engine,) = shop.engines
        seen: list[set[SlotState]] = []
        on_done = shop.on_done

        def note(done: Done) -> None:
            seen.append(shop.states(last))
            shop.on_done = on_done  # type: ignore[method-assign]
            on_done(done)

        shop.on_done = note  # type: ignore[method-assign]
        last = [shop.submit() for _ in range(requests)][-1]
        await shop.rest()
        assert len(engine.batches) == 2
        assert seen == [{state_of_next}]
        assert engine.threads == threads

    with_shop(scenario, max_batch=requests // 2, here_below_ns=int(here_below_ms * MILLISECOND_NS))


def test_short_batches_in_a_row_leave_others_their_turns_of_the_loop() -> None:
    async def scenario(shop: Shop) -> None:
        engine = shop.engines[0]
        engine.gate = _Takes(shop, 1.0)
        for _ in range(12):
            shop.submit()
        seen = set()
        while len(engine.batches) < 12:
            seen.add(len(engine.batches))
            await asyncio.sleep(0)
        assert len(seen) >= 4
        await shop.rest()
        assert engine.threads == {threading.current_thread().name}

    with_shop(scenario, here_below_ns=5_000_000, max_batch=1)


def test_whatever_goes_wrong_in_the_loops_own_thread_ends_as_in_any_other() -> None:
    async def scenario(shop: Shop) -> None:
        here = shop.engines[0]
        good, bad = shop.submit(), shop.submit()
        here.poisonous = {bad.id}
        await shop.rest()
        assert shop.ended[good.id].outcome is Outcome.ANSWERED
        assert shop.ended[bad.id].outcome is Outcome.MODEL_FAILED
        here.broken = EngineFailure("the engine is no more", FailureScope.ENGINE)
        lost = shop.submit()
        await shop.rest()
        assert shop.ended[lost.id].outcome is Outcome.ENGINE_LOST
        assert [reason for _, reason in shop.lost] == ["the engine is no more"]
        assert here.threads == {threading.current_thread().name}

    with_shop(scenario, here_below_ns=5_000_000)


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
        engine.gate.clear()
        engine.times = StageTimes(150_000, 700_000, 100_000, waited_ns=30 * MILLISECOND_NS)
        request = shop.submit()
        await shop.in_engine()
        shop.now_ns = 31 * MILLISECOND_NS
        engine.gate.set()
        await shop.rest()
        assert shop.ended[request.id].queue_ns == 30 * MILLISECOND_NS
        assert lane.latency.expect_ns(1) == MILLISECOND_NS, "as it would have taken alone, and as was expected"
        assert lane.staging.hidden_ns(1) == 200_000, "copying in, and what it took to hand it over"

    with_shop(scenario)


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


def test_a_thread_goes_on_with_a_full_batch_while_the_loop_is_busy_elsewhere() -> None:
    async def scenario(shop: Shop) -> None:
        engine = shop.engines[0]
        engine.gate.clear()
        shop.submit()
        await shop.in_engine()
        full = [shop.submit() for _ in range(8)]
        more = [shop.submit() for _ in range(8)]
        await shop.until(lambda: len(list(shop.scheduler.running())) == 2)
        assert len(engine.batches) == 1
        assert [shop.states(one) for one in (full[-1], more[0])] == [{SlotState.COPYING}, {SlotState.QUEUED}]
        shop.now_ns += 3 * MILLISECOND_NS
        engine.gate.set()
        began = threading.Event()
        engine.began = lambda number: began.set() if number == 2 else None
        assert began.wait(60), "nothing has run on the loop meanwhile"
        await shop.rest()
        assert engine.batches == [(0,), tuple(range(1, 9)), tuple(range(9, 17))]
        assert len(engine.threads) == 1
        waited_ns = {shop.ended[one.id].queue_ns for one in full}
        assert waited_ns == {3 * MILLISECOND_NS}, "until its thread began it, which had another to end"

    with_shop(scenario, queues_one=True)


def test_who_leaves_a_batch_that_has_not_begun_gets_his_slots_back_when_it_has_run() -> None:
    async def scenario(shop: Shop) -> None:
        engine = shop.engines[0]
        engine.gate.clear()
        shop.submit()
        await shop.in_engine()
        gone, *others = [shop.submit() for _ in range(8)]
        await shop.until(lambda: len(list(shop.scheduler.running())) == 2)
        assert shop.scheduler.cancel(gone.id)
        engine.gate.set()
        await shop.rest()
        assert shop.outcome(gone) is None
        assert {shop.outcome(one) for one in others} == {Outcome.ANSWERED}
        assert not shop.slab.used_bytes

    with_shop(scenario, queues_one=True)


@pytest.mark.parametrize("culprit", ["observer", "client"])
def test_a_bug_in_who_is_told_costs_nobody_else_his_answer(culprit: str) -> None:
    async def scenario(shop: Shop) -> None:
        complaints: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context["message"]))

        def clumsy(*args: object) -> None:
            for slot in unlucky.slots:
                shop.slab.free(slot)
            raise LookupError("a bug")

        unlucky = shop.make()
        if culprit == "observer":
            shop.batch_ran = lambda *args: 1 / 0  # type: ignore[method-assign]
            assert shop.scheduler.submit(unlucky, shop.on_done) is None
        else:
            assert shop.scheduler.submit(unlucky, clumsy) is None
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
        refusal = shop.scheduler.submit(refused, shop.on_done)
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
        assert shop.scheduler.cancel(gone.id)
        assert shop.states(gone) == {SlotState.FREE}
        engine.gate.set()
        await shop.rest()
        assert set(shop.ended) == {running.id, stays.id}
        assert engine.batches == [(running.id,), (stays.id,)]
        assert not shop.scheduler.cancel(stays.id)
        assert not shop.scheduler.cancel(gone.id)
        assert shop.counted == [], "whoever cancels counts it"

    with_shop(scenario)


def test_who_leaves_a_running_batch_keeps_his_slots_there_until_it_returns() -> None:
    async def scenario(shop: Shop) -> None:
        engine = shop.engines[0]
        engine.gate.clear()
        gone, stays = shop.submit(), shop.submit()
        await shop.in_engine()
        assert shop.scheduler.cancel(gone.id)
        assert not shop.scheduler.cancel(gone.id), "it counts once"
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
        shop.scheduler.cancel(requests[0].id)
        shop.scheduler.cancel(requests[3].id)
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
            shop.scheduler.cancel(request.id)
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
        shop.scheduler.cancel(requests[3].id)
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


def test_a_hung_lane_is_given_up_and_its_slots_stay_until_it_returns() -> None:
    async def scenario(shop: Shop) -> None:
        engine, lane = shop.engines[0], shop.lanes[0]
        engine.gate.clear()
        hung, gone = shop.submit(), shop.submit()
        await shop.in_engine()
        shop.scheduler.cancel(gone.id)
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
        stopping = asyncio.ensure_future(shop.scheduler.stop_lane(shop.lanes[0]))
        second, third = shop.submit(), None
        await shop.in_engine(engine=1)
        third = shop.submit()
        assert not stopping.done()
        assert not shop.scheduler.state.has_room(shop.lanes[0])
        shop.engines[0].gate.set()
        await stopping
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
        await stopping

    with_shop(scenario)


def test_removing_a_queue_tells_those_who_wait() -> None:
    async def scenario(shop: Shop) -> None:
        await shop.scheduler.stop_lane(shop.lanes[0])
        requests = [shop.submit() for _ in range(3)]
        shop.scheduler.cancel(requests[1].id)
        shop.scheduler.remove_queue(KEY, "the model was unloaded")
        assert set(shop.ended) == {requests[0].id, requests[2].id}
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

        def on_done(done: Done) -> None:
            assert done.outcome is Outcome.EXPIRED
            ended_ns[done.request.id] = loop.now_ns()

        delays_ms = [500, 20, 20, 90, 10_000]
        for delay_ms in delays_ms:
            request = shop.make(deadline_ns=delay_ms * MILLISECOND_NS)
            assert shop.scheduler.submit(request, on_done) is None
            if pause_s is not None:  # a timer is set by then, and the next may have to come before it
                await asyncio.sleep(pause_s)
        gone = shop.make(deadline_ns=50 * MILLISECOND_NS)
        assert shop.scheduler.submit(gone, on_done) is None
        shop.scheduler.cancel(gone.id)
        await asyncio.sleep(20)
        for number, delay_ms in enumerate(delays_ms):
            assert delay_ms <= ended_ns[number] / MILLISECOND_NS < delay_ms + 1
        assert shop.slab.slots_in_use == 0
        assert not shop.scheduler.unfinished

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())


# Everything at once


@pytest.mark.parametrize(
    ("lanes", "depth", "queues_one", "seed"), [(1, 1, False, 1), (2, 2, False, 2), (1, 1, True, 3), (2, 1, True, 4)]
)
def test_thousands_of_requests_with_departures_poison_and_lost_lanes(
    lanes: int, depth: int, queues_one: bool, seed: int
) -> None:
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
                is_dated = chance.random() < (0.001 if queues_one else 0.2)
                deadline_ns = shop.now_ns + chance.randint(1, 20) * MILLISECOND_NS if is_dated else None
                request = shop.make(
                    deadline_ns=deadline_ns, samples=chance.choice([1, 1, 1, 3]), priority=chance.choice([0, 0, 1, 3])
                )
                if chance.random() < 0.02:
                    poisonous.add(request.id)
                    for engine in shop.engines:
                        engine.poisonous = set(poisonous)
                if shop.scheduler.submit(request, shop.on_done) is not None:
                    for slot in request.slots:
                        shop.slab.free(slot)
                    continue
                submitted.append(request)
            for _ in range(chance.randint(0, 3)):
                gone = chance.choice(submitted[-20:])
                if gone.id not in shop.ended:
                    cancelled.add(gone.id)
                if shop.scheduler.cancel(gone.id):
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

    with_shop(scenario, lanes=lanes, depth=depth, queues_one=queues_one)
