"""The choices that the house makes for TensorRT for RTX, each against its alternatives: when kernels are compiled for a
size, how sizes go into a plan, and who records graphs.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from statistics import median
from typing import Any

import numpy as np

from convoy.models.plans import Profiles
from tests.gpu.proof.experiment import Bench, Judgement, Ran
from tests.gpu.proof.experiments import networks
from tests.gpu.proof.experiments.rtx import FAILURES, Built, Library, Way, free_bytes, in_turns_ms
from tests.gpu.proof.experiments.rtx_opened import Opened, opened

STRATEGIES = ("EAGER", "LAZY", "NONE")
CAPTURES = ("own", "library", "nobody")
PROFILES: tuple[Profiles, ...] = ("range", "each")
_FIRST_RUNS = 5


def specialisation(bench: Bench, sizes: list[int], rounds: int, settling_s: float, **network: Any) -> None:
    """Without graphs, which would keep whatever kernels were there when they were captured."""
    library, plan, batch = _prepared(bench, sizes, network)
    for strategy in STRATEGIES:
        bench.step(strategy)
        with opened(library, plan, Way(strategy, "nobody")) as one:
            for size in sizes:
                one.bind(batch[:size])
                first_ms, *next_ms = [one.run_ms(size) for _ in range(_FIRST_RUNS)]
                where = f"{strategy} batch {size}"
                bench.figure(f"{where}: context ms", one.took[f"context {size}"] * 1e3)
                bench.figure(f"{where}: first ms", first_ms)
                bench.figure(f"{where}: next ms", median(next_ms))
                bench.figure(f"{where}: settled after ms", _settle(one, size, settling_s))
                bench.figure(f"{where}: ms", one.median_ms(size, rounds))
            bench.figure(f"{strategy}: kernels MB", len(one.kernels()) / 1e6)


def _settle(one: Opened, size: int, settling_s: float) -> float:
    """Runs for so long; gives when the last one began that took a quarter longer than the fastest."""
    runs_ms: list[tuple[float, float]] = []
    began_s = time.perf_counter()
    while not runs_ms or time.perf_counter() < began_s + settling_s:
        at_ms = (time.perf_counter() - began_s) * 1e3
        runs_ms.append((at_ms, one.run_ms(size)))
    fastest_ms = min(ms for _, ms in runs_ms)
    return max((at_ms for at_ms, ms in runs_ms if ms > 1.25 * fastest_ms), default=0.0)


def judge_specialisation(ran: Ran) -> Judgement:
    """Eager is as fast as lazy when that has settled; none is slower somewhere; lazy is slow at first."""
    sizes = _sizes(ran)
    times = {one: [ran.figures[f"{one} batch {size}: ms"] for size in sizes] for one in STRATEGIES}
    lazy, none = (_ratios(times[one], times["EAGER"]) for one in ("LAZY", "NONE"))
    first = {one: sum(_first_ms(ran, one, size) for size in sizes) for one in STRATEGIES}
    told = (
        f"of eager's time at batch {', '.join(map(str, sizes))}: lazy {_listed(lazy)}, none {_listed(none)}; contexts "
        f"and first batches take {', '.join(f'{ms:.0f} ms {one.lower()}' for one, ms in first.items())}"
    )
    return Judgement.of(min(lazy) > 0.9 and max(lazy) < 1.1 and max(none) > 1.03, told)


def _first_ms(ran: Ran, strategy: str, size: int) -> float:
    return ran.figures[f"{strategy} batch {size}: context ms"] + ran.figures[f"{strategy} batch {size}: first ms"]


def profiles(bench: Bench, sizes: list[int], rounds: int, **network: Any) -> None:
    """One dynamic profile for all sizes against a static one for each, both with graphs of our own."""
    library, _, batch = _prepared(bench, sizes, network)
    with ExitStack() as owned:
        running: dict[str, Opened] = {}
        for how in PROFILES:
            bench.step(f"a plan with {how}")
            plan = library.build(bench.folder / "fp16.onnx", sizes, how)
            bench.figure(f"{how}: build s", plan.build_s)
            bench.figure(f"{how}: plan MB", len(plan.data) / 1e6)
            before, began_s = free_bytes(library.runtime), time.perf_counter()
            running[how] = one = owned.enter_context(opened(library, plan))
            for size in sizes:
                one.bind(batch[:size])
                one.settle(size)
            bench.figure(f"{how}: start s", time.perf_counter() - began_s)
            bench.figure(f"{how}: device MB", (before - free_bytes(library.runtime)) / 1e6)
            bench.figure(f"{how}: scratch MB", one.scratch_bytes / 1e6)
            bench.figure(f"{how}: kernels MB", len(one.kernels()) / 1e6)
        for size in sizes:
            bench.step(f"batch {size} in turns")
            taken = in_turns_ms({how: (one, size) for how, one in running.items()}, rounds)
            for how, runs_ms in taken.items():
                bench.figure(f"{how} batch {size}: ms", median(runs_ms))


def judge_profiles(ran: Ran) -> Judgement:
    """One for all is as fast to a twentieth, and its plan is smaller."""
    sizes = _sizes(ran)
    whole, each = ([ran.figures[f"{how} batch {size}: ms"] for size in sizes] for how in PROFILES)
    ratios = _ratios(whole, each)
    told = [f"{name} {ran.figures[f'range: {name}']:.1f} against {ran.figures[f'each: {name}']:.1f}" for name in _TOLD]
    return Judgement.of(
        max(ratios) < 1.05 and ran.figures["range: plan MB"] < ran.figures["each: plan MB"],
        f"one for all takes {_listed(ratios)} of the time of one for each at batch {', '.join(map(str, sizes))}; "
        f"{', '.join(told)}",
    )


_TOLD = ("plan MB", "start s", "device MB", "kernels MB")


def graphs(bench: Bench, sizes: list[int], rounds: int, **network: Any) -> None:
    """Who records them, in turns."""
    library, plan, batch = _prepared(bench, sizes, network)
    with ExitStack() as owned:
        running: dict[str, Opened] = {}
        for captures in CAPTURES:
            bench.step(f"graphs by {captures}")
            try:
                one = owned.enter_context(opened(library, plan, Way(captures=captures)))
                for size in sizes:
                    one.bind(batch[:size])
                    one.settle(size)
            except FAILURES as reason:
                bench.fact(f"{captures}: refused", reason)
            else:
                running[captures] = one
        for size in sizes:
            bench.step(f"batch {size} in turns")
            for captures, runs_ms in in_turns_ms({name: (one, size) for name, one in running.items()}, rounds).items():
                bench.figure(f"{captures} batch {size}: ms", median(runs_ms))


def judge_graphs(ran: Ran) -> Judgement:
    """Ours are as fast as the library's, and faster than none for a single sample."""
    sizes = _sizes(ran)
    times = {one: [ran.figures[f"{one} batch {size}: ms"] for size in sizes] for one in CAPTURES}
    theirs, none = (_ratios(times[one], times["own"]) for one in ("library", "nobody"))
    told = f"of the time with our own, at batch {', '.join(map(str, sizes))}: "
    told += f"the library's {_listed(theirs)}, none {_listed(none)}"
    return Judgement.of(min(theirs) > 0.95 and none[0] > 1.05, told)


# What they share


def _prepared(bench: Bench, sizes: list[int], network: dict[str, Any]) -> tuple[Library, Built, np.ndarray]:
    """The library, the network in FP16 as a plan for all sizes, and the largest batch."""
    library = Library()
    bench.step("writing the network")
    model = networks.resnet_in("fp16", bench.folder, **network)
    return library, library.build(model, sizes), networks.pictures(max(sizes), network.get("side", 224))


def _sizes(ran: Ran) -> list[int]:
    return sorted({int(name.split(" batch ")[1].partition(":")[0]) for name in ran.figures if " batch " in name})


def _ratios(times: list[float], others: list[float]) -> list[float]:
    return [one / other for one, other in zip(times, others, strict=True)]


def _listed(numbers: list[float]) -> str:
    return ", ".join(f"{number:.2f}" for number in numbers)
