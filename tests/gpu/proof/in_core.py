"""The same engine behind the core: what slab, queue, batcher and lane cost.

Clients are tasks on the core's own loop, each with its next request as soon as the last one is answered. The bytes
of their pictures lie in the slab already: bringing them there is the edge's work, which the rows over HTTP contain.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import numpy as np

from convoy.app.batch import BatchResult
from convoy.app.core import Core, CoreOptions
from convoy.app.engines.base import Engine
from convoy.app.engines.measure import latency_tables
from convoy.app.engines.parts import Part
from convoy.app.lifecycle.catalog import Served
from convoy.app.lifecycle.control import ControlOptions
from convoy.app.lifecycle.queue_options import QueueRules
from convoy.app.loading.canary import CanaryCheck
from convoy.app.loading.load import LoadedModel, LoadOptions
from convoy.app.loading.proving import ProvedEngine, race
from convoy.app.scheduling.request import Done, Outcome, Request, TensorPlace
from convoy.models.bundle import LatencyPoint
from convoy.models.spec import ModelSpec
from convoy.models.store import StoredVersion
from tests.gpu.proof.bare import Effort
from tests.gpu.proof.records import CoreRow, Setting

# Two batches in the lanes, two that wait: more would only wait.
_BATCHES_IN_FLIGHT = 4
_FEWEST_CLIENTS = 4


class Borrowed(Engine):
    """Somebody else's engine, which the core must not close."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.info, self.batched = engine.info, engine.batched
        self.inputs, self.outputs = engine.inputs, engine.outputs

    def warm_up(self) -> None:
        self._engine.warm_up()

    def run(self, parts: Sequence[Part]) -> BatchResult:
        return self._engine.run(parts)

    def page_lock(self, memory: memoryview) -> bool:
        return self._engine.page_lock(memory)

    def close(self) -> None:
        pass


class Unanswered(RuntimeError):
    """A request was not answered; the message says how it ended."""


@dataclass(frozen=True, slots=True)
class _Answered:
    """One request's way: from submit to answer, and how large its batch was."""

    finished_ns: int
    took_ns: int
    batch_samples: int


@dataclass(frozen=True, slots=True)
class _Measured:
    """What the batcher is told of an engine, as at loading."""

    engine: Engine
    latency: tuple[LatencyPoint, ...]


class CoreBench:
    """One core with nothing loaded, which engines enter and leave."""

    def __init__(self, store: Path, capacity_bytes: int) -> None:
        self._load_options = load = LoadOptions("auto", threads=1, max_batch=None)
        control = ControlOptions(mode="explicit")
        queues = QueueRules(max_waiting=1 << 16)
        self._core = Core(CoreOptions(store, load, control, queues=queues, max_inflight_bytes=capacity_bytes))
        self._versions = count(1)
        self._store = store
        self._is_filled = False
        self._measured: _Measured | None = None

    async def start(self) -> None:
        await self._core.start()  # whatever the store holds is loaded behind it, and it holds nothing

    async def stop(self) -> None:
        await self._core.stop()

    async def measure(
        self, engine: Engine, spec: ModelSpec, setting: Setting, request_samples: int, effort: Effort
    ) -> CoreRow:
        """One row. Raises EngineFailure, ConvoyError or Unanswered."""
        if self._measured is None or self._measured.engine is not engine:
            (table,) = latency_tables([engine], await asyncio.to_thread(race, [engine]))
            self._measured = _Measured(engine, table.points)
        served = self._enter(engine, spec, setting.batch_size, self._measured.latency)
        try:
            self._fill_slab()
            answered, began_ns = await self._load(served, setting, request_samples, effort)
        finally:
            leaving = self._core.lifecycle.take_out_of_service(served.key.model, served.key.version)
            if leaving is not None:
                await leaving
        return _row(setting, request_samples, answered, began_ns)

    def _fill_slab(self) -> None:
        """Pictures wherever a request may come to lie; the core has page-locked the slab when its engine came."""
        if self._is_filled:
            return
        slab = self._core.slab
        whole = slab.reserve(slab.capacity_bytes)
        assert whole is not None, "the slab is in use already"
        pixels = np.frombuffer(whole.view, np.uint8)
        pixels[:] = np.random.default_rng(0).integers(0, 256, len(pixels), np.uint8)
        slab.free(whole.ref)
        self._is_filled = True

    def _enter(self, engine: Engine, spec: ModelSpec, batch_size: int, latency: tuple[LatencyPoint, ...]) -> Served:
        name, version = spec.name, next(self._versions)
        proved = ProvedEngine(Borrowed(engine), CanaryCheck.of_first_answer(engine), latency, "a proof", "proof")
        stored = StoredVersion(name, version, self._store / name / str(version))
        own = replace(spec, max_batch_size=batch_size)
        loaded = LoadedModel(stored, own, (proved,), (), 0.0)
        self._core.lifecycle.put_into_service(loaded, self._load_options)
        return self._core.catalog.find(name, version)

    async def _load(
        self, served: Served, setting: Setting, samples: int, effort: Effort
    ) -> tuple[list[_Answered], int]:
        clients = max(_FEWEST_CLIENTS, _BATCHES_IN_FLIGHT * setting.batch_size // samples)
        await self._run_clients(served, clients, samples, effort.warm_up_s)
        began_ns = time.monotonic_ns()
        return await self._run_clients(served, clients, samples, effort.row_s), began_ns

    async def _run_clients(self, served: Served, clients: int, samples: int, seconds: float) -> list[_Answered]:
        answered: list[_Answered] = []
        end_ns = time.monotonic_ns() + int(seconds * 1e9)
        await asyncio.gather(*(self._ask_until(served, samples, end_ns, answered) for _ in range(clients)))
        return answered

    async def _ask_until(self, served: Served, samples: int, end_ns: int, answered: list[_Answered]) -> None:
        while True:
            request = self._request(served, samples)
            done: Done = await self._core.submit(request)
            now_ns = time.monotonic_ns()
            if done.outcome is not Outcome.ANSWERED:
                raise Unanswered(f"a request ended as {done.outcome.value}: {done.reason}")
            self._core.slab.free(*request.slots)
            answered.append(_Answered(now_ns, now_ns - request.arrival_ns, done.batch_samples))
            if now_ns >= end_ns:
                return

    def _request(self, served: Served, samples: int) -> Request:
        (image,), (output,) = served.spec.inputs, served.spec.outputs
        assert image.sample_bytes is not None
        assert output.sample_bytes is not None
        nbytes_in, nbytes_out = samples * image.sample_bytes, samples * output.sample_bytes
        return Request(
            id=self._core.next_request_id(),
            key=served.key,
            samples=samples,
            shapes=(image.shape,),
            slots=(self._core.reserve(nbytes_in).ref, self._core.reserve(nbytes_out).ref),
            inputs=(TensorPlace(0, 0, nbytes_in),),
            wanted=(0,),
            outputs=(TensorPlace(1, 0, nbytes_out),),
            arrival_ns=time.monotonic_ns(),
        )


def _row(setting: Setting, samples: int, answered: Sequence[_Answered], began_ns: int) -> CoreRow:
    seconds = (max(one.finished_ns for one in answered) - began_ns) / 1e9
    p50, p99 = np.percentile([one.took_ns for one in answered], [50, 99]) / 1e6
    return CoreRow(
        setting=setting,
        request_samples=samples,
        images_per_s=len(answered) * samples / seconds,
        mean_batch=float(np.mean([one.batch_samples for one in answered])),
        p50_ms=float(p50),
        p99_ms=float(p99),
    )
