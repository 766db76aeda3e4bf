"""TensorRT for RTX as the experiments ask it: what is built, what it says, and who runs in turns with whom.

Plans are made by the house's builder, which needs no GPU; `rtx_opened` runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convoy.app.engines.tensorrt_library import RTX, TensorRt, collecting_logger, load_builder
from convoy.export.tensorrt.engine import tune
from convoy.export.tensorrt.watch import BuildWatch
from convoy.models.errors import JobError
from convoy.models.plans import BuildOptions, Profiles
from tests.gpu.proof.experiment import NotMeasurable
from tests.gpu.proof.experiments.cudart import CudaError, Runtime, open_runtime

_BUILD_LIMIT_S = 90.0


class Refused(Exception):
    """The library does not do it; the message is what its log says."""


# What costs one row and not the experiment: there may be no room, too.
FAILURES = (Refused, CudaError)


@dataclass(frozen=True, slots=True)
class Way:
    """What is asked about. `captures`: who records graphs: own, library or nobody."""

    specialisation: str = "EAGER"
    captures: str = "own"


@dataclass(frozen=True, slots=True)
class Built:
    """A plan, and how its batch sizes went into it."""

    data: bytes = field(repr=False)
    sizes: tuple[int, ...]
    profiles: Profiles
    build_s: float


class Library:
    """One of the two libraries on the first GPU, with one log for all. Raises NotMeasurable where either is missing."""

    def __init__(self, library: TensorRt = RTX) -> None:
        self.runtime: Runtime = open_runtime()
        try:
            self.trt: Any = load_builder(library)
        except JobError as error:
            raise NotMeasurable(f"{error}; CARRY=DIR can bring it along") from error
        self.name = f"{library.title} {self.trt.__version__}"
        self.logger = collecting_logger(self.trt)
        free_bytes(self.runtime)  # the first call makes the device's context, which is nobody's time

    @property
    def capability(self) -> str:
        found = self.runtime.cudaGetDeviceProperties(0)
        return f"{found.major}.{found.minor}"

    def said(self) -> str:
        """What the library has complained of since it was last asked."""
        found = "; ".join(dict.fromkeys([*self.logger.errors, *self.logger.warnings]))
        self.logger.errors.clear()
        self.logger.warnings.clear()
        return found or "nothing"

    def build(
        self, onnx: Path, sizes: Sequence[int], profiles: Profiles = "range", capabilities: tuple[str, ...] = ()
    ) -> Built:
        """Raises Refused."""
        # What it computes in stands in the graph; the name is for an audit that is not made here.
        options, watch = BuildOptions("fp32", tuple(sizes), profiles=profiles), _silent_watch()
        try:
            tuned = tune(self.trt, onnx, options, capabilities, b"", watch)
        except JobError as error:
            raise Refused(str(error)) from error
        if tuned.data is None:
            raise Refused(tuned.problem)
        return Built(tuned.data, options.batch_sizes, profiles, watch.elapsed_s)

    def validity(self, plan: Built) -> str:
        """What the library says of a plan before it is loaded."""
        try:
            verdict, reasons = self.trt.Runtime(self.logger).get_engine_validity(plan.data)
        except Exception as error:  # not every library can be asked
            return f"cannot be asked ({type(error).__name__})"
        return f"{getattr(verdict, 'name', verdict)}, reasons {reasons}, it says {self.said()}"


def free_bytes(runtime: Runtime) -> int:
    """Of the device's memory."""
    return int(runtime.cudaMemGetInfo()[0])


def in_turns_ms(runs: dict[str, tuple[Any, int]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every run of each (something with run_ms, size), one after the other, round by round."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds):
        # Every other round goes backwards: nobody always runs in the wake of the same one.
        for name in runs if index % 2 == 0 else reversed(runs):
            one, size = runs[name]
            found[name].append(one.run_ms(size))
    return found


def _silent_watch() -> BuildWatch:
    return BuildWatch(lambda event: None, _BUILD_LIMIT_S)
