"""Engines that come, take over, fail and are replaced while clients keep asking."""

from __future__ import annotations

import asyncio
import re
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from convoy.app.engines.batch import EngineFailure, FailureScope
from convoy.app.lifecycle.health import HealthOptions
from convoy.app.lifecycle.served_metrics import engine_metrics
from convoy.app.loading.load import LoadOptions
from convoy.app.loading.proving import ReasonCode
from convoy.app.scheduling.request import ModelKey
from convoy.models.errors import Unavailable
from tests.support.fake_cuda import ILLEGAL_ADDRESS, FakeGpu
from tests.support.fake_devices import Clients, WatchedEngine, Workshop, in_workshop, proved, until
from tests.support.gpu_machine import GpuBench


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


def listed(workshop: Workshop) -> list[tuple[str, str]]:
    """Device and reason of every engine that the metrics name."""
    text = workshop.core.metrics.render().decode()
    reasons = {one.info.device: one.reason for served in workshop.core.catalog.served() for one in served.listed}
    devices = re.findall(r'^convoy_engine_info{device="(.*?)",.*reason="only_available".* 1.0$', text, re.MULTILINE)
    return sorted((device, reasons[device]) for device in devices)


@pytest.mark.parametrize(
    ("options", "wished", "own", "code"),
    [
        ({}, "", "fastest_verified", "fastest_verified"),
        ({"precision": "fp16"}, "", "fastest_verified", "forced"),
        ({"engine": "cpu"}, "", "only_available", "forced"),
        ({"engine": "cpu"}, "gpu:0", "only_available", "fallback_while_building"),
        ({}, "gpu:1", "only_available", "only_available"),
    ],
)
def test_the_metric_has_a_code_for_why_an_engine_serves(
    tmp_path: Path, options: dict[str, str], wished: str, own: ReasonCode, code: str
) -> None:
    engine = replace(proved(WatchedEngine("gpu:0", 0.0)), code=own)
    wishes = [SimpleNamespace(device=SimpleNamespace(name=wished))] if wished else []
    served: Any = SimpleNamespace(
        key=ModelKey("rows", 1),
        options=LoadOptions(**{"precision": "auto", "threads": 1, "max_batch": None, **options}),  # type: ignore[arg-type]
        loaded=SimpleNamespace(wishes=wishes),
        listed=[engine],
    )
    catalog: Any = SimpleNamespace(served=lambda: [served])
    (family,) = engine_metrics(catalog)
    assert [sample.labels["reason"] for sample in family.samples] == [code]


# What a device is told of the requests' memory


def test_locking_the_pages_of_the_requests_memory_holds_up_nobody(tmp_path: Path) -> None:
    may_end, asked, unlocked = threading.Event(), [], []

    class Locking(WatchedEngine):
        def page_lock(self, memory: memoryview) -> bool:
            asked.append((threading.current_thread(), len(memory)))
            return may_end.wait(60)

        def page_unlock(self, memory: memoryview) -> None:
            unlocked.append((self.offset, len(memory)))

    class Locked(Workshop):
        def make(self, device: str) -> WatchedEngine:
            self.engines.append(Locking(device, 100.0 * (len(self.engines) + 1), self.slots))
            return self.engines[-1]

    workshop = Locked(tmp_path, devices=("gpu:0", "gpu:1"))

    async def scenario() -> None:
        slab = workshop.core.slab
        await until(lambda: bool(asked))
        assert slab.keeps_pages, "a page that is given back meanwhile would be another one for the device"
        assert await workshop.ask() > 0
        may_end.set()
        await workshop.core.lifecycle.swap(workshop.served(), proved(workshop.make("gpu:0")))
        assert await workshop.ask() > 0
        assert asked == [(asked[0][0], slab.capacity_bytes)], "once"
        assert asked[0][0] is not threading.current_thread()
        assert not unlocked

    in_workshop(workshop, scenario)
    assert unlocked == [(100.0, asked[0][1])], "once, when nothing serves any more"


# Swaps


