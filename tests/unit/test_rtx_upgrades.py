"""Plans of TensorRT for RTX beside the serving: compiled or built, held against the others, lost and loaded again."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from convoy.app.engines.jobs import Job, PlanRequest
from convoy.app.engines.machine import Library
from convoy.app.loading.later import prove_plan
from convoy.app.loading.load import LoadedModel, LoadOptions, load
from convoy.app.loading.proving import ProvedEngine
from convoy.models.bundle import open_bundle
from convoy.models.plans import BuildOptions, PlanTarget
from convoy.models.store import DEMO_STORE, StoredVersion
from tests.support.fake_cuda import FakeGpu
from tests.support.fake_devices import until
from tests.support.gpu_machine import GpuBench
from tests.support.upgrade_bench import Running, ask, hold_proofs, run, running, serving

# For `make test`: some seconds together.
pytestmark = pytest.mark.slow

RTX, ORT = "tensorrt-rtx", "onnxruntime-cuda"
NO_LIBRARY = Library(None, "it is not installed")
L4 = ("NVIDIA L4", (8, 9))


def machine(*gpus: tuple[str, tuple[int, int]], **missing: Library) -> GpuBench:
    """GPUs with TensorRT for RTX; all that is not `missing` is there, too."""
    bench = GpuBench.of(*(FakeGpu(*gpu) for gpu in gpus or (L4,)), rtx=True)
    bench.machine = replace(bench.machine, **missing)
    return bench


@pytest.fixture(autouse=True)
def _measures_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convoy.app.loading.proving.MEASURING_BUDGET_S", 0.0)


@pytest.fixture
def bench() -> GpuBench:
    return machine(tensorrt=NO_LIBRARY)


@pytest.fixture
def took_ms(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """How long each engine takes; may be changed."""
    took = {"onnxruntime-cpu": 9.0, ORT: 3.0, "tensorrt": 2.0, RTX: 1.0}
    monkeypatch.setattr("convoy.app.engines.measure.Probe.run_ms", lambda probe: took[probe.engine.info.engine])
    return took


def build_ahead(tmp_path: Path, bench: GpuBench, *capabilities: str) -> None:
    # The digits' digest is the same wherever they lie, and so is the plan's place.
    onnx = DEMO_STORE / "digits" / "1" / "fp16.onnx"
    target = PlanTarget("tensorrt-rtx", bench.rtx.module().__version__, capabilities)
    bench.build_for(onnx, target, BuildOptions("fp16", (1, 2, 4), profiles="range"), tmp_path / "plans")


def serves(*engines: str) -> Callable[[dict[str, object]], bool]:
    return lambda model: tuple(one["engine"] for one in model["engines"]) == engines  # type: ignore[index,attr-defined]


async def settled(server: Running) -> None:
    """Until nothing is being tried any more."""
    await until(lambda: not server.core.upgrades._at_work)


def test_a_cold_plan_takes_over_when_it_is_compiled_and_the_next_start_serves_it_at_once(
    tmp_path, bench, took_ms, caplog
):
    caplog.set_level(logging.INFO)
    build_ahead(tmp_path, bench)

    async def cold() -> None:
        async with running(tmp_path, bench, builds=False) as server:
            await server.until(serves(RTX))
            await settled(server)
            model = await server.model()
            assert server.builder.orders == []
            assert (model["engine"], model["precision"]) == (RTX, "fp16")
            assert not any("not compiled" in why for why in model["why_not_others"])
            metrics = (await server.http.get("/metrics")).text
            (line,) = serving(metrics)
            assert f'engine="{RTX}"' in line
            assert "digits version 1 on cuda:0 is served by tensorrt-rtx now" in caplog.text
            assert f"{ORT} on cuda:0: fp16.onnx: it is not faster than tensorrt-rtx in fp16" in told(model)

    async def warm() -> None:
        async with running(tmp_path, bench, builds=False) as server:
            assert serves(RTX)(await server.model())
            await settled(server)
            assert serves(RTX)(await server.model())

    run(cold)
    assert sorted(bench.rtx.jit.compiled) == [0, 1, 2, 4]
    bench.rtx.jit.compiled.clear()
    run(warm)
    assert bench.rtx.jit.compiled == []
    assert not bench.cuda.live_device_blocks


def test_without_onnxruntime_for_cuda_the_cpu_serves_until_the_plan_is_there(tmp_path, took_ms):
    bench = machine(tensorrt=NO_LIBRARY, onnxruntime=NO_LIBRARY)

    async def job() -> None:
        async with running(tmp_path, bench, "auto") as server:
            images = open_bundle(tmp_path / "store" / "digits" / "1").canary().inputs["images"]
            assert serves("onnxruntime-cpu")(await server.model())
            before = await ask(server, images[:3])
            (order,) = server.builder.orders
            assert (order.library, order.capabilities) == (RTX, ("8.9",))
            server.builder.may_end.set()
            await server.until(serves(RTX))
            (served,) = server.core.catalog.served()
            await until(lambda: [one.lane.device for one in served.lanes] == ["cuda:0"])
            assert (await ask(server, images[:3])).argmax(1).tolist() == before.argmax(1).tolist()

    run(job)


@pytest.mark.parametrize("faster", [RTX, "tensorrt"])
def test_of_both_libraries_plans_the_faster_serves_in_the_end(tmp_path, took_ms, faster):
    bench = machine()
    took_ms |= {RTX: 2.0, "tensorrt": 2.0} | {faster: 1.0}

    async def job() -> None:
        async with running(tmp_path, bench) as server:
            server.builder.may_end.set()
            await server.until(serves(faster))
            await settled(server)
            model = await server.model()
            assert serves(faster)(model)
            assert [order.library for order in server.builder.orders] == [RTX, "tensorrt"]
            (served,) = server.core.catalog.served()
            assert len(served.lanes) == 1
            if faster == RTX:
                assert any(f"tensorrt on cuda:0: fp16.onnx: it is not faster than {RTX}" in w for w in told(model))

    run(job)
    assert not bench.cuda.live_device_blocks


def told(model: dict[str, object]) -> list[str]:
    return model["why_not_others"]  # type: ignore[return-value]


def test_a_faster_onnxruntime_takes_over_once_and_is_not_tried_for_ever(tmp_path, bench, took_ms):
    build_ahead(tmp_path, bench)

    async def job() -> None:
        async with running(tmp_path, bench, builds=False) as server:
            await server.until(lambda model: "tuned" in model["why"])
            await settled(server)
            assert serves(ORT)(await server.model())
            opened = len(bench.onnxruntime.opened)
            (served,) = server.core.catalog.served()
            server.core.upgrades.begin(served)
            await settled(server)
            assert len(bench.onnxruntime.opened) == opened

    took_ms[RTX] = 1.0
    run(lambda: warm_up(tmp_path, bench))
    took_ms[RTX] = 9.0
    run(job)
    assert not bench.cuda.live_device_blocks


async def warm_up(tmp_path: Path, bench: GpuBench) -> None:
    async with running(tmp_path, bench, builds=False) as server:
        await server.until(serves(RTX))
        await settled(server)  # who stops while something is measured abandons it


def test_an_engine_that_is_lost_is_loaded_again_with_what_was_compiled(tmp_path, bench, took_ms):
    build_ahead(tmp_path, bench)

    async def job() -> None:
        async with running(tmp_path, bench, builds=False) as server:
            await server.until(serves(RTX))
            await settled(server)
            bench.rtx.jit.compiled.clear()
            (served,) = server.core.catalog.served()
            (one,) = [one for one in served.lanes if not one.lane.stopping]
            server.core.scheduler.give_up_lane(one.lane, "it is said to hang")
            await until(lambda: bool(served.lanes) and served.lanes[-1] is not one)
            model = await server.until(lambda model: model["ready"])
            assert serves(RTX)(model)
            await settled(server)
            assert bench.rtx.jit.compiled == []

    run(job)
    assert not bench.cuda.live_device_blocks


def test_a_version_that_was_loaded_again_meanwhile_does_not_wish_for_ever(tmp_path, bench, took_ms):
    """The wish that is fulfilled is an equal one by then, and not the same."""

    async def job() -> None:
        async with running(tmp_path, bench) as server:
            (served,) = server.core.catalog.served()
            (one,) = served.lanes
            wished = served.loaded.wishes
            server.core.scheduler.give_up_lane(one.lane, "it is said to hang")
            await until(lambda: served.loaded.wishes is not wished and bool(served.lanes))
            server.builder.may_end.set()
            await server.until(serves(RTX))
            await settled(server)
            assert served.loaded.wishes == ()
            assert not any("no plan" in why for why in (await server.model())["why_not_others"])

    run(job)


def test_a_plan_that_took_over_while_the_version_was_loaded_again_is_not_held_against_itself(
    tmp_path, bench, took_ms, monkeypatch
):
    compiles, loads, may_prove, may_load = (threading.Event() for _ in range(4))

    def slowly(job: Job, wish: PlanRequest) -> ProvedEngine:
        compiles.set()
        assert may_prove.wait(60)
        return prove_plan(job, wish)

    def load_slowly(stored: StoredVersion, options: LoadOptions) -> LoadedModel:
        loaded = load(stored, options)
        loads.set()
        assert may_load.wait(60)
        return loaded

    monkeypatch.setattr("convoy.app.lifecycle.upgrades.prove_plan", slowly)
    build_ahead(tmp_path, bench)

    async def job() -> None:
        async with running(tmp_path, bench, builds=False) as server:
            await asyncio.to_thread(compiles.wait, 60)
            monkeypatch.setattr(server.core.lanes, "_load_version", load_slowly)
            (served,) = server.core.catalog.served()
            (one,) = served.lanes
            server.core.scheduler.give_up_lane(one.lane, "it is said to hang")
            await asyncio.to_thread(loads.wait, 60)
            may_prove.set()
            await server.until(serves(RTX))
            may_load.set()
            await until(lambda: not server.core.lanes._replacing.locked())
            await settled(server)
            model = await server.model()
            assert serves(RTX)(model)
            assert served.loaded.wishes == ()
            assert not any(why.startswith(f"{RTX} on") for why in told(model)), told(model)
            assert len([one for one in served.lanes if not one.lane.stopping]) == 1

    run(job)
    assert not bench.cuda.live_device_blocks


def test_two_gpus_of_two_names_share_one_build_and_compile_each(tmp_path, took_ms):
    bench = machine(("NVIDIA H100", (9, 0)), ("NVIDIA H200", (9, 0)), tensorrt=NO_LIBRARY)

    async def job() -> None:
        async with running(tmp_path, bench) as server:
            server.builder.may_end.set()
            await server.until(serves(RTX, RTX))
            assert [order.capabilities for order in server.builder.orders] == [()]

    run(job)
    assert sorted(bench.rtx.jit.compiled) == [0, 0, 1, 1, 2, 2, 4, 4]


def test_a_build_that_fails_for_all_gpus_is_tried_once_and_told_of_each(tmp_path, took_ms):
    bench = machine(("NVIDIA H100", (9, 0)), ("NVIDIA H200", (9, 0)), tensorrt=NO_LIBRARY)

    async def job() -> None:
        async with running(tmp_path, bench) as server:
            server.builder.fails = "no such operator"
            server.builder.may_end.set()
            await settled(server)
            model = await server.model()
            for device in ("cuda:0", "cuda:1"):
                assert any(f"{RTX} on {device}" in why and "no such operator" in why for why in told(model)), told(
                    model
                )
            assert len(server.builder.orders) == 1
            assert serves(ORT, ORT)(model)

    run(job)


def test_a_version_that_is_unloaded_while_its_plan_is_compiled_leaves_nothing(tmp_path, bench, took_ms, monkeypatch):
    compiles, may_go_on = hold_proofs(monkeypatch)
    build_ahead(tmp_path, bench)

    async def job() -> None:
        async with running(tmp_path, bench, control="explicit", builds=False) as server:
            await asyncio.to_thread(compiles.wait, 60)
            await server.core.control.unload("digits")
            may_go_on.set()
            await settled(server)
            await until(lambda: not bench.cuda.live_device_blocks)
            await server.core.control.load("digits")
            await server.until(serves(RTX))

    run(job)
    assert not bench.cuda.live_device_blocks


def test_with_rtx_by_name_the_first_start_compiles_and_nothing_else_is_tried(tmp_path, bench, took_ms):
    build_ahead(tmp_path, bench)

    async def job() -> None:
        async with running(tmp_path, bench, engine="rtx", builds=False) as server:
            assert serves(RTX)(await server.model())
            await settled(server)

    run(job)
    assert bench.onnxruntime.opened == []
