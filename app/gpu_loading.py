"""A version's engines on the GPUs of this machine: TensorRT where there is a plan, ONNX Runtime else.

On each device the first kind of engine that proves itself serves; what stands in the way of a better one is
a reason, and a plan that is missing is also a wish. Raises nothing for a model that a GPU cannot run, because
a CPU may. Knows nothing of requests.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from app.engines.base import Engine, EngineFailure
from app.engines.cuda.device import Device
from app.engines.cuda.engine import bucket_sizes
from app.engines.cuda.tuning import remembered, tuned
from app.engines.machine import Machine
from app.engines.onnxruntime_cuda import ConvolutionTuning, OnnxRuntimeCudaEngine
from app.engines.select import PrecisionChoice, choose_on_gpu
from app.engines.tensorrt import TensorRtEngine, supports
from app.proving import Candidate, NotProved, ProvedEngine, measure, pick, prove
from models.bundle import Bundle, Precision, Target, Variant
from models.errors import BundleError, JobError
from models.onnx_digest import onnx_digest
from models.plan_cache import find_plan
from models.plans import BuildOptions, Gpu, NoPlan, Plan, PlanKey, plan_key
from models.spec import ModelSpec

_log = logging.getLogger("convoy")


@dataclass(frozen=True, slots=True)
class GpuJob:
    """What is to be served: a bundle up to `max_batch_size` (0: without batches), and where."""

    bundle: Bundle
    max_batch_size: int
    precision: PrecisionChoice
    machine: Machine
    plan_cache: Path | None


@dataclass(frozen=True, slots=True)
class PlanWish:
    """A plan that is missing: what to build it from, and for which GPU of this process."""

    device: Device
    onnx: Path
    variant: Variant
    options: BuildOptions
    key: PlanKey


@dataclass(frozen=True, slots=True)
class Untuned:
    """A file that ONNX Runtime serves as it comes, because a plan was to take over soon; and where."""

    device: Device
    variant: Variant


@dataclass(slots=True)
class GpuEngines:
    """One proved engine for each GPU that can serve, why nothing better does, and what would."""

    engines: list[ProvedEngine] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    wishes: list[PlanWish] = field(default_factory=list)
    untuned: list[Untuned] = field(default_factory=list)


def load_on_gpus(job: GpuJob, wanted: tuple[Target, ...]) -> GpuEngines:
    """Try the wanted kinds of engine on every GPU, best first. Raises BundleError where a GPU is beyond help."""
    found = GpuEngines()
    for device in job.machine.gpus:
        _ensure_works(device)
        for target in wanted:
            try:
                if target == "tensorrt":
                    found.engines.append(_load_plans(job, device, found))
                elif target == "cuda":
                    found.engines.append(_load_onnx(job, device, found))
                else:
                    continue
            except NotProved as failure:
                found.skipped.append(refusal(target, device, failure))
            else:
                break
    return found


def prove_plan(job: GpuJob, wish: PlanWish) -> ProvedEngine:
    """The engine of a plan that has just been built. Raises NotProved."""
    if job.plan_cache is None:
        raise NotProved(f"{wish.variant.file}: there is no plan cache")
    found = find_plan(job.plan_cache, wish.key)
    if isinstance(found, NoPlan):
        raise NotProved(f"{wish.variant.file}: {found.reason}")
    candidate = _open_and_prove(job, wish.variant, partial(_open_plan, job, wish.device, found))
    return _best([candidate], "its plan was built", "tensorrt_plan")


def prove_tuned(job: GpuJob, untuned: Untuned) -> ProvedEngine:
    """The engine that serves for good where no plan took over. Raises NotProved."""
    opener = _opener(job, untuned.device, untuned.variant)
    candidate = _open_and_prove(job, untuned.variant, opener.open)
    return _best([candidate], "tuned, because no plan serves", "onnxruntime_onnx")


def refusal(engine: str, device: Device, why: object) -> str:
    """How it is told that an engine does not serve on a device."""
    return f"{engine} on {device.name}: {why}"


def still_refused(skipped: tuple[str, ...], wish: PlanWish) -> tuple[str, ...]:
    """Of what was told, all that holds when the wish has been tried: there was no plan, and now there is an answer."""
    of_file, of_all = (refusal("tensorrt", wish.device, why) for why in (f"{wish.variant.file}: ", _NOTHING_SERVES))
    return tuple(reason for reason in skipped if not reason.startswith(of_file) and reason != of_all)


_NOTHING_SERVES = "no variant serves"


def _ensure_works(device: Device) -> None:
    try:
        device.ensure_works()
    except EngineFailure as failure:
        raise BundleError(f"{device.name} cannot be used by this process any more ({failure}); restart it") from failure


# TensorRT


def _load_plans(job: GpuJob, device: Device, found: GpuEngines) -> ProvedEngine:
    spec = job.bundle.manifest.spec
    if not supports((*spec.inputs, *spec.outputs)):
        raise NotProved("TensorRT takes only numbers of fixed shapes")
    choice = choose_on_gpu(job.bundle, job.precision, "tensorrt")
    found.skipped += choice.skipped
    candidates: list[Candidate] = []
    for variant in choice.variants:
        try:
            plan = _find_or_wish(job, device, variant, found.wishes)
            candidates.append(_open_and_prove(job, variant, partial(_open_plan, job, device, plan)))
        except NotProved as failure:
            found.skipped.append(refusal("tensorrt", device, failure))
    return _best(candidates, choice.reason, "tensorrt_plan")


def _find_or_wish(job: GpuJob, device: Device, variant: Variant, wishes: list[PlanWish]) -> Plan:
    if job.plan_cache is None:
        raise NotProved(f"{variant.file}: there is no plan cache; give one with --plan-cache")
    onnx = job.bundle.path(variant.file)
    gpu = Gpu(device.properties.name, device.properties.compute_capability)
    options = BuildOptions(variant.precision, bucket_sizes(job.max_batch_size))
    try:
        key = plan_key(onnx_digest(onnx), job.machine.tensorrt.module.__version__, gpu, options)
    except (JobError, OSError) as error:
        raise NotProved(f"{variant.file}: {error}") from error
    found = find_plan(job.plan_cache, key)
    if isinstance(found, NoPlan):
        wishes.append(PlanWish(device, onnx, variant, options, key))
        raise NotProved(f"{variant.file}: {found.reason}")
    return found


def _open_plan(job: GpuJob, device: Device, plan: Plan) -> Engine:
    spec = job.bundle.manifest.spec
    return TensorRtEngine(
        plan,
        device,
        job.machine.tensorrt.module,
        inputs=spec.inputs,
        outputs=spec.outputs,
        batched=job.max_batch_size > 0,
    )


# ONNX Runtime


def _load_onnx(job: GpuJob, device: Device, found: GpuEngines) -> ProvedEngine:
    if no_code := job.machine.why_no_code(device):
        raise NotProved(no_code)
    choice = choose_on_gpu(job.bundle, job.precision, "cuda")
    found.skipped += choice.skipped
    candidates: list[Candidate] = []
    for variant in choice.variants:
        try:
            candidates.append(_prove_onnx(job, device, variant, found))
        except NotProved as failure:
            found.skipped.append(refusal("onnxruntime-cuda", device, failure))
    return _best(candidates, choice.reason, "onnxruntime_onnx")


def _prove_onnx(job: GpuJob, device: Device, variant: Variant, found: GpuEngines) -> Candidate:
    """As it comes where a plan is wished for: tuning opens half a dozen sessions, and nobody is to wait for them.

    Raises NotProved.
    """
    opener = _opener(job, device, variant)
    if any(wish.device is device for wish in found.wishes) and not opener.is_tuned():
        # Not every model can be captured in graphs.
        for way in (ConvolutionTuning(), ConvolutionTuning(graphs=False)):
            try:
                candidate = _open_and_prove(job, variant, partial(opener.open_as, way))
            except NotProved as failure:
                _log.info("%s does not run as it comes (%s): %s", opener.onnx, way, failure)
            else:
                found.untuned.append(Untuned(device, variant))
                return candidate
        _log.info("%s is tuned before it serves", opener.onnx)
    return _open_and_prove(job, variant, opener.open)


def _opener(job: GpuJob, device: Device, variant: Variant) -> _OnnxOpener:
    onnx, spec = job.bundle.path(variant.file), job.bundle.manifest.spec
    return _OnnxOpener(onnx, spec, job.max_batch_size, variant.precision, device, job.machine, job.plan_cache)


def open_bare_on_gpus(
    onnx: Path, spec: ModelSpec, max_batch_size: int, machine: Machine, plan_cache: Path | None
) -> tuple[list[Engine], tuple[str, ...]]:
    """A bare model's engines, not warmed up, and why there are not more."""
    engines: list[Engine] = []
    refused: list[str] = []
    for device in machine.gpus:
        _ensure_works(device)
        if no_code := machine.why_no_code(device):
            refused.append(refusal("onnxruntime-cuda", device, no_code))
            continue
        opener = _OnnxOpener(onnx, spec, max_batch_size, "fp32", device, machine, plan_cache)
        try:
            engines.append(opener.open())
        except (JobError, OSError, EngineFailure) as failure:
            refused.append(refusal("onnxruntime-cuda", device, failure))
    return engines, tuple(refused)


