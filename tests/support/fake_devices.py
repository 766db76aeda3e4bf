"""A core in this process over fake engines on fake devices, and clients that never stop asking it.

Every engine adds a number of its own to its rows, so an answer tells who gave it. Engines watch their own
contract: never more threads inside than they have places, closed once, and by nobody while a thread is inside.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from convoy.app.calls.refusals import failure_of
from convoy.app.core import Core, CoreOptions
from convoy.app.engines.batch import BatchResult, EngineFailure
from convoy.app.engines.machine import CPU_ONLY, Machine
from convoy.app.engines.parts import Part
from convoy.app.lifecycle.catalog import Served
from convoy.app.lifecycle.health import HealthOptions
from convoy.app.loading.load import LoadedModel, LoadOptions
from convoy.app.loading.proving import CanaryCheck, ProvedEngine
from convoy.app.scheduling.request import Outcome, Request, TensorRef
from convoy.models.bundle import LatencyPoint
from convoy.models.errors import RequestError, Unavailable
from convoy.models.spec import ImageSpec, ModelSpec, TensorSpec
from convoy.models.store import StoredVersion
from tests.support.fake_engine import FakeEngine

ROW = 4
MAX_BATCH = 8


class WatchedEngine(FakeEngine):
    """Gives its rows back with `offset` added. `failure` is what every run ends with while it is there."""

    def __init__(self, device: str, offset: float, slots: int = 2) -> None:
        x, y = TensorSpec("x", "FP32", (ROW,)), TensorSpec("y", "FP32", (ROW,))

        super().__init__(
            *((x,), (y,)),
            max_batch_size=MAX_BATCH,
            run_rows=lambda arrays: [(arrays[0] + offset).reshape(len(arrays[0]), *y.shape)],
        )
        self.info = replace(self.info, device=device, slots=slots)
        self.offset = offset
        self.failure: EngineFailure | None = None
        self.closed = 0
        self.batches: list[int] = []
        self._inside, self._lock = 0, threading.Lock()

    @property
    def is_inside(self) -> bool:
        """Whether a thread is in it."""
        return self._inside > 0

    def run(self, parts: Sequence[Part]) -> BatchResult:
        with self._lock:
            self._inside += 1
            assert self._inside <= self.info.slots
            assert not self.closed, "a run on an engine that is closed"
            self.batches.append(sum(part.samples for part in parts))
        try:
            result = super().run(parts)
            if self.failure is not None:
                raise self.failure
            return result
        finally:
            with self._lock:
                self._inside -= 1

    def close(self) -> None:
        with self._lock:
            assert not self._inside, "closed while a thread is inside"
            self.closed += 1
            assert self.closed == 1, "closed twice"


def proved(engine: WatchedEngine, reason: str = "fake") -> ProvedEngine:
    points = tuple(LatencyPoint(size, 0.2, 0.2, 0.2) for size in (1, MAX_BATCH))
    return ProvedEngine(engine, CanaryCheck.of_first_answer(engine), points, reason, "fake")


@dataclass(slots=True)
class Workshop:
    """A core whose models are `models`, each on every one of `devices`. What was opened is in `engines`."""

    folder: Path
    devices: tuple[str, ...] = ("gpu:0",)
    models: tuple[str, ...] = ("rows",)
    slots: int = 2
    image: ImageSpec | None = None  # of `ROW` values as FP32, if they take pictures
    labels: tuple[str, ...] = ()
    health: HealthOptions = field(default_factory=HealthOptions)
    machine: Machine = CPU_ONLY
    engines: list[WatchedEngine] = field(default_factory=list)
    fatal: list[str] = field(default_factory=list)
    # Called in the loader's thread before anything is loaded.
    before_load: Callable[[], None] = lambda: None
    loads: list[LoadOptions] = field(default_factory=list)
    core: Core = field(init=False)

    def load(self, stored: StoredVersion, options: LoadOptions) -> LoadedModel:
        self.loads.append(options)
        self.before_load()
        shape = (ROW,) if self.image is None else self.image.tensor_shape
        x, y = TensorSpec("x", "FP32", shape), TensorSpec("y", "FP32", (ROW,))
        spec = ModelSpec(stored.name, (x,), (y,), MAX_BATCH, self.image, "none", self.labels)
        return LoadedModel(stored, spec, tuple(proved(self.make(device)) for device in self.devices), (), 0.0)

    def make(self, device: str) -> WatchedEngine:
        self.engines.append(WatchedEngine(device, 100.0 * (len(self.engines) + 1), self.slots))
        return self.engines[-1]

    def served(self, name: str = "rows") -> Served:
        return self.core.catalog.find(name, None)

    async def open(self) -> None:
        for name in self.models:
            (self.folder / name / "1").mkdir(parents=True, exist_ok=True)
        options = CoreOptions(self.folder, LoadOptions("auto", 1, None, machine=self.machine), health=self.health)
        self.core = Core(options, load_version=self.load, on_fatal=self.fatal.append)
        await self.core.start()
        await until(lambda: self.core.ready)

    async def ask(self, value: float = 0.0, samples: int = 1, name: str = "rows") -> float:
        """What was added to the rows of a request. Raises the RequestError that a client would get."""
        core, served = self.core, self.served(name)
        nbytes = samples * ROW * 4
        source, place = core.slab.reserve(nbytes), core.slab.reserve(nbytes)
        assert source is not None
        assert place is not None
        source.view[:] = np.full((samples, ROW), value, np.float32).tobytes()
        request = Request(
            id=core.next_request_id(),
            key=served.key,
            samples=samples,
            shapes=((ROW,),),
            slots=(source.ref, place.ref),
            inputs=(TensorRef(source.ref, 0, nbytes),),
            wanted=(0,),
            outputs=(TensorRef(place.ref, 0, nbytes),),
            arrival_ns=0,
        )
        served.enter()
        try:
            if not served.takes_requests:
                core.slab.free(*request.slots)
                raise Unavailable("the engine is being replaced")
            future = core.scheduler.submit(request)
            assert isinstance(future, asyncio.Future)
            done = await future
            if done.outcome is not Outcome.ANSWERED:
                raise failure_of(done)
            rows = np.frombuffer(done.answers[0].data, np.float32) - value
            for slot in request.slots:
                core.slab.free(slot)
            first, *others = rows.tolist()
            assert set(others) <= {first}, "one answer by two engines"
            return float(first)
        finally:
            served.leave()

    async def close(self) -> None:
        for engine in self.engines:
            if engine.gate is not None:
                engine.gate.set()
        await until(lambda: not self.core.scheduler.unfinished)
        await self.core.stop()
        assert self.core.slab.slots_in_use == 0


@dataclass(slots=True)
class Clients:
    """Ask again and again, and remember who answered and how it failed."""

    workshop: Workshop
    count: int = 8
    name: str = "rows"
    answers: list[float] = field(default_factory=list)
    failures: list[RequestError] = field(default_factory=list)
    _is_over: bool = False
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def __aenter__(self) -> Clients:
        self._tasks = [asyncio.ensure_future(self._run(1 + number % 3)) for number in range(self.count)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)

    async def answered_by(self, engine: WatchedEngine, times: int = 50) -> None:
        """Until an engine has answered so many more."""
        before = len(self.answers)
        await until(lambda: self.answers[before:].count(engine.offset) >= times)

    async def _run(self, samples: int) -> None:
        while not self._is_over:
            try:
                self.answers.append(await self.workshop.ask(samples=samples, name=self.name))
            except RequestError as error:
                self.failures.append(error)
                await asyncio.sleep(0.001)


async def until(happened: Callable[[], bool]) -> None:
    while not happened():  # noqa: ASYNC110 - threads make it happen
        await asyncio.sleep(0.0005)


def in_workshop(workshop: Workshop, scenario: Callable[[], Coroutine[None, None, None]]) -> None:
    """Run a scenario in an open workshop; afterwards no memory is held, and every engine was closed once."""

    async def main() -> None:
        await workshop.open()
        await scenario()
        await workshop.close()
        # One that was about to be closed is closed by a thread, for which nobody waits.
        await asyncio.wait_for(until(lambda: all(engine.closed for engine in workshop.engines)), 60)
        assert [engine.closed for engine in workshop.engines] == [1] * len(workshop.engines)

    asyncio.run(main())
