"""Plans on one GPU: which exist, which are wanted, and how one becomes an engine.

A plan of TensorRT for RTX is compiled when it is opened, which takes seconds the first time. Then it counts as wanted,
and something else serves meanwhile.
"""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from convoy.app.engines.base import Engine
from convoy.app.engines.cuda.device import Device
from convoy.app.engines.cuda.engine import bucket_sizes
from convoy.app.engines.cuda.trials import best_of, read_memory, told, try_all, write_memory
from convoy.app.engines.jobs import Job, NotProved, Place, PlanRequest
from convoy.app.engines.tensorrt import Captures, TensorRtEngine, supports
from convoy.app.engines.tensorrt_contexts import Kernels
from convoy.app.engines.tensorrt_library import TensorRt, library_named, nameable_capabilities
from convoy.models.bundle import Variant
from convoy.models.errors import JobError
from convoy.models.gpus import FP8_SINCE, as_number
from convoy.models.plan_cache import PlanQuery, is_trusted, search_plan
from convoy.models.plans import BuildOptions, Gpu, NoPlan, Plan, PlanPaths, PlanTarget, plan_key, tensorrt_target

_log = logging.getLogger("convoy")
_FILE_VERSION = 1
_DRIVER = Path("/proc/driver/nvidia/version")
_CAPTURES: tuple[Captures, ...] = ("own", "library")


def open_plan(library: TensorRt, job: Job, variant: Variant, place: Place) -> Engine:
    """Open a plan that needs no work. Raises NotProved, BundleError or EngineFailure."""
    assert place.gpu is not None
    found = _find(library, job, variant, place.gpu)
    if isinstance(found, PlanOpener):
        return found.open()
    _, reason = found
    raise NotProved(f"{variant.file}: {reason}")


def wish_for_plan(
    library: TensorRt, job: Job, variant: Variant, place: Place, is_open: bool | None
) -> PlanRequest | None:
    """What must be built or compiled so that a plan of the variant can serve."""
    assert place.gpu is not None
    if is_open is not False:
        return None
    with suppress(NotProved):
        found = _find(library, job, variant, place.gpu)
        return None if isinstance(found, PlanOpener) else found[0]
    return None


def _find(library: TensorRt, job: Job, variant: Variant, device: Device) -> PlanOpener | tuple[PlanRequest, str]:
    """The variant's plan, ready to open, or what it lacks and what could mend that. Raises NotProved."""
    if not supports((*job.spec.inputs, *job.spec.outputs)):
        raise NotProved("TensorRT only supports numeric tensors of fixed shape")
    if job.plan_cache is None:
        raise NotProved(f"{variant.file}: there is no plan cache; set one with --plan-cache")
    gpu = Gpu(device.properties.name, device.properties.compute_capability)
    if variant.precision == "fp8" and as_number(gpu.compute_capability) < as_number(FP8_SINCE):
        raise NotProved(
            f"{variant.file}: FP8 needs compute capability {FP8_SINCE} or later, not {gpu.compute_capability}"
        )
    trt, onnx = job.machine.runs(library).module, job.path(variant)
    options = BuildOptions(variant.precision, bucket_sizes(job.max_batch_size), profiles=library.profiles)
    try:
        query = PlanQuery(job.digest(onnx), library.name, trt.__version__, gpu, options)
    except (JobError, OSError) as error:
        raise NotProved(f"{variant.file}: {error}") from error
    found = search_plan(job.plan_cache, query)
    if isinstance(found, NoPlan):
        target = _target(library, trt, gpu, options)
        if not target.covers(gpu):
            raise NotProved(f"{variant.file}: {library.title} is for {target.where}, not {gpu.compute_capability}")
        key = plan_key(query.onnx_sha256, target, options)
        return PlanRequest(device, onnx, variant, options, key), found.reason
    opener = PlanOpener(job, device, found)
    if opener.is_compiled() or job.may_wait:
        return opener
    wish = PlanRequest(device, onnx, variant, found.record.options, found.record.key)
    return wish, f"its kernels are not yet compiled for {gpu.name} and its driver"


