"""What TensorRT for RTX shares a process with: TensorRT itself, contexts of its plan, another engine's captures."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from convoy.app.engines.tensorrt_library import RTX, TENSORRT, TensorRt
from tests.gpu.proof.experiment import Bench, Judgement, Ran
from tests.gpu.proof.experiments import networks
from tests.gpu.proof.experiments.captures import MODES
from tests.gpu.proof.experiments.rtx import FAILURES, Built, Library, Way, free_bytes
from tests.gpu.proof.experiments.rtx_opened import opened
from tests.gpu.proof.experiments.sessions import load_cpu_onnxruntime, on_cpu, relative_error

_MOST_ERROR = 1e-2


def both_libraries(bench: Bench, size: int, **network: Any) -> None:
    """The one builds and runs a network, then the other, then the one again, and all stay open."""
    rtx, tensorrt = Library(RTX), Library(TENSORRT)
    bench.fact("libraries", f"{rtx.name} and {tensorrt.name}")
    model = networks.resnet_in("fp32", bench.folder, **network)
    batch = networks.pictures(size, network.get("side", 224))
    expected = _expected(model, batch)
    pairs: tuple[tuple[str, Library, TensorRt], ...] = (
        ("rtx", rtx, RTX),
        ("tensorrt", tensorrt, TENSORRT),
        ("rtx again", rtx, RTX),
    )
    with ExitStack() as owned:
        for name, library, kind in pairs:
            bench.step(f"{name}: building and running")
            plan = library.build(model, [size], kind.profiles)
            one = owned.enter_context(opened(library, plan))  # all of them stay open
            one.settle(one.bind(batch))
            bench.figure(f"{name}: error", relative_error(one.answer(size), expected))
            bench.fact(f"{name}: it says", library.said())


def judge_both(ran: Ran) -> Judgement:
    """All answer right."""
    errors = {name.partition(":")[0]: error for name, error in ran.figures.items() if name.endswith(": error")}
    told = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    is_expected = len(errors) == 3 and max(errors.values()) < _MOST_ERROR
    return Judgement.of(is_expected, f"{ran.facts['libraries']} in one process: {told}")


def contexts(bench: Bench, sizes: list[int], each: int, **network: Any) -> None:
    """Several contexts of one profile and size, all on one block of scratch memory, and what each of them takes."""
    library = Library()
    bench.step("writing the network")
    networks.resnet_in("fp32", bench.folder, **network)
    model = networks.resnet_in("fp16", bench.folder, **network)
    batch = networks.pictures(max(sizes), network.get("side", 224))
    expected = _expected(bench.folder / "fp32.onnx", batch)
    plan = library.build(model, sizes)
    for size in sizes:
        bench.step(f"{each} contexts for batch {size}")
        with opened(library, plan, Way(captures="nobody")) as one:
            left = [free_bytes(library.runtime)]
            for key in range(each):
                one.settle(one.bind(batch[:size], key))
                left.append(free_bytes(library.runtime))
            errors = [relative_error(one.answer(key), expected[:size]) for key in range(each)]
            own = sum(samples.nbytes for samples in (batch[:size], expected[:size]))
            taken = [before - after - own for before, after in pairwise(left)]
            bench.figure(f"batch {size}: worst error", max(errors))
            bench.figure(f"batch {size}: first context MB", taken[0] / 1e6)
            bench.figure(f"batch {size}: a further context MB", median(taken[1:]) / 1e6)
    bench.figure("scratch MB", one.scratch_bytes / 1e6)


def judge_contexts(ran: Ran) -> Judgement:
    """All of them answer right, and a further one takes less than a tenth of a gigabyte."""
    errors = [error for name, error in ran.figures.items() if name.endswith("worst error")]
    further = [value for name, value in ran.figures.items() if name.endswith("a further context MB")]
    told = ", ".join(f"{name} {value:.1f}" for name, value in ran.figures.items() if name.endswith("MB"))
    is_expected = max(errors) < _MOST_ERROR and max(further) < 100
    return Judgement.of(is_expected, f"worst error {max(errors):.1e}; {told}")


def capture_beside(bench: Bench, size: int, rounds: int, **network: Any) -> None:
    """One plan's graph is captured again and again while a thread opens contexts of another, which compile."""
    library = Library()
    bench.step("writing the network")
    networks.resnet_in("fp32", bench.folder, **network)
    model = networks.resnet_in("fp16", bench.folder, **network)
    batch = networks.pictures(size, network.get("side", 224))
    plan = library.build(model, [size])
    other = library.build(bench.folder / "fp32.onnx", [1])
    for mode in ("thread-local", "global"):
        bench.step(f"thread {mode}")
        with opened(library, other) as capturing:
            capturing.settle(capturing.bind(batch[:1]))
            expected = capturing.answer(1)
            compiling = _Compiling(library, plan, batch, mode, rounds)
            failed, captures = 0, 0
            while compiling.is_at_work() or not captures:
                captures += 1
                try:
                    capturing.capture(1)
                    failed += relative_error(capturing.answer(1), expected) > _MOST_ERROR
                except FAILURES as error:
                    failed += 1
                    bench.fact(f"thread {mode}: capture", error)
                    library.runtime.status("cudaGetLastError")
            bench.figure(f"thread {mode}: captures", captures)
            bench.figure(f"thread {mode}: captures failed", failed)
            bench.figure(f"thread {mode}: contexts", compiling.done)
            bench.figure(f"thread {mode}: contexts failed", rounds - compiling.done)
            if compiling.said:
                bench.fact(f"thread {mode}: context", compiling.said)


class _Compiling:
    """A thread that opens the plan from nothing, again and again."""

    def __init__(self, library: Library, plan: Built, batch: np.ndarray, mode: str, rounds: int) -> None:
        self.done, self.said = 0, ""
        self._library, self._plan, self._batch = library, plan, batch
        self._thread = threading.Thread(target=self._work, args=(mode, rounds), daemon=True)
        self._thread.start()

    def is_at_work(self) -> bool:
        return self._thread.is_alive()

    def _work(self, mode: str, rounds: int) -> None:
        runtime = self._library.runtime
        runtime.cudaSetDevice(0)
        runtime.cudaThreadExchangeStreamCaptureMode(getattr(runtime.module.cudaStreamCaptureMode, MODES[mode]))
        for _ in range(rounds):
            try:
                with opened(self._library, self._plan, Way(captures="nobody")) as one:
                    one.settle(one.bind(self._batch))
                self.done += 1
            except FAILURES as error:
                self.said = str(error)


def judge_capture_beside(ran: Ran) -> Judgement:
    """Neither disturbs the other where the thread's own mode is thread-local, as the server's is."""
    wrong = ran.figures["thread thread-local: captures failed"] + ran.figures["thread thread-local: contexts failed"]
    told = ", ".join(f"{name} {value:.0f}" for name, value in ran.figures.items())
    why = "; ".join(f"{name}: {text[:150]}" for name, text in ran.facts.items())
    is_expected = not wrong and ran.figures["thread thread-local: contexts"] > 0
    return Judgement.of(is_expected, f"{told}{'; ' if why else ''}{why}")


def _expected(model: Path, batch: np.ndarray) -> np.ndarray:
    return on_cpu(load_cpu_onnxruntime(), model, batch)
