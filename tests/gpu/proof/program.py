"""The order of the proof: tests, networks, then the figures, the most telling first, each within its time.

Whatever fails costs its own rows and says why; what was found is written down after every stage.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convoy.app.engines.base import Engine
from convoy.app.engines.machine import Machine
from tests.gpu.proof import environment, kinds, run_tests
from tests.gpu.proof.agreement import Reference, compare
from tests.gpu.proof.bare import Effort, HostMemory, measure_bare
from tests.gpu.proof.budget import Budget, Journal
from tests.gpu.proof.findings import Findings
from tests.gpu.proof.gathering import measure_gathering
from tests.gpu.proof.grid import SIZES, SLOTS, Course, Extent, courses, request_sizes
from tests.gpu.proof.kinds import Kind
from tests.gpu.proof.records import Setting, Stage, TestRun
from tests.gpu.proof.subjects import MOBILENET, MakeSubject, NotMade, Subject, make_digits, torchvision_maker
from tests.gpu.proof.targets import DIGITS, RESNET, SERVING

if TYPE_CHECKING:
    from tests.gpu.proof.in_core import CoreBench

_TESTS_S, _NETWORKS_S, _HTTP_S, _YARDSTICK_S = 110.0, 130.0, 75.0, 20.0
_HTTP_ROW_S = 6.0
_LEAST_S = 1.0
_SLAB_BATCHES = 8
_NOT_ASKED = "this run is about other engines"


@dataclass(frozen=True, slots=True)
class Ways:
    """What the program cannot do without a GPU, or not quickly; tests put their own in its place."""

    run_tests: Callable[[float], TestRun] = run_tests.run_tests
    build_plan: kinds.BuildPlan = kinds.build
    find_torch: Callable[[], Any] = kinds.torch_on_gpu
    makers: Mapping[str, MakeSubject] = field(
        default_factory=lambda: {
            DIGITS: make_digits,
            RESNET: torchvision_maker("resnet50"),
            MOBILENET: torchvision_maker(MOBILENET),
        }
    )
    extents: tuple[Extent, ...] = (Extent(RESNET, 32, True), Extent(DIGITS, 1, False), Extent(MOBILENET, 32, False))
    sizes: tuple[int, ...] = SIZES
    effort: Effort = field(default_factory=Effort)
    http: bool = True
    engines: tuple[str, ...] = ()  # none: all
    label: str = ""  # of a results file of its own


def prove(machine: Machine, out: Path, budget: Budget, journal: Journal, ways: Ways) -> Findings:
    """Everything, on the machine's first GPU. Raises JobError only where results cannot be written."""
    findings = Findings(environment.describe(machine.gpus[0]), out, ways.label)
    with tempfile.TemporaryDirectory(prefix="convoy-proof-") as temporary:
        asyncio.run(_Program(machine, Path(temporary), budget, journal, ways, findings).run())
    findings.ended = f"complete in {budget.spent_s:.0f} s"
    journal.tell(f"written: {findings.write()}")
    return findings