def test_a_new_engine_takes_over_and_nobody_notices(workshop: Workshop) -> None:
    async def scenario() -> None:
        (old,) = workshop.engines
        async with Clients(workshop) as clients:
            await clients.answered_by(old)
            for number in range(5):
                before, new = workshop.engines[-1], workshop.make("gpu:0")
                await workshop.core.lifecycle.swap(workshop.served(), proved(new, f"plan {number}"))
                assert before.closed
                assert listed(workshop) == [("gpu:0", f"plan {number}")]
                assert workshop.served().first.engine is new
                assert workshop.core.ready
                swapped = len(clients.answers)
                await clients.answered_by(new)
                assert set(clients.answers[swapped:]) == {new.offset}
        assert not clients.failures
        assert max(max(engine.batches) for engine in workshop.engines) > 1

    in_workshop(workshop, scenario)


async def swapping(
    workshop: Workshop,
) -> tuple[WatchedEngine, asyncio.Future[float], WatchedEngine, asyncio.Future[None]]:
    """An engine with a request in it, which ends when its gate is set; and the one that has taken its place."""
    (old,) = workshop.engines
    old.gate, old.batches = threading.Event(), []
    running = asyncio.ensure_future(workshop.ask())
    await until(lambda: old.batches == [1])
    new = workshop.make("gpu:0")
    swap = asyncio.ensure_future(workshop.core.lifecycle.swap(workshop.served(), proved(new)))
    await until(lambda: workshop.served().first.engine is new)
    return old, running, new, swap


def test_a_version_may_leave_while_its_engines_are_swapped(workshop: Workshop) -> None:
    async def scenario() -> None:
        old, running, new, swap = await swapping(workshop)
        leaving = workshop.core.lifecycle.take_out_of_service("rows", 1)
        assert leaving is not None
        await asyncio.sleep(0)
        old.gate.set()
        assert await running == old.offset
        await asyncio.gather(swap, leaving)
        assert old.closed
        assert new.closed
        assert listed(workshop) == []

    in_workshop(workshop, scenario)


# Failures and how far they reach


@pytest.mark.parametrize("largest", [4, 0])
def test_a_batch_without_memory_is_halved_once_and_then_says_what_to_do(workshop: Workshop, largest: int) -> None:
    async def scenario() -> None:
        (engine,) = workshop.engines
        plain, engine.batches = engine.run, []

        def only_small(parts):  # type: ignore[no-untyped-def]
            result = plain(parts)
            if sum(part.samples for part in parts) > largest:
                raise EngineFailure("out of memory", FailureScope.MEMORY)
            return result

        engine.run = only_small  # type: ignore[method-assign]
        ended = await asyncio.gather(*(workshop.ask() for _ in range(8)), return_exceptions=True)
        assert engine.batches == [8, 4, 4], "they are not halved again"
        for error in ended if not largest else ():
            assert "--max-batch" in str(error)
            assert error.retry_after_s
        assert largest == 0 or ended == [engine.offset] * 8
        engine.run = plain  # type: ignore[method-assign]
        assert await workshop.ask() == engine.offset
        assert workshop.core.ready

    in_workshop(workshop, scenario)


def test_a_lost_device_takes_every_model_on_it_and_no_other(tmp_path: Path) -> None:
    workshop = Workshop(tmp_path, devices=("gpu:0", "gpu:1"), models=("rows", "tails"))
    may_load = threading.Event()
    may_load.set()
    workshop.before_load = may_load.wait

    async def scenario() -> None:
        core = workshop.core
        engines = {(engine.info.device, engine.offset): engine for engine in workshop.engines}
        lost = [engine for (device, _), engine in engines.items() if device == "gpu:0"]
        kept = [engine for (device, _), engine in engines.items() if device == "gpu:1"]
        may_load.clear()
        async with Clients(workshop) as rows, Clients(workshop, name="tails") as tails:
            lost[0].failure = EngineFailure("the context is broken", FailureScope.DEVICE)
            await until(lambda: not workshop.served("rows").ready and not workshop.served("tails").ready)
            await until(lambda: all(engine.closed for engine in lost))
            assert not core.ready
            assert "rows" in core.not_ready_reason()
            # Who comes all the same is answered by the other device.
            await asyncio.gather(rows.answered_by(kept[0]), tails.answered_by(kept[1]))
            may_load.set()
            await until(lambda: core.ready)
            new = [engine for engine in workshop.engines[4:] if not engine.closed and engine.info.device == "gpu:0"]
            await until(lambda: len(new) == 2)
            await asyncio.gather(rows.answered_by(new[0], 20), tails.answered_by(new[1], 20))
        assert not any(engine.closed for engine in kept)
        for error in (*rows.failures, *tails.failures):
            assert isinstance(error, Unavailable)
            assert error.retry_after_s
        assert 0 < len(rows.failures) + len(tails.failures) <= 2 * 2 * 8, "only those that ran there"
        assert not workshop.fatal

    in_workshop(workshop, scenario)


