"""A real core and its real HTTP application on a machine whose GPU and libraries are played, and a build that takes as
long as the test says."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from convoy.app.calls.access import BodyLimits, ServeOptions
from convoy.app.core import Core, CoreOptions
from convoy.app.engines.jobs import PlanRequest
from convoy.app.engines.plan_builder import BuildOrder, PlanBuilder
from convoy.app.http.application import create_app
from convoy.app.lifecycle import upgrades
from convoy.app.lifecycle.model_control import ControlMode, ControlOptions
from convoy.app.loading.load import LoadOptions
from convoy.models.bundle import MANIFEST, read_manifest, seal
from convoy.models.plans import PlanBuild
from convoy.models.store import DEMO_STORE
from tests.support.gpu_machine import GpuBench
from tests.support.stores import make_int8_right_everywhere

INFER = "/v2/models/digits/infer"


@dataclass
class ToldBuilder(PlanBuilder):
    """A builder whose builds end when the test says so."""

    bench: GpuBench
    plan_cache: Path
    wishes: Callable[[BuildOrder], PlanRequest]
    fails: str | None = None
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    orders: list[BuildOrder] = field(default_factory=list)
    cancelled: int = 0

    async def build(self, order: BuildOrder, report: Callable[[PlanBuild], None]) -> PlanBuild:
        self.orders.append(order)
        report(PlanBuild("building", phase="Timing", step=3, total=7, elapsed_s=120.0))
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.fails:
            ended = PlanBuild("failed", reason=self.fails)
        else:
            await asyncio.to_thread(self.bench.build, self.wishes(order), self.plan_cache)
            ended = PlanBuild("built")
        report(ended)
        return ended


@dataclass
class Running:
    core: Core
    http: httpx.AsyncClient
    builder: ToldBuilder
    bench: GpuBench

    async def model(self) -> dict[str, Any]:
        (model,) = (await self.http.get("/stats")).json()["models"]
        return model

    async def metrics(self) -> str:
        return (await self.http.get("/metrics")).text

    async def until(self, condition: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        for _ in range(12_000):
            model = await self.model()
            if condition(model):
                return model
            await asyncio.sleep(0.005)
        raise AssertionError(f"it never came: {model}")


@asynccontextmanager
async def running(
    tmp_path: Path,
    bench: GpuBench,
    precision: str = "fp16",
    control: ControlMode = "none",
    *,
    engine: str = "auto",
    builds: bool = True,
) -> AsyncIterator[Running]:
    """The digits, served; `builds`: something is being built, too."""
    folder = tmp_path / "store" / "digits" / "1"
    shutil.copytree(DEMO_STORE / "digits" / "1", folder, dirs_exist_ok=True)
    manifest = read_manifest(folder)
    variants = tuple(replace(variant, serve=True) for variant in manifest.variants)
    (folder / MANIFEST).write_bytes(seal(replace(manifest, variants=variants)))
    make_int8_right_everywhere(folder)
    plan_cache = tmp_path / "plans"
    load = LoadOptions(precision, 1, 4, engine=engine, machine=bench.machine, plan_cache=plan_cache)  # type: ignore[arg-type]

    def wish_of(order: BuildOrder) -> PlanRequest:
        (served,) = core.catalog.served()
        return next(wish for wish in served.loaded.wishes if wish.options == order.options)

    at_start = ("*",) if control == "explicit" else ()
    builder = ToldBuilder(bench, plan_cache, wish_of)
    core = Core(CoreOptions(tmp_path / "store", load, ControlOptions(control, at_start=at_start)), plan_builder=builder)
    app = create_app(core, ServeOptions(BodyLimits(1 << 20), decode_threads=1))
    transport = httpx.ASGITransport(app)
    await core.start()
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://convoy") as http:
            one = Running(core, http, builder, bench)
            for _ in range(4000):
                if core.ready and (builder.orders or not builds):
                    break
                await asyncio.sleep(0.005)
            yield one
    finally:
        await core.stop()


def request_of(images: np.ndarray) -> tuple[bytes, dict[str, str]]:
    tensor = {
        "name": "images",
        "datatype": "UINT8",
        "shape": list(images.shape),
        "parameters": {"binary_data_size": images.nbytes},
    }
    header = json.dumps({"inputs": [tensor]}).encode()
    return header + images.tobytes(), {"Inference-Header-Content-Length": str(len(header))}


async def ask(running: Running, images: np.ndarray) -> np.ndarray:
    body, headers = request_of(images)
    answer = await running.http.post(INFER, content=body, headers=headers)
    assert answer.status_code == 200, answer.text
    (output,) = answer.json()["outputs"]
    return np.array(output["data"], np.float32).reshape(output["shape"])


def serving(metrics: str) -> list[str]:
    """The engines that serve, in the metrics' words."""
    return [line for line in metrics.splitlines() if re.match(r"convoy_engine_info{.* 1\.0$", line)]


def plans(metrics: str) -> dict[str, int]:
    """What became of the plans that were wanted, in the metrics' words: how many, by result."""
    found = re.findall(r'^convoy_plans_total{.*result="(\w+)".*} (\d+)', metrics, re.MULTILINE)
    return {result: int(count) for result, count in found if count != "0"}


def run(job: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(job())  # type: ignore[arg-type]


def hold_proofs(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """From now on a plan that is proved waits: one event says that it does, the other that it may go on."""
    return _hold(monkeypatch, "prove_plan")


def hold_comparisons(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """The same for one that is compared with what serves."""
    return _hold(monkeypatch, "race")


def _hold(monkeypatch: pytest.MonkeyPatch, name: str) -> tuple[threading.Event, threading.Event]:
    begins, may_go_on = threading.Event(), threading.Event()
    function = getattr(upgrades, name)

    def held(*args: Any) -> Any:
        begins.set()
        assert may_go_on.wait(60)
        return function(*args)

    monkeypatch.setattr(upgrades, name, held)
    return begins, may_go_on