class _Program:
    def __init__(
        self, machine: Machine, folder: Path, budget: Budget, journal: Journal, ways: Ways, findings: Findings
    ) -> None:
        self._machine, self._device, self._folder = machine, machine.gpus[0], folder
        self._budget, self._journal, self._ways, self._found = budget, journal, ways, findings
        self._nvml = environment.Nvml.of(self._device.properties.pci_bus_id)
        self._subjects: dict[str, Subject] = {}
        self._reference = Reference()
        self._memory = HostMemory()
        self._compared: set[tuple[str, str, str]] = set()

    async def run(self) -> None:
        with self._stage("tests"):
            self._budget.require(_LEAST_S, "running the tests")
            self._found.tests = self._ways.run_tests(min(_TESTS_S, self._budget.left_s))
        plans = self._folder / "plans"
        plans.mkdir(mode=0o700)
        found = kinds.find_kinds(self._machine, plans, self._budget, self._ways.build_plan, self._ways.find_torch)
        if self._ways.engines:
            asked = {kind.name for kind in found if kind.name in self._ways.engines}
            found = [kind if kind.name in asked else replace(kind, missing=_NOT_ASKED) for kind in found]
        here = [kind for kind in found if not kind.missing]
        for kind in found:
            if kind.missing:
                self._found.drop(kind.name, kind.missing)
        self._make_subjects(with_int8=any("int8" in kind.precisions for kind in here))
        if not self._subjects:
            return
        async with self._core_bench() as core:
            for index, kind in enumerate(here):
                share_s = (self._budget.left_s - self._kept_for_later_s(found)) / (len(here) - index)
                with self._stage(kind.name):
                    await self._measure_kind(kind, core, self._budget.share(share_s))
        self._yardstick()
        self._http(found, plans)

    def _make_subjects(self, *, with_int8: bool) -> None:
        budget = self._budget.share(_NETWORKS_S)
        for name, make in self._ways.makers.items():
            with self._stage(f"network {name}"):
                budget.require(_LEAST_S, f"exporting {name}")
                folder = self._folder / name
                folder.mkdir()
                self._subjects[name] = make(folder, with_int8)

    def _kept_for_later_s(self, found: list[Kind]) -> float:
        serves = self._ways.http and any(not kind.missing for kind in found if kind.name in SERVING)
        return _YARDSTICK_S + (_HTTP_S if serves else 0.0)

    @asynccontextmanager
    async def _core_bench(self) -> AsyncIterator[CoreBench | None]:
        """The core, or None where its libraries are not there."""
        bench: CoreBench | None = None
        with self._stage("in-process core"):
            self._budget.require(_LEAST_S, "starting the core")
            from tests.gpu.proof.in_core import CoreBench

            store = self._folder / "empty"
            store.mkdir()
            largest = self._ways.sizes[-1] * max(subject.sample_bytes for subject in self._subjects.values())
            bench = CoreBench(store, _SLAB_BATCHES * largest)
            await bench.start()
        try:
            yield bench
        finally:
            if bench is not None:
                await bench.stop()

    # One kind of engine

    async def _measure_kind(self, kind: Kind, core: CoreBench | None, budget: Budget) -> None:
        extents = [extent for extent in self._ways.extents if extent.network in self._subjects]
        for course in courses(extents, kind.name, kind.precisions, self._ways.sizes):
            what = _shown(course)
            try:
                budget.require(len(course.sizes) * 2 * self._ways.effort.whole_s, what)
                await self._measure_course(kind, course, core, budget)
            except Exception as reason:  # whatever a library raises costs its own rows only
                self._drop(what, reason)
            else:
                self._journal.tell(what)
            self._found.write()

    async def _measure_course(self, kind: Kind, course: Course, core: CoreBench | None, budget: Budget) -> None:
        subject = self._subjects[course.opening.network]
        # Every engine runs every size: a batch that is not full is padded, as in a server.
        engine = await asyncio.to_thread(kind.open, subject, course.opening, self._ways.sizes)
        try:
            await asyncio.to_thread(engine.warm_up)
            await asyncio.to_thread(self._compare_once, engine, course.opening.at(1))
            for size in course.sizes:
                await self._measure_rows(engine, course.opening.at(size), core, budget)
        finally:
            await asyncio.to_thread(engine.close)

    def _compare_once(self, engine: Engine, setting: Setting) -> None:
        """The answers, once per network and precision; the first time also the ways into the device."""
        subject, key = self._subjects[setting.network], (setting.network, setting.engine, setting.precision)
        if key in self._compared:
            return
        self._compared.add(key)
        self._found.agreements += compare(engine, subject, setting, self._reference)
        if setting.network not in {one.network for one in self._found.gatherings}:
            self._found.gatherings.append(measure_gathering(self._device, engine, setting.network, self._memory))

    async def _measure_rows(self, engine: Engine, setting: Setting, core: CoreBench | None, budget: Budget) -> None:
        effort, subject = self._ways.effort, self._subjects[setting.network]
        self._found.bare.append(await asyncio.to_thread(measure_bare, engine, setting, self._memory, effort))
        if core is None:
            return
        for samples in request_sizes(setting.batch_size):
            if samples > 1 or setting.batch_size == 1 or _is_what_a_server_chooses(setting):
                budget.require(effort.whole_s, f"{_named(setting)} in the core")
                self._found.core.append(await core.measure(engine, subject.spec, setting, samples, effort))

    # What comes after the engines

    def _yardstick(self) -> None:
        with self._stage("torch by itself"):
            from tests.gpu.proof.yardstick import measure_torch

            budget = self._budget.share(_YARDSTICK_S)
            budget.require(_LEAST_S, "torch by itself")
            if self._ways.engines:
                raise NotMade(_NOT_ASKED)
            torch = self._ways.find_torch()
            for row in measure_torch(
                torch, self._device.name, self._subject(RESNET), self._ways.sizes, self._ways.effort
            ):
                self._found.yardsticks.append(row)
                budget.require(self._ways.effort.whole_s, "torch's next row")

    def _http(self, found: list[Kind], plans: Path) -> None:
        if not self._ways.http:
            return
        with self._stage("over HTTP"):
            from tests.gpu.proof import over_http

            serving = [kind for kind in found if kind.name in SERVING]
            missing = "; ".join(f"{kind.name}: {kind.missing}" for kind in serving if kind.missing)
            if all(kind.missing for kind in serving):
                raise NotMade(f"no engine that serves runs on this GPU ({missing})")
            self._budget.require(3 * _HTTP_ROW_S, "a server under load")
            counts, store = over_http.edge_counts(), self._folder / "store"
            store.mkdir()
            subject = self._subject(RESNET)
            over_http.publish_subject(subject, store, self._reference)
            for edges in counts:
                self._budget.require(3 * _HTTP_ROW_S, "a server under load")
                server = over_http.Server(store, plans, "auto", edges, self._budget.left_s - 2 * _HTTP_ROW_S)
                self._found.http.append(over_http.measure_over_http(server, subject, self._folder, _HTTP_ROW_S))

    # Everywhere

    def _subject(self, name: str) -> Subject:
        if name not in self._subjects:
            raise NotMade(f"{name} could not be made")
        return self._subjects[name]

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        """A step that may fail alone; afterwards everything is on disk."""
        began_s, ended = self._budget.spent_s, "done"
        self._journal.tell(f"{name} ...")
        try:
            yield
        except Exception as reason:  # as above: what was found elsewhere must not be lost
            ended = f"{type(reason).__name__}: {reason}"[:200]
            self._drop(name, reason)
        self._found.stages.append(Stage(name, round(self._budget.spent_s - began_s, 1), ended))
        state = self._nvml.state(self._budget.spent_s)
        if state is not None:
            self._found.states.append(state)
        self._found.write()

    def _drop(self, what: str, reason: BaseException) -> None:
        self._journal.tell(f"{what}: dropped ({' '.join(str(reason).split())[:200]})")
        self._found.drop(what, reason)


def _is_what_a_server_chooses(setting: Setting) -> bool:
    return setting.graphs and setting.slots == SLOTS[0] and setting.precision == "fp16"


def _shown(course: Course) -> str:
    one = course.opening
    graphs = "graphs" if one.graphs else "no graphs"
    return f"{one.network} {one.precision}, {one.engine}, {graphs}, {one.slots} slots, batch {_list(course.sizes)}"


def _named(setting: Setting) -> str:
    return f"{setting.network} {setting.precision} at batch {setting.batch_size}"


def _list(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))