def test_whoever_finds_a_gpu_lost_the_process_ends(tmp_path: Path) -> None:
    bench = GpuBench.of(FakeGpu(), FakeGpu())
    workshop = Workshop(tmp_path, health=HealthOptions(watch_every_s=0.01), machine=bench.machine)

    async def scenario() -> None:
        await asyncio.sleep(0.05)
        assert not workshop.fatal
        for gpu in bench.machine.gpus:
            gpu.ensure_works()
        bench.machine.gpus[1].has_served = True
        bench.cuda.sticky = ILLEGAL_ADDRESS
        with pytest.raises(EngineFailure):  # one that has not served is no reason to end
            bench.machine.gpus[0].ensure_works()
        # As where a model is loaded, tuned or compared: no batch of a client was in it.
        with pytest.raises(EngineFailure):
            bench.machine.gpus[1].ensure_works()
        await until(lambda: bool(workshop.fatal))
        assert "cuda:1 failed in this process" in workshop.fatal[0]
        assert "illegal memory access" in workshop.fatal[0]
        await asyncio.sleep(0.05)
        assert len(workshop.fatal) == 1

    in_workshop(workshop, scenario)


def test_a_lost_engine_is_replaced_by_one_of_its_kind(tmp_path: Path) -> None:
    workshop = Workshop(tmp_path, devices=("gpu:0", "gpu:1"))

    async def scenario() -> None:
        first, _ = workshop.engines
        await workshop.core.lifecycle.swap(workshop.served(), replace(proved(workshop.make("gpu:1")), file="plan.onnx"))
        first.failure = EngineFailure("this engine is broken", FailureScope.ENGINE)
        async with Clients(workshop):
            await until(lambda: len(workshop.loads) == 2 and len(workshop.served().lanes) == 2)
        loaded, again = workshop.loads
        assert loaded.before == ()
        assert set(again.before) == {("gpu:0", first.info.engine, ""), ("gpu:1", first.info.engine, "plan.onnx")}

    in_workshop(workshop, scenario)


@pytest.mark.parametrize("hangs", [False, True])
def test_the_core_stops_soon_and_closes_an_engine_whose_canary_ends_meanwhile(
    tmp_path: Path, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("convoy.app.lifecycle.model_lifecycle._ENDS_WITHIN_S", 0.2 if hangs else 15.0)
    health = HealthOptions(canary_after_s=0.05, watch_every_s=0.01)
    workshop = Workshop(tmp_path, devices=("gpu:0", "gpu:1"), health=health)

    async def main() -> None:
        await workshop.open()
        first, second = workshop.engines
        first.gate = gate = threading.Event()
        await until(lambda: first.is_inside)
        stopping = asyncio.ensure_future(workshop.core.stop())
        await until(lambda: bool(second.closed))
        assert not first.closed
        if not hangs:
            gate.set()
        await asyncio.wait_for(stopping, 60)
        assert [first.closed, second.closed] == [not hangs, 1]
        gate.set()

    asyncio.run(main())


def test_an_engine_that_returns_after_it_was_given_up_is_closed_then(workshop: Workshop) -> None:
    workshop.health = HealthOptions(hang_after_s=0.5, hang_after_predictions=0.0, watch_every_s=0.01)

    async def scenario() -> None:
        (hung,) = workshop.engines
        hung.gate = gate = threading.Event()
        with pytest.raises(Unavailable):
            await workshop.ask()
        await until(lambda: len(workshop.engines) == 2 and workshop.core.ready)
        assert not hung.closed
        assert await workshop.ask() == workshop.engines[1].offset
        gate.set()
        await until(lambda: bool(hung.closed))

    in_workshop(workshop, scenario)
