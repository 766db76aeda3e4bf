"""A version's engines on the GPUs of this machine: plans where there are any, ONNX Runtime else.

What stands in the way of a better one is a reason, and a plan that is missing is also a wish. Raises nothing for a
model that a GPU cannot run, because a CPU may. Knows nothing of requests.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from convoy.app.engines.base import Engine, EngineFailure
from convoy.app.engines.cuda.device import Device
from convoy.app.engines.cuda.engine import bucket_sizes
from convoy.app.engines.cuda.tuning import remembered, tuned
from convoy.app.engines.machine import Machine
from convoy.app.engines.onnxruntime_cuda import ConvolutionTuning, OnnxRuntimeCudaEngine
from convoy.app.engines.select import Choice, Runner, choose_on_gpu
from convoy.app.engines.tensorrt import supports
from convoy.app.engines.tensorrt_library import LIBRARIES, TensorRt
from convoy.app.loading.gpu_choice import NOTHING_SERVES, choose
from convoy.app.loading.gpu_jobs import Digests, GpuJob, PlanWish, Untried, refusal
from convoy.app.loading.plans import PlanOpener, find_or_wish
from convoy.app.loading.proving import Candidate, NotProved, ProvedEngine, prove
from convoy.models.bundle import Precision, Variant
from convoy.models.errors import BundleError, JobError
from convoy.models.plan_cache import find_plan
from convoy.models.plans import NoPlan
from convoy.models.spec import ModelSpec

_log = logging.getLogger("convoy")


@dataclass(slots=True)
class GpuEngines:
    """One proved engine for each GPU that can serve, why nothing better does, and what would or might."""

    engines: list[ProvedEngine] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    wishes: list[PlanWish] = field(default_factory=list)
    untried: list[Untried] = field(default_factory=list)


def load_on_gpus(job: GpuJob, wanted: tuple[Runner, ...]) -> GpuEngines:
    """Try the wanted kinds of engine on every GPU. Raises BundleError where a GPU is beyond help.

    Plans that are ready serve at once, the fastest of them. ONNX Runtime serves where there are none, and is else tried
    beside them later.
    """
    found = GpuEngines()
    for device in job.machine.gpus:
        _ensure_works(device)
        plans = [library for library in LIBRARIES if library.engine in wanted]
        if plans and (proved := _load_plans(job, device, plans, found)) is not None:
            found.engines.append(proved)
            if "cuda" in wanted and not job.machine.why_no_code(device):
                choice = choose_on_gpu(job.bundle, job.precision, "cuda")
                found.untried += [Untried(device, variant) for variant in choice.variants]
        elif "cuda" in wanted:
            try:
                found.engines.append(_load_onnx(job, device, found))
            except NotProved as failure:
                found.skipped.append(refusal("cuda", device, failure))
    return found


def prove_plan(job: GpuJob, wish: PlanWish) -> ProvedEngine:
    """The engine of a plan that has just been built, or is compiled now. Raises NotProved."""
    if job.plan_cache is None:
        raise NotProved(f"{wish.variant.file}: there is no plan cache")
    found = find_plan(job.plan_cache, wish.key)
    if isinstance(found, NoPlan):
        raise NotProved(f"{wish.variant.file}: {found.reason}")
    candidate = _open_and_prove(job, wish.variant, PlanOpener(job, wish.device, found).open)
    return choose([candidate], "its plan was built", "tensorrt_plan", [])


def prove_tuned(job: GpuJob, untried: Untried) -> ProvedEngine:
    """ONNX Runtime at its best. Raises NotProved."""
    opener = _opener(job, untried.device, untried.variant)
    candidate = _open_and_prove(job, untried.variant, opener.open)
    return choose([candidate], "tuned, and no plan is faster", "onnxruntime_onnx", [])


def still_refused(skipped: tuple[str, ...], wish: PlanWish) -> tuple[str, ...]:
    """Of what was told, all that holds when the wish has been tried: there was no plan, and now there is an answer."""
    of_file, of_all = (refusal(wish.library, wish.device, why) for why in (f"{wish.variant.file}: ", NOTHING_SERVES))
    return tuple(reason for reason in skipped if not reason.startswith(of_file) and reason != of_all)


def _ensure_works(device: Device) -> None:
    try:
        device.ensure_works()
    except EngineFailure as failure:
        raise BundleError(f"{device.name} cannot be used by this process any more ({failure}); restart it") from failure


# Plans


def _load_plans(job: GpuJob, device: Device, libraries: Sequence[TensorRt], found: GpuEngines) -> ProvedEngine | None:
    """The fastest of what is ready, whichever library made it; None where nothing is."""
    try:
        choice = _choose_plans(job)
    except NotProved as failure:
        found.skipped += [refusal(library.name, device, failure) for library in libraries]
        return None
    found.skipped += choice.skipped
    candidates: list[Candidate] = []
    for library in libraries:
        before = len(candidates)
        for variant in choice.variants:
            try:
                opener = find_or_wish(job, device, library, variant, found.wishes)
                candidates.append(_open_and_prove(job, variant, opener.open))
            except NotProved as failure:
                found.skipped.append(refusal(library.name, device, failure))
        if len(candidates) == before:
            found.skipped.append(refusal(library.name, device, NOTHING_SERVES))
    # The most exact first, of whichever library: what is faster has to be so beyond doubt.
    candidates.sort(key=lambda one: choice.variants.index(one.variant))
    try:
        return choose(candidates, choice.reason, "tensorrt_plan", found.skipped) if candidates else None
    except NotProved as failure:
        found.skipped.append(refusal(candidates[0].engine.info.engine, device, failure))
        return None


def _choose_plans(job: GpuJob) -> Choice:
    """Raises NotProved for a model that has no plans."""
    spec = job.bundle.manifest.spec
    if not supports((*spec.inputs, *spec.outputs)):
        raise NotProved("TensorRT takes only numbers of fixed shapes")
    return choose_on_gpu(job.bundle, job.precision, "tensorrt")


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
    return choose(candidates, choice.reason, "onnxruntime_onnx", found.skipped)


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
                found.untried.append(Untried(device, variant))
                return candidate
        _log.info("%s is tuned before it serves", opener.onnx)
    return _open_and_prove(job, variant, opener.open)


def _opener(job: GpuJob, device: Device, variant: Variant) -> _OnnxOpener:
    onnx, spec = job.bundle.path(variant.file), job.bundle.manifest.spec
    precision = variant.precision
    return _OnnxOpener(onnx, spec, job.max_batch_size, precision, device, job.machine, job.plan_cache, job.digests)


def open_bare_on_gpus(
    onnx: Path, spec: ModelSpec, max_batch_size: int, machine: Machine, plan_cache: Path | None
) -> tuple[list[Engine], tuple[str, ...]]:
    """A bare model's engines, not warmed up, and why there are not more."""
    engines: list[Engine] = []
    refused: list[str] = []
    digests = Digests()
    for device in machine.gpus:
        _ensure_works(device)
        if no_code := machine.why_no_code(device):
            refused.append(refusal("onnxruntime-cuda", device, no_code))
            continue
        opener = _OnnxOpener(onnx, spec, max_batch_size, "fp32", device, machine, plan_cache, digests)
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
    digests: Digests

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
        return self.plan_cache / self.digests.of(self.onnx) / f"ort{library}-sm{gpu.compute_capability}-{digest}.json"


# Both


def _open_and_prove(job: GpuJob, variant: Variant, open_engine: Callable[[], Engine]) -> Candidate:
    """Raises NotProved."""
    canary = job.bundle.canary()
    engine: Engine | None = None
    try:
        engine = open_engine()
        return prove(variant, canary, engine)
    except NotProved:
        raise
    except (JobError, OSError, EngineFailure) as failure:
        raise NotProved(f"{variant.file}: {failure}") from failure
    except Exception as error:  # a bug, here or in a library, which must cost no more than this engine
        _log.exception("%s on a GPU failed; this is a bug", variant.file)
        if engine is not None:
            engine.close()
        raise NotProved(f"{variant.file}: {type(error).__name__}: {error}") from error
