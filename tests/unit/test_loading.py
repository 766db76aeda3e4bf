"""How engines prove themselves: by canaries, by measuring where export did not, and several on the CPU at once."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convoy.app.config.settings import ModelSettings
from convoy.app.engines.base import Engine
from convoy.app.engines.batch import BatchResult, EngineFailure
from convoy.app.engines.machine import CPU_ONLY, Library
from convoy.app.engines.measure import Rounds
from convoy.app.engines.onnxruntime import OnnxRuntimeCpuEngine
from convoy.app.engines.openvino import load_openvino
from convoy.app.engines.parts import Part
from convoy.app.loading.load import LoadedModel, LoadOptions, ServedBefore, load
from convoy.app.loading.proving import CanaryCheck, CanaryFailed, race
from convoy.models.bundle import MANIFEST, Canary, Interval, LatencyPoint, LatencyTable, Variant, read_manifest, seal
from convoy.models.spec import TensorSpec
from convoy.models.store import DEMO_STORE, Store
from tests.support.fake_devices import WatchedEngine, Workshop
from tests.support.fake_engine import Arrays, FakeEngine
from tests.support.stores import make_int8_right_everywhere


def table(batch_ms: float, speedup: Interval | None = None) -> LatencyTable:
    return LatencyTable("here", (LatencyPoint(1, batch_ms, batch_ms, batch_ms),), speedup=speedup)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Store:
    """The digits, exported on another machine, where both variants paid."""
    shutil.copytree(DEMO_STORE / "digits" / "1", tmp_path / "digits" / "1")
    path = tmp_path / "digits" / "1" / MANIFEST
    manifest = read_manifest(path.parent)
    variants = tuple(
        replace(variant, serve=True, latency=table(1, Interval(2, 2, 2)))
        for variant in manifest.variants
        if variant.file in ("fp32.onnx", "int8-cpu.onnx")
    )
    path.write_bytes(seal(replace(manifest, variants=variants)))
    make_int8_right_everywhere(path.parent)
    return Store(tmp_path)


def loaded(store: Store, **given: Any) -> LoadedModel:
    return load(store.versions("digits")[0], replace(LoadOptions("auto", threads=1, max_batch=None), **given))


def takes(monkeypatch: pytest.MonkeyPatch, *engines_ms: list[float]) -> None:
    """What three rounds of one sample take in each engine."""
    rounds = Rounds(1, np.array(engines_ms))
    monkeypatch.setattr("convoy.app.loading.proving.run_in_turns", lambda engines, pace: [rounds])


@pytest.mark.parametrize(("int8_ms", "precision"), [([1.9, 2.0, 2.1], "int8"), ([1.4, 2.0, 2.98], "fp32")])
def test_int8_serves_only_where_it_is_faster_beyond_doubt(elsewhere, monkeypatch, int8_ms, precision):
    takes(monkeypatch, [3.0] * 3, int8_ms)
    (proved,) = loaded(elsewhere).engines
    assert proved.engine.info.precision == precision
    assert [point.median_ms for point in proved.latency] == [3.0 if precision == "fp32" else 2.0]
    assert "measured at start" in proved.reason


@pytest.mark.parametrize(
    ("openvino_int8_ms", "serves"),
    [(0.999, ("openvino", "fp32")), (1.5, ("openvino", "fp32")), (0.5, ("openvino", "int8"))],
)
def test_a_less_exact_one_has_to_beat_the_best_of_the_more_exact_whichever_engine_that_is(
    elsewhere, monkeypatch, openvino_int8_ms, serves
):
    if importlib.util.find_spec("openvino") is None:
        pytest.skip("OpenVINO is not installed")
    took_ms = {
        ("onnxruntime-cpu", "fp32"): 2.0,
        ("onnxruntime-cpu", "int8"): 0.998,
        ("openvino", "fp32"): 1.0,
        ("openvino", "int8"): openvino_int8_ms,
    }
    monkeypatch.setattr(
        "convoy.app.engines.measure.Probe.run_ms",
        lambda probe: took_ms[probe.engine.info.engine, probe.engine.info.precision],
    )
    (proved,) = loaded(elsewhere, machine=replace(CPU_ONLY, openvino=Library(load_openvino()))).engines
    assert (proved.engine.info.engine, proved.engine.info.precision) == serves


def test_measuring_at_start_begins_with_one_sample_and_doubles(elsewhere):
    (proved,) = loaded(elsewhere).engines
    sizes = [point.batch_size for point in proved.latency]
    # On a machine that is busy with something else, the largest are left out.
    assert sizes == [1, 2, 4, 8, 16, 32, 64][: max(1, len(sizes))]


def test_what_served_before_serves_again_without_a_race(elsewhere, monkeypatch):
    def single(engines: list[Engine]) -> list[Rounds]:
        assert len(engines) == 1
        return race(engines)

    monkeypatch.setattr("convoy.app.loading.proving.race", single)
    for file, precision in (("fp32.onnx", "fp32"), ("int8-cpu.onnx", "int8")):
        model = loaded(elsewhere, before=(ServedBefore("cpu", "onnxruntime-cpu", file),))
        (proved,) = model.engines
        assert (proved.engine.info.precision, proved.file) == (precision, file)
        assert [why for why in model.skipped if "onnxruntime-cpu served before" in why]


@pytest.mark.parametrize("file", ["gone.onnx", "fp32.onnx"])
def test_what_served_before_and_cannot_any_more_is_succeeded_by_the_best_of_the_others(elsewhere, monkeypatch, file):
    takes(monkeypatch, [3.0] * 3, [1.0] * 3)
    monkeypatch.setattr(CanaryCheck, "run", fails_once(CanaryCheck.run) if file == "fp32.onnx" else CanaryCheck.run)
    (proved,) = loaded(elsewhere, before=(ServedBefore("cpu", "onnxruntime-cpu", file),)).engines
    assert proved.file == "int8-cpu.onnx"


def fails_once(run: Callable[..., None]) -> Callable[..., None]:
    failed = []

    def once(check: CanaryCheck, engine: Engine) -> None:
        if not failed:
            failed.append(engine)
            raise CanaryFailed("off by much")
        run(check, engine)

    return once


@pytest.mark.parametrize(
    ("free", "serves"), [(99 << 20, "fp32.onnx"), (101 << 20, "int8-cpu.onnx"), (None, "int8-cpu.onnx")]
)
def test_a_second_engine_is_opened_only_where_there_is_room_for_one_like_the_first(
    elsewhere, monkeypatch, free, serves
):
    taken = itertools.count(0, 100 << 20)
    monkeypatch.setattr("convoy.app.loading.load.resident_bytes", lambda: next(taken))
    monkeypatch.setattr("convoy.app.loading.load.available_bytes", lambda: free)
    monkeypatch.setattr(
        "convoy.app.engines.measure.Probe.run_ms", lambda probe: {"fp32": 2.0, "int8": 1.0}[probe.engine.info.precision]
    )
    model = loaded(elsewhere)
    assert [one.file for one in model.engines] == [serves]
    told = "int8-cpu.onnx: the first engine took 100 MiB of memory, and 99 MiB are available"
    assert any(told in why for why in model.skipped) == (serves == "fp32.onnx")


SERVER = LoadOptions("auto", threads=8, max_batch=None, engine="cpu")


def loaded_demo(**said: Any) -> LoadedModel:
    options = ModelSettings(**said).load_options(SERVER)
    return load(Store(DEMO_STORE).versions("digits")[0], options)


def close(model: LoadedModel) -> None:
    for proved in model.engines:
        proved.engine.close()


def test_what_is_left_out_is_the_servers() -> None:
    assert ModelSettings().load_options(SERVER) == SERVER
    own = ModelSettings(instances=3, max_batch=2, precision="fp32", warm_up_runs=4).load_options(SERVER)
    assert (own.instances, own.threads, own.max_batch, own.precision, own.warm_up_runs) == (3, 2, 2, "fp32", 4)
    assert ModelSettings(instances=3, threads=5).load_options(SERVER).threads == 5


def test_each_instance_is_an_engine_that_has_proved_itself_on_a_device_of_its_own() -> None:
    model = loaded_demo(instances=3, threads=1)
    try:
        infos = [proved.info for proved in model.engines]
        assert [info.device for info in infos] == ["cpu", "cpu/1", "cpu/2"]
        assert len({id(proved.engine) for proved in model.engines}) == 3
        assert all(info.is_on_cpu and "1 threads" in info.device_fingerprint for info in infos)
        for proved in model.engines:
            proved.canary.run(proved.engine)
    finally:
        close(model)


def test_without_room_there_are_fewer_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    resident = iter([0, 1 << 30])  # before the first engine and after it
    monkeypatch.setattr("convoy.app.loading.load.resident_bytes", lambda: next(resident, 1 << 30))
    monkeypatch.setattr("convoy.app.loading.load.available_bytes", lambda: 1 << 20)
    model = loaded_demo(instances=3, precision="fp32")
    close(model)
    assert len(model.engines) == 1
    assert "the first engine took 1024 MiB of memory, and 1 MiB are available" in caplog.text


@pytest.mark.parametrize("runs", [1, 4])
def test_each_batch_size_is_run_so_often_before_it_serves(runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[int] = []
    sound = OnnxRuntimeCpuEngine.warm_up

    def warm_up(self: OnnxRuntimeCpuEngine) -> None:
        warmed.append(id(self))
        sound(self)

    monkeypatch.setattr(OnnxRuntimeCpuEngine, "warm_up", warm_up)
    close(loaded_demo(warm_up_runs=runs, precision="fp32"))
    assert len(warmed) == runs


class Meeting(WatchedEngine):
    """Ends no run before another one runs beside it."""

    barrier: threading.Barrier

    def run(self, parts: Sequence[Part]) -> BatchResult:
        self.barrier.wait(60)
        return super().run(parts)


def test_instances_compute_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.fake_devices.WatchedEngine", Meeting)
    Meeting.barrier = threading.Barrier(1)

    async def play() -> None:
        workshop = Workshop(tmp_path, devices=("cpu", "cpu/1"), slots=1)
        await workshop.open()
        Meeting.barrier = threading.Barrier(2)  # the canaries are over
        for _ in range(5):
            answers = await asyncio.gather(workshop.ask(samples=8), workshop.ask(samples=8))
            assert set(answers) == {engine.offset for engine in workshop.engines}
        await workshop.close()

    asyncio.run(play())


# Canaries


def answering(max_batch_size: int = 4, **options: object) -> FakeEngine:
    x, y = TensorSpec("x", "FP32", (3,)), TensorSpec("y", "FP32", (3,))
    return FakeEngine((x,), (y,), max_batch_size=max_batch_size, **options)  # type: ignore[arg-type]


def canary_of(rows: int = 6, tolerance: float = 1e-3) -> CanaryCheck:
    values = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3) + 1
    return CanaryCheck(Canary({"x": values}, {"y": values.copy()}), tolerance, batched=True)


@pytest.mark.parametrize(("samples", "runs"), [(None, 2), (1, 1)])
def test_the_right_answer_passes_in_batches_that_fit_or_of_some_samples_while_serving(
    samples: int | None, runs: int
) -> None:
    sound = answering(max_batch_size=4)
    canary_of(rows=6).run(sound, samples=samples)
    assert sound.runs == runs


@pytest.mark.parametrize("off_by", [0.01, np.nan, np.inf])
def test_one_wrong_row_or_a_failure_fails_and_a_small_error_passes(off_by: float) -> None:
    def wrong(arrays: Arrays) -> tuple[np.ndarray]:
        answer = arrays[0].copy()
        answer[-1, 0] *= 1 + off_by
        return (answer,)

    with pytest.raises(CanaryFailed, match="'y' is off by"):
        canary_of().run(answering(run_rows=wrong))
    canary_of(tolerance=0.1).run(answering(run_rows=lambda arrays: (arrays[0] * 1.05,)))

    def fail(_: Arrays) -> tuple[np.ndarray]:
        raise EngineFailure("broken")

    with pytest.raises(CanaryFailed, match="broken"):
        canary_of().run(answering(run_rows=fail))


def test_a_model_may_answer_nan_as_long_as_it_goes_on_doing_so() -> None:
    strange = answering(run_rows=lambda arrays: (arrays[0] * np.float32([np.nan, np.inf, 1.0]),))
    canary = CanaryCheck.of_first_answer(strange)
    canary.run(strange)
    with pytest.raises(CanaryFailed):
        canary.run(answering())
    with pytest.raises(CanaryFailed):
        canary.run(answering(run_rows=lambda arrays: (arrays[0] * np.float32([np.nan, np.inf, 1.1]),)))


def test_a_model_without_a_batch_has_a_canary_too() -> None:
    x = TensorSpec("x", "INT32", (-1, 3))
    whole = FakeEngine((x,), (TensorSpec("y", "INT32", (-1, 3)),), max_batch_size=0, run_rows=lambda arrays: arrays)
    canary = CanaryCheck.of_first_answer(whole)
    canary.run(whole)
    assert canary.canary.inputs["x"].shape == (1, 3)


@pytest.mark.parametrize(("scale", "passes"), [(1e-7, True), (1.0, False)])
def test_a_probability_of_next_to_nothing_may_be_rounded_to_nothing(scale: float, passes: bool) -> None:
    values = np.array([[0.2, 0.1, 0.3]] * 3, np.float32) * np.float32(scale)
    variant = Variant("fp16.onnx", "fp16", "cuda", True, "", 1e-4, None, None)
    rounded = answering(run_rows=lambda arrays: (np.zeros_like(arrays[0]),))
    asked = CanaryCheck.of_variant(Canary({"x": values}, {"y": values.copy()}), variant)
    if passes:
        asked.run(rounded)
    else:
        with pytest.raises(CanaryFailed, match="'y' is off by 1"):
            asked.run(rounded)
    # Numbers that are no shares are held to their own size, however small it is.
    below = Canary({"x": -values}, {"y": -values})
    with pytest.raises(CanaryFailed, match="'y' is off by 1"):
        CanaryCheck.of_variant(below, variant).run(rounded)
