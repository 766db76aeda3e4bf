"""What a file says of how a model is loaded: several engines on the CPU that compute at once, threads, warm-up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from convoy.app.config.model_settings import ModelSettings
from convoy.app.engines.batch import BatchResult
from convoy.app.engines.onnxruntime import OnnxRuntimeCpuEngine
from convoy.app.engines.parts import Part
from convoy.app.loading.load import LoadedModel, LoadOptions, load
from convoy.models.store import DEMO_STORE, Store
from tests.support.fake_devices import WatchedEngine, Workshop

SERVER = LoadOptions("auto", threads=8, max_batch=None, engine="cpu")


def loaded(**said: Any) -> LoadedModel:
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
    model = loaded(instances=3, threads=1)
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
    model = loaded(instances=3, precision="fp32")
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
    close(loaded(warm_up_runs=runs, precision="fp32"))
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
