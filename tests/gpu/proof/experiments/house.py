"""The house itself on this GPU: its tests, its benchmark, its core under another switch interval, a server under load.

Unlike its neighbours it is made of the house's own parts, because they are what is asked about here.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from tests.gpu.proof.experiment import Bench, Judgement, NotMeasurable, Ran

if TYPE_CHECKING:
    from convoy.app.engines.machine import Machine
    from tests.gpu.proof.records import TestRun

# For the benchmark's last rows, when its budget is over.
_ENDING_S = 12.0
_HTTP_ROW_S = 6.0
_DEFAULT_S = 0.005  # sys.getswitchinterval's own


def gpu_tests(bench: Bench) -> None:
    """The tests marked `gpu`, in pytest's own process."""
    from tests.gpu.proof.run_tests import run_tests

    note_tests(bench, lambda: run_tests(bench.left_s - _ENDING_S))


def note_tests(bench: Bench, run: Callable[[], TestRun]) -> None:
    """What came of some tests. Raises NotMeasurable where they cannot be run."""
    from tests.gpu.proof.subjects import NotMade

    try:
        found = run()
    except NotMade as reason:
        raise NotMeasurable(str(reason)) from reason
    for name in ("passed", "failed", "skipped", "seconds"):
        bench.figure(name, getattr(found, name))
    for index, note in enumerate(found.notes):
        bench.fact(f"note {index + 1}", note)


def judge_tests(ran: Ran) -> Judgement:
    """None fails, and some ran."""
    figures = ran.figures
    first = next((note for note in ran.facts.values() if note.startswith(("FAILED", "ERROR"))), "")
    told = f"{figures['passed']:.0f} passed, {figures['failed']:.0f} failed, {figures['skipped']:.0f} skipped"
    return Judgement.of(not figures["failed"] and figures["passed"] > 0, f"{told}{': ' if first else ''}{first}")


def benchmark(bench: Bench, engines: list[str], label: str, http: bool) -> None:
    """Today's benchmark, all of it or of some engines; it writes its own results while it runs."""
    from tests.gpu.proof.budget import Budget, Journal
    from tests.gpu.proof.program import Ways, prove

    machine = _machine()
    budget = Budget(bench.left_s - _ENDING_S)
    tests = _tests_of_part_1(bench, machine)
    ways = Ways(engines=tuple(engines), label=label, http=http)
    if tests is not None:
        ways = replace(ways, run_tests=lambda limit_s: tests)
    findings = prove(machine, bench.results, budget, Journal(budget, bench.step), ways)
    proof = findings.proof()
    for verdict in ("pass", "FAIL", "unproved"):
        concerned = [one for one in proof.targets if one.verdict == verdict]
        bench.figure(f"targets: {verdict}", len(concerned))
        if verdict == "FAIL":
            for target in concerned:
                bench.fact(f"{target.engine}: {target.name}", f"{target.measured} ({target.how})")
    bench.figure("rows", len(proof.bare) + len(proof.core) + len(proof.http))
    bench.figure("dropped", len(proof.dropped))
    bench.fact("ended", proof.ended)


def _tests_of_part_1(bench: Bench, machine: Machine) -> TestRun | None:
    """What the tests said when they ran by themselves; they need not run twice."""
    from tests.gpu.proof.book import open_book
    from tests.gpu.proof.records import TestRun

    known = open_book(bench.results, machine.gpus[0].properties.name).of("gpu-tests")
    if known is None or known.ended != "done" or "passed" not in known.figures:
        return None
    passed, failed, skipped = (int(known.figures[name]) for name in ("passed", "failed", "skipped"))
    return TestRun(passed, failed, skipped, known.figures["seconds"], tuple(known.facts.values()))


def judge_benchmark(ran: Ran) -> Judgement:
    """Every target that could be measured is met, and some could."""
    passed, failed, unproved = (int(ran.figures[f"targets: {name}"]) for name in ("pass", "FAIL", "unproved"))
    missed = "; ".join(name for name in ran.facts if name != "ended")
    told = f"{passed} targets met, {failed} missed, {unproved} unproved; {ran.figures['rows']:.0f} rows"
    return Judgement.of(passed > 0 and not failed, f"{told}{'; missed: ' if missed else ''}{missed}")


