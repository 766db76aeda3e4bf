"""ONNX Runtime's CUDA graphs: whether they answer right when all are captured, and what disturbs a capture."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from tests.gpu.proof.experiment import Bench, Judgement, Ran
from tests.gpu.proof.experiments import networks
from tests.gpu.proof.experiments.captures import MODES
from tests.gpu.proof.experiments.cudart import Runtime, open_runtime
from tests.gpu.proof.experiments.sessions import CAPTURING_RUNS, Way, load_onnxruntime, opened, relative_error

_LAPS = 3
_NBYTES = 8 << 20


def replay_after_captures(bench: Bench, precision: str, sizes: list[int], **network: Any) -> None:
    """Every size is captured, then all are replayed again and again, and answer as plain runs of another session do.

    The provider's arena gives a later capture what an earlier one has given back: a graph that still wrote there
    would spoil another's answers.
    """
    runtime, ort = open_runtime(), load_onnxruntime()
    bench.step("writing the network")
    model = networks.resnet(bench.folder / "network.onnx", half=precision == "fp16", **network)
    batch = networks.pictures(max(sizes), network.get("side", 224))
    expected = {}
    with opened(runtime, ort, model, Way()) as plain:
        for size in sizes:
            bench.step(f"plain batch {size}")
            plain.bind(batch[:size])
            expected[size] = plain.answer(size)
    with opened(runtime, ort, model, Way(graphs=True)) as session:
        for size in sizes:
            bench.step(f"capturing batch {size}")
            session.bind(batch[:size])
            session.settle(size)
        for lap in range(_LAPS):
            for size in (*sizes, *reversed(sizes)):
                bench.step(f"lap {lap} batch {size}")
                error = relative_error(session.answer(size), expected[size])
                bench.figure(f"lap {lap} batch {size}: error", error)


def judge_replays(ran: Ran) -> Judgement:
    """Every replay answers as plain runs do, to rounding."""
    errors = [error for name, error in ran.figures.items() if name.endswith(": error")]
    return Judgement.of(max(errors) < 5e-3, f"{len(errors)} batches replayed, worst error {max(errors):.1e}")


# What a loader or a collector may do in another thread while the provider captures.
_DISTURBANCES: Mapping[str, Callable[[Runtime], None]] = {
    "cudaDeviceSynchronize": lambda runtime: _ignore(runtime.status("cudaDeviceSynchronize")),
    "cudaMalloc and cudaFree": lambda runtime: _take_and_give(runtime),
}


def disturbed_captures(bench: Bench, attempts: int, **network: Any) -> None:
    """A session is opened and captures while another thread never stops to disturb; how often does it fail?

    `alone` first: what fails there is not the disturber's doing.
    """
    runtime, ort = open_runtime(), load_onnxruntime()
    model = networks.resnet(bench.folder / "network.onnx", half=False, **network)
    batch = networks.pictures(1, network.get("side", 224))
    ways: list[tuple[str, Callable[[Runtime], None] | None, str]] = [("alone", None, "global")]
    ways += [(name, deed, mode) for name, deed in _DISTURBANCES.items() for mode in ("global", "thread-local")]
    for name, deed, mode in ways:
        where = name if deed is None else f"{name}, thread {mode}"
        failed = 0
        for attempt in range(attempts):
            bench.step(f"{where}, attempt {attempt + 1}")
            with opened(runtime, ort, model, Way(graphs=True)) as session:
                session.bind(batch)
                for _ in range(CAPTURING_RUNS - 1):
                    session.run_ms(1)
                disturber = _Disturber(runtime, deed, mode)
                try:
                    session.run_ms(1)
                except Exception as error:  # onnxruntime's errors share no base class
                    failed += 1
                    bench.fact(f"{where}: error", error)
                finally:
                    disturber.stop()
        bench.figure(f"{where}: failed of {attempts}", failed)


class _Disturber:
    """A thread that does it again and again until it is stopped; none where there is nothing to do."""

    def __init__(self, runtime: Runtime, deed: Callable[[Runtime], None] | None, mode: str) -> None:
        self._is_over, self._is_running = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._disturb, args=(runtime, deed, mode), daemon=True)
        if deed is not None:
            self._thread.start()
            self._is_running.wait()

    def _disturb(self, runtime: Runtime, deed: Callable[[Runtime], None], mode: str) -> None:
        runtime.cudaSetDevice(0)
        runtime.cudaThreadExchangeStreamCaptureMode(getattr(runtime.module.cudaStreamCaptureMode, MODES[mode]))
        while not self._is_over.is_set():
            deed(runtime)
            self._is_running.set()

    def stop(self) -> None:
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join()


def _take_and_give(runtime: Runtime) -> None:
    status, address = runtime.module.cudaMalloc(_NBYTES)
    if not int(status):
        runtime.status("cudaFree", address)


def _ignore(status: int) -> None:
    """It may fail; whether the capture does is the question."""


def judge_disturbed(ran: Ran) -> Judgement:
    """Alone nothing fails, under waits for the device something does, under allocations of a thread-local one not."""
    failed = {name.rpartition(":")[0]: count for name, count in ran.figures.items() if "failed of" in name}
    told = "; ".join(f"{name}: {count:.0f}" for name, count in failed.items())
    by_waits = sum(count for name, count in failed.items() if name.startswith("cudaDeviceSynchronize"))
    quiet = failed["alone"] == 0 and failed["cudaMalloc and cudaFree, thread thread-local"] == 0
    return Judgement.of(quiet and by_waits > 0, f"captures that failed: {told}")