def _target(library: TensorRt, trt: object, gpu: Gpu, options: BuildOptions) -> PlanTarget:
    """The target of a build for a GPU that is here: only this GPU if the library allows it."""
    version: str = trt.__version__  # type: ignore[attr-defined]
    if not library.builds_anywhere:
        return tensorrt_target(version, gpu, options)
    is_nameable = gpu.compute_capability in nameable_capabilities(trt)
    return PlanTarget(library.name, version, (gpu.compute_capability,) if is_nameable else ())


@dataclass(frozen=True, slots=True)
class PlanOpener:
    """One plan on one device."""

    job: Job
    device: Device
    plan: Plan

    def is_compiled(self) -> bool:
        """Whether opening compiles and tries nothing. If what is kept turns out to be stale, it does."""
        kernels = self._kernels()
        return kernels is None or (is_trusted(kernels) and self._remembered(kernels) is not None)

    def open(self) -> Engine:
        """Open the plan. Raises BundleError or EngineFailure."""
        path = self._kernels()
        if path is None:
            return self._open("own", None)
        kernels = Kernels(path)  # shared by everything that is opened here, also if nothing can be written
        return self._open(self._captures(path, kernels), kernels)

    def _captures(self, path: Path, kernels: Kernels) -> Captures:
        """The faster way to capture graphs. Raises EngineFailure or BundleError."""
        known = self._remembered(path)
        if known is not None:
            return known.chosen
        sizes = tuple(sorted({1, self._largest}))
        tried, problem = try_all(lambda way, trial_sizes: self._open(way, kernels, slots=1), _CAPTURES, sizes)
        if not tried:
            assert problem is not None
            raise problem
        best = best_of(tried)
        write_memory(self._memory(path), CapturesRecord(_FILE_VERSION, best, told(tried, str)))
        _log.info("%s on %s: CUDA graphs with %s", self.plan.path, self.device.name, best)
        return best

    def _remembered(self, kernels: Path) -> CapturesRecord | None:
        return read_memory(self._memory(kernels), CapturesRecord, _FILE_VERSION)

    def _memory(self, kernels: Path) -> Path:
        """Per largest batch: the choice depends on it, and so does the number of kernels."""
        return kernels.with_name(f"{kernels.stem}-{self._largest}.captures")

    @property
    def _largest(self) -> int:
        return max(1, self.job.max_batch_size)

    def _open(self, captures: Captures, kernels: Kernels | None, **options: int) -> TensorRtEngine:
        spec = self.job.spec
        record = self.plan.record
        return TensorRtEngine(
            self.plan,
            self.device,
            self.job.machine.runs(library_named(record.key.target.library)).module,
            inputs=spec.inputs,
            outputs=spec.outputs,
            batched=self.job.max_batch_size > 0,
            max_batch_size=self._largest,
            captures=captures,
            kernels=kernels,
            **options,
        )

    def _kernels(self) -> Path | None:
        """Where compiled kernels of the plan are kept; None for a library that compiles none."""
        key = self.plan.record.key
        if self.job.plan_cache is None or not library_named(key.target.library).builds_anywhere:
            return None
        name = self.device.properties.name
        return PlanPaths.of(self.job.plan_cache, key).kernels(name, _driver(self.device))


@dataclass(frozen=True, slots=True)
class CapturesRecord:
    """The file's content: the choice, and milliseconds of the smallest and the largest batch with each."""

    schema_version: int
    chosen: Captures
    tried_ms: dict[str, dict[str, float]]


def _driver(device: Device) -> str:
    """The driver's exact version if the system tells it, and its version of CUDA."""
    build = ""
    with suppress(OSError):
        # "NVIDIA UNIX x86_64 Kernel Module  550.54.15", "NVIDIA UNIX Open Kernel Module for x86_64  580.65.06"
        found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", _DRIVER.read_text())
        build = found[1] if found else ""
    return f"{build} {device.cuda.driver_version()}"
