"""The table of engines, one row each. A new engine is a file beside this one and a row here.

Loading walks the rows over the devices and a model's variants, `convoy doctor` shows them, and export verifies and
measures through them. A row that is passed over leaves its reason for the log, `/stats`, the metrics and the doctor.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from convoy.app.engines import cpu
from convoy.app.engines.base import Engine
from convoy.app.engines.jobs import Job, OpenEngine, Place, PlanRequest, TuningCandidate
from convoy.app.engines.machine import Machine
from convoy.app.engines.onnxruntime import LIBRARY, OnnxRuntimeCpuEngine
from convoy.app.engines.onnxruntime_tuned import left_to_tune, open_tuned, ways_as_it_comes
from convoy.app.engines.openvino import OpenVinoEngine, library_of, version_of
from convoy.app.engines.plans import open_plan, wish_for_plan
from convoy.app.engines.staged import StagedEngine
from convoy.app.engines.tensorrt_library import RTX, TENSORRT, TensorRt
from convoy.models.bundle import Target, Variant
from convoy.models.checkout import pip_install
from convoy.models.errors import BundleError

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether an engine can run here; `reason` says why not, or what it would use."""

    engine: str
    runner: str
    usable: bool
    reason: str


# Checks whether an engine can run on a machine.
ProbeMachine = Callable[[Machine], tuple[bool, str]]
# Opens a variant on a device. Raises NotProved, BundleError or EngineFailure.
Open = Callable[[Job, Variant, Place], Engine]
# Ways to open a variant that can serve before `Open` can, best first. Raises JobError or OSError.
Sooner = Callable[[Job, Variant, Place], tuple[OpenEngine, ...]]
# What would serve a variant better on a GPU later. The last argument says whether the row has opened it; None: it was
# not tried.
AfterLoad = Callable[[Job, Variant, Place, bool | None], PlanRequest | TuningCandidate | None]


@dataclass(frozen=True, slots=True)
class Row:
    """One engine: `name` as in its `EngineInfo`, `runner` as in --engine.

    It takes fp32 and variants made for `targets`. Rows of one `rank` are measured against each other; those of a lower
    rank are preferred. What it offers `sooner` is tried before `open`. `platform` is the protocol's name. A row that
    `holds_to_canary` refuses models without one. `library` returns the library and its version on a machine, as in its
    engines' fingerprint; None if export does not measure them.
    """

    name: str
    runner: str
    rank: int
    targets: tuple[Target, ...]
    platform: str
    probe: ProbeMachine
    open: Open
    after_load: AfterLoad | None = None
    sooner: Sooner | None = None
    holds_to_canary: bool = False
    library: Callable[[Machine], str] | None = None

    @property
    def is_on_gpus(self) -> bool:
        return self.rank < _ON_CPU

    def takes(self, variant: Variant) -> bool:
        """Whether the variant was made for this engine, or is fp32."""
        return variant.precision == "fp32" or variant.target in self.targets

    def fingerprint(self, machine: Machine, threads: int) -> str:
        """The device on which its engines' latencies are valid; empty if export does not measure them."""
        return cpu.fingerprint(threads, self.library(machine)) if self.library is not None else ""


def _open_on_cpu(engine: type[StagedEngine], job: Job, variant: Variant, place: Place) -> Engine:
    return engine(
        job.path(variant),
        inputs=job.spec.inputs,
        outputs=job.spec.outputs,
        max_batch_size=job.max_batch_size,
        precision=variant.precision,
        threads=job.threads,
    )


def _probe_plans(library: TensorRt, machine: Machine) -> tuple[bool, str]:
    found = machine.runs(library)
    if not machine.gpus or found.module is None:
        return False, found.reason if machine.gpus else machine.no_gpu
    return True, f"{library.title} {found.module.__version__} on {_gpu_names(machine)}"


def _probe_cuda(machine: Machine) -> tuple[bool, str]:
    if not machine.gpus or machine.onnxruntime.module is None:
        return False, machine.onnxruntime.reason if machine.gpus else machine.no_gpu
    without = [why for why in map(machine.why_no_code, machine.gpus) if why]
    if len(without) == len(machine.gpus):
        return False, without[0]
    return True, "; but ".join((_gpu_names(machine), *dict.fromkeys(without)))


def _probe_cpu(machine: Machine) -> tuple[bool, str]:
    if importlib.util.find_spec("onnxruntime") is None:
        return False, f"onnxruntime is not installed; run {pip_install('cpu')}"
    return True, _cores()


def _probe_openvino(machine: Machine) -> tuple[bool, str]:
    module = machine.openvino.module
    return (False, machine.openvino.reason) if module is None else (True, f"OpenVINO {version_of(module)}, {_cores()}")


def _cores() -> str:
    return f"{cpu.cpu_budget()} cores of {cpu.cpu_model()}"


def _gpu_names(machine: Machine) -> str:
    return ", ".join(gpu.properties.name for gpu in machine.gpus)


def _plans(library: TensorRt, rank: int) -> Row:
    return Row(
        *(library.name, library.engine, rank, ("cuda", "tensorrt"), "tensorrt_plan"),
        *(partial(_probe_plans, library), partial(open_plan, library), partial(wish_for_plan, library)),
        holds_to_canary=True,
    )


_PLANS, _GPU, _ON_CPU = range(3)
# The reference: everything else that runs a model is compared with it.
REFERENCE = Row(
    *("onnxruntime-cpu", "cpu", _ON_CPU, ("cpu",), "onnxruntime_onnx"),
    *(_probe_cpu, partial(_open_on_cpu, OnnxRuntimeCpuEngine)),
    library=lambda machine: LIBRARY,
)
# In the order in which they are tried and shown.
ROWS = (
    _plans(RTX, _PLANS),
    _plans(TENSORRT, _PLANS),
    Row(
        *("onnxruntime-cuda", "cuda", _GPU, ("cuda",), "onnxruntime_onnx"),
        *(_probe_cuda, open_tuned, left_to_tune, ways_as_it_comes),
    ),
    REFERENCE,
    Row(
        *("openvino", "openvino", _ON_CPU, ("cpu", "openvino"), "openvino"),
        *(_probe_openvino, partial(_open_on_cpu, OpenVinoEngine)),
        library=lambda machine: library_of(machine.openvino.module),
    ),
)
CHOICES = (AUTO, *(row.runner for row in ROWS))


def may_use_gpus(runner: str) -> bool:
    """Whether `--engine` allows GPUs."""
    return any(row.is_on_gpus for row in ROWS if runner in (AUTO, row.runner))


def row_named(engine: str) -> Row:
    """The row of an open engine."""
    return next(row for row in ROWS if row.name == engine)


def availabilities(machine: Machine) -> tuple[Availability, ...]:
    """Every engine that Convoy knows, and whether it can run here."""
    return tuple(Availability(row.name, row.runner, *row.probe(machine)) for row in ROWS)


def rows_for(machine: Machine, engine: str) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    """The rows to try, and why the others are passed over.

    Raises BundleError if the requested one cannot run here.
    """
    everything = [(row, *row.probe(machine)) for row in ROWS if engine in (AUTO, row.runner)]
    if engine == AUTO:
        unusable = tuple(f"{row.name}: {reason}" for row, usable, reason in everything if not usable)
        return tuple(row for row, usable, _ in everything if usable), unusable
    ((row, usable, reason),) = everything
    if not usable:
        raise BundleError(f"--engine {engine}: {reason}; or use --engine auto")
    return (row,), (f"every engine except {row.name}: --engine {engine}",)