def switch_interval(bench: Bench, sizes: list[int], seconds: float, rounds: int) -> None:
    """The core's rate with Python's switch interval as it is and at a tenth of that, in turns, on the smallest network.

    There the core's threads want the interpreter the most often.
    """
    from tests.gpu.proof.bare import Effort
    from tests.gpu.proof.budget import Budget
    from tests.gpu.proof.grid import Opening
    from tests.gpu.proof.in_core import CoreBench
    from tests.gpu.proof.kinds import build, find_kinds, torch_on_gpu
    from tests.gpu.proof.subjects import make_digits
    from tests.gpu.proof.targets import RTX, TENSORRT

    machine, effort = _machine(), Effort(row_s=seconds)
    subject = make_digits(bench.folder, False)
    plans = Path(tempfile.mkdtemp(dir=bench.folder))
    found = find_kinds(machine, plans, Budget(bench.left_s), build, torch_on_gpu)
    # For plans there is no time.
    quick = [one for one in found if one.name not in (TENSORRT, RTX)]
    kind = next((one for one in quick if not one.missing), None)
    if kind is None:
        raise NotMeasurable("; ".join(f"{one.name}: {one.missing}" for one in quick))
    bench.fact("engine", kind.name)
    opening = Opening(subject.name, kind.name, "fp16", True, 2)

    async def measure() -> None:
        store = bench.folder / "store"
        store.mkdir()
        core = CoreBench(store, 64 << 20)
        await core.start()
        engine = await asyncio.to_thread(kind.open, subject, opening, tuple(sizes))
        try:
            await asyncio.to_thread(engine.warm_up)
            rates: dict[tuple[int, str], list[float]] = {}
            for _ in range(rounds):
                for name, interval_s in (("default", _DEFAULT_S), ("short", _DEFAULT_S / 10)):
                    with _switching(interval_s):
                        for size in sizes:
                            bench.step(f"{name} batch {size}")
                            row = await core.measure(engine, subject.spec, opening.at(size), 1, effort)
                            rates.setdefault((size, name), []).append(row.images_per_s)
            for (size, name), seen in rates.items():
                bench.figure(f"batch {size}, {name}: images/s", median(seen))
        finally:
            await asyncio.to_thread(engine.close)
            await core.stop()

    asyncio.run(measure())


@contextmanager
def _switching(interval_s: float) -> Iterator[None]:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(interval_s)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)


def judge_switch_interval(ran: Ran) -> Judgement:
    """A shorter one changes nothing by more than a twentieth, so that it can stay as it is."""
    sizes = sorted({int(name.split()[1].rstrip(",")) for name in ran.figures})
    gains = {
        n: ran.figures[f"batch {n}, short: images/s"] / ran.figures[f"batch {n}, default: images/s"] for n in sizes
    }
    told = ", ".join(f"batch {size}: {gain:.2f} of the default's rate" for size, gain in gains.items())
    return Judgement.of(
        all(0.95 < gain < 1.05 for gain in gains.values()), f"with 0.5 ms on {ran.facts['engine']}: {told}"
    )


def serve(bench: Bench) -> None:
    """`convoy serve` with ResNet-50 from an empty plan cache, with four edges and with one, under the load tester."""
    from tests.gpu.proof import over_http
    from tests.gpu.proof.agreement import Reference
    from tests.gpu.proof.subjects import NotMade, torchvision_maker
    from tests.gpu.proof.targets import RESNET

    _machine()
    store, plans, made = (bench.folder / name for name in ("store", "plans", "made"))
    for folder in (store, plans, made):
        folder.mkdir(mode=0o700)
    try:
        counts = over_http.edge_counts()
        bench.step("exporting the network")
        subject = torchvision_maker("resnet50")(made, False)
        bench.step("publishing it")
        over_http.publish_subject(subject, store, Reference())
        for edges in counts:
            where = f"{edges or 'no'} edges"
            bench.step(f"a server with {where}")
            ready_s = bench.left_s - 2 * _HTTP_ROW_S - _ENDING_S
            server = over_http.Server(store, plans, "auto", edges, ready_s)
            row = over_http.measure_over_http(server, subject, bench.folder, _HTTP_ROW_S)
            bench.fact(f"{where}: engine", f"{row.engine} {row.precision}")
            for name in ("images_per_s", "p50_ms", "p99_ms", "failed"):
                bench.figure(f"{where}: {name}", getattr(row, name))
    except NotMade as reason:
        raise NotMeasurable(f"{RESNET} over HTTP: {reason}") from reason


def judge_serving(ran: Ran) -> Judgement:
    """It answers from the GPU and fails nobody."""
    rates = {name: value for name, value in ran.figures.items() if name.endswith("images_per_s")}
    failed = sum(value for name, value in ran.figures.items() if name.endswith(": failed"))
    engines = ", ".join(dict.fromkeys(ran.facts.values()))
    told = "; ".join(f"{name.partition(':')[0]}: {rate:.0f} images/s" for name, rate in rates.items())
    return Judgement.of(bool(rates) and not failed, f"{engines}; {told}; {failed:.0f} failed")


def _machine() -> Machine:
    """The house's own view of it. Raises NotMeasurable where there is no GPU."""
    from convoy.app.engines.machine import find_machine

    machine = find_machine()
    if not machine.gpus:
        raise NotMeasurable(machine.no_gpu)
    return machine
