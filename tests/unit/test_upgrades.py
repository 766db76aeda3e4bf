"""No cold start: served at once on the fallback, while a plan is built, and moved to the plan without a lost request.

A real core and its real HTTP application on a machine whose GPU and libraries are played; the build takes as
long as the test says.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from convoy.models.bundle import open_bundle
from tests.support.fake_cuda import FakeGpu
from tests.support.fake_devices import until
from tests.support.gpu_machine import GpuBench
from tests.support.upgrade_bench import ask, hold_comparisons, hold_proofs, plans, run, running, serving

# For `make test`: some seconds together.
pytestmark = pytest.mark.slow


@pytest.fixture
def bench() -> GpuBench:
    return GpuBench.of(FakeGpu("Fake H200"))


def faster_in_tensorrt(monkeypatch: pytest.MonkeyPatch, tensorrt_ms: float) -> None:
    took_ms = {"onnxruntime-cuda": 3.0, "tensorrt": tensorrt_ms}
    monkeypatch.setattr("convoy.app.engines.measure.Probe.run_ms", lambda probe: took_ms[probe.engine.info.engine])


def test_a_plan_takes_over_under_load_and_nobody_notices(tmp_path, bench, monkeypatch):
    faster_in_tensorrt(monkeypatch, 1.0)

    async def job() -> None:
        async with running(tmp_path, bench) as server:
            images = open_bundle(tmp_path / "store" / "digits" / "1").canary().inputs["images"]
            expected = {samples: await ask(server, images[:samples]) for samples in (1, 2, 3, 4)}
            before = await server.model()
            assert (before["engine"], before["plan_build"]["state"]) == ("onnxruntime-cuda", "building")
            assert (before["plan_build"]["phase"], before["plan_build"]["step"]) == ("Timing", 3)
            assert before["plan_build"]["file"] == "fp16.onnx"
            memory_before = bench.cuda.gpus[0].used_bytes
            asked = 0
            is_over = asyncio.Event()

            async def client(samples: int) -> None:
                nonlocal asked
                while not is_over.is_set():
                    np.testing.assert_allclose(await ask(server, images[:samples]), expected[samples], atol=2e-2)
                    asked += 1

            clients = [asyncio.create_task(client(samples)) for samples in (1, 2, 3, 4)]
            await server.until(lambda _: asked >= 20)
            server.builder.may_end.set()
            after = await server.until(lambda model: model["engine"] == "tensorrt")
            seen = asked
            await server.until(lambda _: asked >= seen + 20)
            is_over.set()
            await asyncio.gather(*clients)
            assert (after["plan_build"]["state"], after["plan_build"]["reason"]) == ("built", None)
            assert [engine["engine"] for engine in after["engines"]] == ["tensorrt"]
            assert "fp16.onnx: its plan was built" in after["why"]
            metrics = await server.metrics()
            (line,) = serving(metrics)
            assert 'engine="tensorrt"' in line
            await server.until(lambda _: len(server.core.catalog.served()[0].lanes) == 1)
            await server.until(lambda _: plans(server.core.metrics.render().decode()) == {"serves": 1})
            # The old engine's memory is free, and that of ONNX Runtime at its best, which was held against the plan:
            # what is used now is the new engine's, with its scratch.
            await server.until(lambda _: bench.cuda.gpus[0].used_bytes <= memory_before + 4096)
            assert server.builder.orders[0].options.batch_sizes == (1, 2, 4)
            # A quarter of what is free, of 4 GiB here.
            assert 900 < server.builder.orders[0].beside_mb < 1024

    run(job)


@pytest.mark.parametrize(
    ("distorts", "tensorrt_ms", "reason", "result"),
    [
        (lambda array: -array, 1.0, "is off by", "not_proved"),
        (lambda array: array, 2.95, "not faster than onnxruntime-cuda in fp16", "not_faster"),
    ],
)
def test_a_plan_that_answers_wrongly_or_is_not_faster_does_not_serve(
    tmp_path, bench, monkeypatch, distorts, tensorrt_ms, reason, result
):
    faster_in_tensorrt(monkeypatch, tensorrt_ms)
    bench.tensorrt.distorts = distorts

    async def job() -> None:
        async with running(tmp_path, bench) as server:
            used = bench.cuda.gpus[0].used_bytes
            server.builder.may_end.set()
            model = await server.until(lambda model: model["plan_build"]["reason"])
            assert reason in model["plan_build"]["reason"]
            assert plans(await server.metrics())[result] >= 1
            assert model["engine"] == "onnxruntime-cuda"
            # Not at once: the next plan may be tried by now, and after the last of them the tuning.
            await until(lambda: bench.cuda.gpus[0].used_bytes == used)

    run(job)


def test_a_plan_relieves_the_cpu_that_served_because_no_gpu_could(tmp_path, bench):
    async def job() -> None:
        async with running(tmp_path, bench, "int8") as server:  # which ONNX Runtime has no kernels for on a GPU
            assert (await server.model())["engine"] == "onnxruntime-cpu"
            server.builder.may_end.set()
            model = await server.until(lambda model: model["engine"] == "tensorrt")
            assert [engine["engine"] for engine in model["engines"]] == ["tensorrt"]
            (served,) = server.core.catalog.served()
            await server.until(lambda _: [lane.device for lane in served.lanes] == ["cuda:0"])
            metrics = await server.metrics()
            (line,) = serving(metrics)
            assert 'engine="tensorrt"' in line

    run(job)


def test_a_load_that_slows_everything_does_not_keep_a_faster_plan_out(tmp_path, bench, monkeypatch):
    """What serves was measured when nothing else ran."""
    slowed = 1.0
    took_ms = {"onnxruntime-cuda": 3.0, "tensorrt": 1.0}
    monkeypatch.setattr(
        "convoy.app.engines.measure.Probe.run_ms", lambda probe: slowed * took_ms[probe.engine.info.engine]
    )

    async def job() -> None:
        nonlocal slowed
        async with running(tmp_path, bench) as server:
            slowed = 10.0
            server.builder.may_end.set()
            await server.until(lambda model: model["engine"] == "tensorrt")

    run(job)


def test_a_version_that_is_unloaded_lets_the_builder_go(tmp_path, bench):
    async def job() -> None:
        async with running(tmp_path, bench, control="explicit") as server:
            await server.core.control.unload("digits")
            assert server.builder.cancelled == 1
            server.builder.may_end.set()
            await server.core.control.load("digits")
            await server.until(lambda model: len(server.builder.orders) == 2)

    run(job)


def test_where_a_build_fails_it_is_told_and_the_fallback_is_tuned_beside_the_serving(tmp_path, bench, monkeypatch):
    bench.onnxruntime.takes_ns = lambda samples, way: 1e6 if way["cudnn_conv_algo_search"] == "EXHAUSTIVE" else 2e6
    took_ms = {"HEURISTIC": 2.0, "EXHAUSTIVE": 1.0}
    monkeypatch.setattr("convoy.app.engines.measure.Probe.run_ms", lambda probe: took_ms[probe.engine.tuning.search])

    async def job() -> None:
        async with running(tmp_path, bench) as server:
            images = open_bundle(tmp_path / "store" / "digits" / "1").canary().inputs["images"]
            expected = await ask(server, images[:2])
            server.builder.fails = "TensorRT cannot read fp16.onnx: no such operator"
            server.builder.may_end.set()
            model = await server.until(lambda model: model["plan_build"]["state"] == "failed")
            assert model["ready"]
            model = await server.until(lambda model: "tuned" in model["why"])
            assert plans(await server.metrics()) == {"not_built": 1}
            assert model["engine"] == "onnxruntime-cuda"
            assert any("no such operator" in why for why in model["why_not_others"])
            np.testing.assert_allclose(await ask(server, images[:2]), expected, atol=2e-2)

    run(job)


@pytest.mark.parametrize("hold", [hold_proofs, hold_comparisons])
def test_stopping_while_a_plan_proves_itself_gives_all_memory_back(tmp_path, bench, monkeypatch, hold):
    has_begun, may_go_on = hold(monkeypatch)

    async def job() -> None:
        async with running(tmp_path, bench) as server:
            server.builder.may_end.set()
            await asyncio.to_thread(has_begun.wait, 60)
            asyncio.get_running_loop().call_later(0.05, may_go_on.set)

    run(job)  # which waits for every thread
    assert not bench.cuda.live_device_blocks
