"""The engines that may be here: one row each, with what is missing where one is not.

Knows how each is opened for a network of the proof. Extension: one more maker in `find_kinds`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from convoy.app.engines.base import Engine
from convoy.app.engines.cuda.trials import best_of, try_all
from convoy.app.engines.machine import Machine
from convoy.app.engines.measure import make_probe
from convoy.app.engines.onnxruntime_cuda import ConvolutionTuning, OnnxRuntimeCudaEngine
from convoy.app.engines.onnxruntime_tuned import OpenTrial
from convoy.app.engines.tensorrt import Captures, TensorRtEngine
from convoy.app.engines.tensorrt_contexts import Kernels
from convoy.app.engines.tensorrt_library import RTX as RTX_LIBRARY
from convoy.export.tensorrt.build import BuildJob, build_plan
from convoy.export.tensorrt.library import resolve_target
from convoy.export.tensorrt.watch import BuildWatch
from convoy.models.bundle import Precision
from convoy.models.errors import JobError
from convoy.models.plans import BuildOptions, Gpu, Plan, tensorrt_target
from tests.gpu.proof.budget import Budget
from tests.gpu.proof.grid import Opening
from tests.gpu.proof.subjects import NotMade, Subject
from tests.gpu.proof.targets import ONNXRUNTIME, RTX, TENSORRT, TORCH
from tests.gpu.proof.torch_engine import TorchEngine, prepare_torch, with_front

_PLAN_LIMIT_S = 90.0
_TRIED_AT, _TRIAL_ROUNDS = 32, 7
Open = Callable[[Subject, Opening, tuple[int, ...]], Engine]
BuildPlan = Callable[[BuildJob, Any, BuildWatch], Plan]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of engine. `missing` says why it is not here; then `open` is never called.

    `open` raises BundleError, EngineFailure, JobError or NotMade.
    """

    name: str
    precisions: tuple[Precision, ...]
    missing: str
    open: Open


def find_kinds(
    machine: Machine, plans: Path, budget: Budget, build: BuildPlan, find_torch: Callable[[], Any]
) -> list[Kind]:
    """All of them, best first; plans are built into `plans` when they are wanted."""
    return [
        _tensorrt(machine, plans, budget, build),
        _rtx(machine, plans, budget, build),
        _onnxruntime(machine),
        _torch(machine, find_torch),
    ]


def _file(subject: Subject, precision: Precision) -> Path:
    if precision not in subject.files:
        raise NotMade(f"{subject.name} has no {precision} graph")
    return subject.files[precision]


def _tensorrt(machine: Machine, plans: Path, budget: Budget, build: BuildPlan) -> Kind:
    library = machine.tensorrt

    def open_one(subject: Subject, opening: Opening, sizes: tuple[int, ...]) -> Engine:
        device = machine.gpus[0]
        gpu = Gpu(device.properties.name, device.properties.compute_capability)
        options = BuildOptions(opening.precision, sizes)
        target = tensorrt_target(library.module.__version__, gpu, options)
        job = BuildJob(_file(subject, opening.precision), plans, options, target, gpu.name)
        limit_s = min(_PLAN_LIMIT_S, budget.left_s)
        return TensorRtEngine(
            build(job, library.module, BuildWatch(lambda event: None, limit_s)),
            device,
            library.module,
            inputs=subject.spec.inputs,
            outputs=subject.spec.outputs,
            batched=True,
            captures="own" if opening.graphs else "nobody",
            slots=opening.slots,
        )

    return Kind(TENSORRT, ("fp16", "fp32", "int8"), library.reason, open_one)


def _rtx(machine: Machine, plans: Path, budget: Budget, build: BuildPlan) -> Kind:
    """As a server opens it: a portable plan with one profile, kernels that are kept, and the faster one's graphs."""
    library = machine.rtx
    known: dict[Path, Captures] = {}

    def open_one(subject: Subject, opening: Opening, sizes: tuple[int, ...]) -> Engine:
        model = _file(subject, opening.precision)
        options = BuildOptions(opening.precision, sizes, profiles=RTX_LIBRARY.profiles)
        target = resolve_target(RTX_LIBRARY, library.module, (), options, None)
        job = BuildJob(model, plans, options, target, "")
        plan = build(job, library.module, BuildWatch(lambda event: None, min(_PLAN_LIMIT_S, budget.left_s)))

        def open_as(captures: Captures, slots: int) -> TensorRtEngine:
            return TensorRtEngine(
                plan,
                machine.gpus[0],
                library.module,
                inputs=subject.spec.inputs,
                outputs=subject.spec.outputs,
                batched=True,
                captures=captures,
                kernels=Kernels(plans / f"{subject.name}-{opening.precision}.kernels"),
                slots=slots,
            )

        if not opening.graphs:
            return open_as("nobody", opening.slots)
        if model not in known:
            known[model] = _faster_captures(lambda way, trial_sizes: open_as(way, 1), sizes)
        return open_as(known[model], opening.slots)

    return Kind(RTX, ("fp16", "fp32", "int8", "fp8"), library.reason, open_one)