@dataclass(frozen=True, slots=True)
class _OnnxOpener:
    """One ONNX file on one device: tuned once, then opened as it was found best; or at once, as it comes."""

    onnx: Path
    spec: ModelSpec
    max_batch_size: int
    precision: Precision
    device: Device
    machine: Machine
    plan_cache: Path | None

    def is_tuned(self) -> bool:
        return remembered(self._memory()) is not None

    def open_as(self, tuning: ConvolutionTuning) -> Engine:
        """Raises BundleError or EngineFailure."""
        return self._open(tuning, bucket_sizes(self.max_batch_size))

    def open(self) -> Engine:
        """Raises BundleError or EngineFailure."""
        sizes, memory, started_s = bucket_sizes(self.max_batch_size), self._memory(), time.monotonic()
        tuning = tuned(lambda way, trial_sizes: self._open(way, trial_sizes, slots=1), sizes[-1], memory)
        _log.info("%s on %s: %s, found in %.1f s", self.onnx, self.device.name, tuning, time.monotonic() - started_s)
        return self._open(tuning, sizes)

    def _open(self, tuning: ConvolutionTuning, sizes: tuple[int, ...], **options: int) -> OnnxRuntimeCudaEngine:
        return OnnxRuntimeCudaEngine(
            self.onnx,
            self.device,
            self.machine.onnxruntime.module,
            inputs=self.spec.inputs,
            outputs=self.spec.outputs,
            batch_sizes=sizes,
            batched=self.max_batch_size > 0,
            precision=self.precision,
            tuning=tuning,
            **options,
        )

    def _memory(self) -> Path | None:
        """Where what was measured for this file, device, library and batch size is remembered."""
        if self.plan_cache is None:
            return None
        gpu, library = self.device.properties, self.machine.onnxruntime.module.__version__
        about = json.dumps([gpu.name, gpu.compute_capability, library, self.max_batch_size])
        digest = hashlib.sha256(about.encode()).hexdigest()[:16]
        return self.plan_cache / onnx_digest(self.onnx) / f"ort{library}-sm{gpu.compute_capability}-{digest}.json"


# Both


def _open_and_prove(job: GpuJob, variant: Variant, open_engine: Callable[[], Engine]) -> Candidate:
    """Raises NotProved."""
    try:
        engine = open_engine()
    except (JobError, OSError, EngineFailure) as failure:
        raise NotProved(f"{variant.file}: {failure}") from failure
    return prove(variant, job.bundle.canary(), engine)


def _best(candidates: list[Candidate], why: str, platform: str) -> ProvedEngine:
    """The best of them, measured in turns. Raises NotProved where there is none or it cannot be measured."""
    if not candidates:
        raise NotProved(_NOTHING_SERVES)
    try:
        tables = measure([candidate.engine for candidate in candidates])
    except EngineFailure as failure:
        for candidate in candidates:
            candidate.engine.close()
        raise NotProved(f"it fails when it is measured: {failure}") from failure
    best = pick(candidates, tables)
    points = tables[candidates.index(best)].points
    return ProvedEngine(best.engine, best.canary, points, f"{best.variant.file}: {why}", platform)
