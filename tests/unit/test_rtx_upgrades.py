"""Plans of TensorRT for RTX beside the serving: compiled, and held against the others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from convoy.app.engines.machine import Library
from convoy.models.plans import BuildOptions, PlanTarget
from convoy.models.store import DEMO_STORE
from tests.support.fake_cuda import FakeGpu
from tests.support.fake_devices import until
from tests.support.gpu_machine import GpuBench
from tests.support.upgrade_bench import Running, run, running, serving

# For `make test`: some seconds together.
pytestmark = pytest.mark.slow

RTX, ORT = "tensorrt-rtx", "onnxruntime-cuda"


@pytest.fixture(autouse=True)
def _measures_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convoy.app.loading.proving.MEASURING_BUDGET_S", 0.0)


@pytest.fixture
def bench() -> GpuBench:
    bench = GpuBench.of(FakeGpu("NVIDIA L4", (8, 9)), rtx=True)
    bench.machine = replace(bench.machine, tensorrt=Library(None, "it is not installed"))
    return bench


@pytest.fixture
def took_ms(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """How long each engine takes; may be changed."""
    took = {"onnxruntime-cpu": 9.0, ORT: 3.0, "tensorrt": 2.0, RTX: 1.0}
    monkeypatch.setattr("convoy.app.engines.measure.Probe.run_ms", lambda probe: took[probe.engine.info.engine])
    return took


def build_ahead(tmp_path: Path, bench: GpuBench) -> None:
    # The digits' digest is the same wherever they lie, and so is the plan's place.
    onnx = DEMO_STORE / "digits" / "1" / "fp16.onnx"
    target = PlanTarget("tensorrt-rtx", bench.rtx.module().__version__, ())
    bench.build_for(onnx, target, BuildOptions("fp16", (1, 2, 4), profiles="range"), tmp_path / "plans")


def serves(*engines: str) -> Callable[[dict[str, object]], bool]:
    return lambda model: tuple(one["engine"] for one in model["engines"]) == engines  # type: ignore[index,attr-defined]


async def settled(server: Running) -> None:
    """Until nothing is being tried any more."""
    await until(lambda: not server.core.lifecycle.upgrades._at_work)


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
            assert not any("not yet compiled" in why for why in model["why_not_others"])
            metrics = (await server.http.get("/metrics")).text
            (line,) = serving(metrics)
            assert f'engine="{RTX}"' in line
            assert "digits version 1 on cuda:0 now runs on tensorrt-rtx" in caplog.text
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
            server.core.lifecycle.upgrades.begin(served)
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