def _faster_captures(
    open_trial: Callable[[Captures, tuple[int, ...]], TensorRtEngine], sizes: tuple[int, ...]
) -> Captures:
    """Whose graphs are faster. Raises what the last way was refused with where none runs."""
    ways: tuple[Captures, ...] = ("own", "library")
    tried, problem = try_all(open_trial, ways, (sizes[0], min(_TRIED_AT, sizes[-1])))
    if not tried:
        assert problem is not None
        raise problem
    return best_of(tried)


def _onnxruntime(machine: Machine) -> Kind:
    library = machine.onnxruntime
    known: dict[Path, ConvolutionTuning] = {}

    def open_one(subject: Subject, opening: Opening, sizes: tuple[int, ...]) -> Engine:
        model = _file(subject, opening.precision)

        def open_as(tuning: ConvolutionTuning, sizes: tuple[int, ...], slots: int) -> OnnxRuntimeCudaEngine:
            return OnnxRuntimeCudaEngine(
                model,
                machine.gpus[0],
                library.module,
                inputs=subject.spec.inputs,
                outputs=subject.spec.outputs,
                batch_sizes=sizes,
                batched=True,
                precision=opening.precision,
                tuning=tuning,
                slots=slots,
            )

        if model not in known:
            tried = (ConvolutionTuning("HEURISTIC", nhwc, graphs=False) for nhwc in (True, False))
            known[model] = _fastest(lambda way, size: open_as(way, (size,), 1), tried, min(_TRIED_AT, sizes[-1]))
        return open_as(replace(known[model], graphs=opening.graphs), sizes, opening.slots)

    return Kind(ONNXRUNTIME, ("fp16", "fp32"), library.reason, open_one)


def _fastest(open_trial: OpenTrial, ways: Iterable[ConvolutionTuning], size: int) -> ConvolutionTuning:
    """The faster layout. A server also tries cuDNN's exhaustive search, which for every session takes too long here."""

    def time_ms(way: ConvolutionTuning) -> float:
        engine = open_trial(way, size)
        try:
            engine.warm_up()
            probe = make_probe(engine, size)
            return median(probe.run_ms() for _ in range(_TRIAL_ROUNDS))
        finally:
            engine.close()

    return min(ways, key=time_ms)


def _torch(machine: Machine, find_torch: Callable[[], Any]) -> Kind:
    try:
        torch, missing = find_torch(), ""
    except NotMade as reason:
        torch, missing = None, str(reason)
    fronts: dict[tuple[str, Precision], Any] = {}

    def open_one(subject: Subject, opening: Opening, sizes: tuple[int, ...]) -> Engine:
        key = subject.name, opening.precision
        if key not in fronts:
            own = deepcopy(subject.make_network())
            fronts[key] = with_front(torch, own, subject.spec, opening.precision).to(machine.gpus[0].name)
        return TorchEngine(
            fronts[key],
            machine.gpus[0],
            torch,
            subject.spec,
            batch_sizes=sizes,
            precision=opening.precision,
            graphs=opening.graphs,
            slots=opening.slots,
        )

    return Kind(TORCH, ("fp16", "fp32"), missing, open_one)


def torch_on_gpu() -> Any:
    """torch, ready to compute on a GPU. Raises NotMade."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError as error:
        raise NotMade(f"torch does not load ({error})") from error
    if not torch.cuda.is_available():
        raise NotMade("torch sees no GPU")
    prepare_torch(torch)
    return torch


def build(job: BuildJob, trt: Any, watch: BuildWatch) -> Plan:
    """The house's builder, here in the same process. Raises JobError."""
    try:
        return build_plan(job, trt, watch)
    except OSError as error:
        raise JobError(f"the plan cannot be built ({error})") from error
