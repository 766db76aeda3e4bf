"""The threads that decode: what ends with its call, and what stays until the thread returns."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from convoy.app.calls.call import Call
from convoy.app.calls.open_calls import OpenCalls
from convoy.app.pictures.decoder import Decoder, DecodeWork
from convoy.app.scheduling.slab import Slab, Slot, SlotState
from convoy.app.server.runtime import give_way
from convoy.app.telemetry.outcomes import CANCELLED, ClientGone
from convoy.models.errors import DeadlineExceeded, InvalidRequest, Overloaded
from convoy.models.kept_memory import KeptMemory
from convoy.models.priorities import Priorities
from tests.support.fake_devices import until

SLOT_BYTES = 1 << 16


class Core:
    """As much of a core as a call asks for that never runs."""

    def __init__(self) -> None:
        self.slab, self.calls = Slab(1 << 20), OpenCalls()
        self.ended: list[str] = []

    def call_ended(self, key: object, protocol: str, ending: Any, ns: int, stages_ns: object) -> None:
        self.ended.append(ending.outcome)


class Held:
    """A job that stands in its thread until it is let go."""

    def __init__(self) -> None:
        self.began, self.may_end, self.runs = threading.Event(), threading.Event(), 0

    def __call__(self, result: object = None) -> object:
        self.runs += 1
        self.began.set()
        assert self.may_end.wait(30)
        return result


@pytest.fixture
def decoder() -> Iterator[Decoder]:
    made = Decoder(1, 4)
    yield made
    made.close()


def call_with_slot() -> tuple[Call, Slot]:
    call = Call(Core(), "predictions")  # type: ignore[arg-type]
    return call, call.reserve(SLOT_BYTES)


def start(decoder: Decoder, call: Call, slot: Slot, job: Callable[..., object], **more: Any) -> asyncio.Task[Any]:
    async def decode() -> object:
        if call not in call.core.calls._calls:
            call.begin()
        try:
            return await decoder.run(call, DecodeWork("PNG", 1, (slot,), **more), job)
        except asyncio.CancelledError as raised:
            raise call.cause_of(raised) from None

    return asyncio.ensure_future(decode())


@pytest.mark.parametrize("leave", ["client", "cancel", "deadline"])
def test_memory_stays_with_the_thread_until_it_returns(decoder: Decoder, leave: str) -> None:
    async def play() -> None:
        (call, slot), held = call_with_slot(), Held()
        call.limit(1000 if leave == "deadline" else None)
        task = start(decoder, call, slot, held)
        await until(held.began.is_set)
        slab = call.core.slab
        assert slab.state(slot.ref) is SlotState.DECODING
        if leave == "client":
            call.cancel(ClientGone())
        elif leave == "cancel":
            task.cancel()
        expected = {"client": ClientGone, "cancel": asyncio.CancelledError, "deadline": DeadlineExceeded}[leave]
        with pytest.raises(expected):
            await task
        call.end(CANCELLED)
        assert call.core.ended == ["cancelled"]  # type: ignore[attr-defined]
        assert (slab.state(slot.ref), slab.used_bytes) == (SlotState.DECODING, SLOT_BYTES)
        held.may_end.set()
        await until(lambda: not slab.used_bytes)

    asyncio.run(play())


def test_who_left_while_waiting_never_begins(decoder: Decoder) -> None:
    async def play() -> None:
        first, held = call_with_slot(), Held()
        running = start(decoder, *first, held)
        await until(held.began.is_set)
        leavers = [call_with_slot() for _ in range(3)]
        never = Held()
        waiting = [start(decoder, *one, never) for one in leavers]
        await asyncio.sleep(0)
        for call, _ in leavers:
            call.cancel(ClientGone())
        held.may_end.set()  # in the same turn: the thread comes back while they leave
        for task in waiting:
            with pytest.raises(ClientGone):
                await task
        await running
        for call, slot in leavers:
            assert call.core.slab.state(slot.ref) is SlotState.FILLING
            call.end(CANCELLED)
            assert not call.core.slab.used_bytes
        assert not never.runs

    asyncio.run(play())


def test_a_deadline_ends_the_wait(decoder: Decoder) -> None:
    async def play() -> None:
        first, held = call_with_slot(), Held()
        running = start(decoder, *first, held)
        await until(held.began.is_set)
        (call, slot), never = call_with_slot(), Held()
        call.limit(50)
        with pytest.raises((DeadlineExceeded, Overloaded)):
            await start(decoder, call, slot, never)
        held.may_end.set()
        await running
        assert not never.runs

    asyncio.run(play())


def test_one_error_among_several_is_its_own(decoder: Decoder) -> None:
    def fail() -> None:
        raise InvalidRequest("poison")

    async def play() -> None:
        threads: set[int] = set()

        def good() -> int:
            threads.add(threading.get_ident())
            return 5

        calls = [call_with_slot() for _ in range(4)]
        jobs: list[Callable[..., object]] = [good, fail, good, lambda: 1 / 0]
        ends = await asyncio.gather(
            *(start(decoder, *call, job) for call, job in zip(calls, jobs, strict=True)), return_exceptions=True
        )
        assert [type(end).__name__ for end in ends] == ["Decoded", "InvalidRequest", "Decoded", "ZeroDivisionError"]
        assert all(call.core.slab.state(slot.ref) is SlotState.FILLING for call, slot in calls)

    asyncio.run(play())


def test_one_body_of_several_images_is_lent_until_the_last_returns() -> None:
    async def play() -> None:
        decoder = Decoder(2, 4)
        (call, slot), one, other = call_with_slot(), Held(), Held()
        tasks = [start(decoder, call, slot, held) for held in (one, other)]
        await until(lambda: one.began.is_set() or other.began.is_set())
        for held in (one, other):
            assert call.core.slab.state(slot.ref) is SlotState.DECODING
            held.may_end.set()
        await asyncio.gather(*tasks)
        assert call.core.slab.state(slot.ref) is SlotState.FILLING
        decoder.close()

    asyncio.run(play())


def test_where_the_system_forbids_it_threads_work_without_giving_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under systemd's `SystemCallFilter=~@resources`."""

    def forbid(*_: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", forbid)
    give_way()


def test_an_answer_is_waited_for_even_when_nobody_wants_it(decoder: Decoder) -> None:
    async def play() -> None:
        held = Held()
        task = asyncio.ensure_future(decoder.run_owed(held, 3))
        await until(held.began.is_set)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        held.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(play())


def test_answers_that_nobody_wants_end_each_for_itself(decoder: Decoder) -> None:
    """And nobody else comes to handle their errors."""

    async def play() -> None:
        jobs = [Held() for _ in range(2)]
        tasks = [asyncio.ensure_future(decoder.run_owed(held, 3)) for held in jobs]
        await until(jobs[0].began.is_set)
        for task in tasks:
            task.cancel()
        await asyncio.sleep(0)
        assert sys.exc_info()[1] is None
        for held in jobs:
            held.may_end.set()
        ended, _ = await asyncio.wait(tasks, timeout=60)
        assert [task.cancelled() for task in tasks] == [True, True]
        assert len(ended) == 2
        assert sys.exc_info()[1] is None

    asyncio.run(play())


def test_a_sample_counts_until_it_is_answered(decoder: Decoder) -> None:
    """Two full batches are decoded, and the next one when there is room again."""

    async def play() -> None:
        spec = SimpleNamespace(max_batch_size=1, priorities=Priorities(default=1))
        served: Any = SimpleNamespace(spec=spec, key=("m", 1), engines=1)
        calls = [call_with_slot() for _ in range(3)]
        tasks = [start(decoder, *call, lambda: 1, sample_of=served) for call in calls]
        await until(lambda: sum(task.done() for task in tasks) == 2)
        await asyncio.sleep(0.01)
        assert sum(task.done() for task in tasks) == 2
        assert not decoder.begin_here(served)
        decoder.answered(served.key)
        await asyncio.wait(tasks)
        for _ in range(2):
            decoder.answered(served.key)
        assert decoder.begin_here(served)

    asyncio.run(play())


def test_memory_that_large_images_left_goes_back_when_none_has_come_for_a_while(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = KeptMemory(1000)
    monkeypatch.setattr("convoy.app.pictures.decoder.KEPT_MEMORY", kept)
    monkeypatch.setattr("convoy.app.pictures.decoder._KEEP_S", 0.01)

    def decode() -> int:
        with kept.begin_decode(500) as memory:
            return memory.ctypes.data

    async def play() -> None:
        first = await start(decoder, *call_with_slot(), decode)
        assert (await start(decoder, *call_with_slot(), decode)).result == first.result
        await until(lambda: not kept.kept_bytes)
        await start(decoder, *call_with_slot(), decode)
        assert kept.kept_bytes == 500
        await until(lambda: not kept.kept_bytes)

    asyncio.run(play())
