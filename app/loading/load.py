"""From a version in the store to engines that have proved themselves.

Blocking work, done in threads: check the hashes, open the engines, warm them up, ask the canary, and settle
which variant serves on which device. A version that fails on every engine is refused with the reasons and
touches nothing else.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

from convoy.app.engines import cpu
from convoy.app.engines.base import Blast, Engine, EngineFailure
from convoy.app.engines.machine import CPU_ONLY, Machine
from convoy.app.engines.memory import check_batch
from convoy.app.engines.onnxruntime import LIBRARY, OnnxRuntimeCpuEngine
from convoy.app.engines.select import EngineChoice, PrecisionChoice, choose_on_cpu, measured_here, runners
from convoy.app.loading.bare_model import BareModel, read_bare_model
from convoy.app.loading.canary import CanaryCheck, CanaryFailed
from convoy.app.loading.gpu_jobs import GpuJob, PlanWish, Untried
from convoy.app.loading.gpus import load_on_gpus, open_bare_on_gpus
from convoy.app.loading.proving import Candidate, NotProved, ProvedEngine, measure, pick, prove
from convoy.models.bundle import Bundle, LatencyTable, Variant, open_bundle
from convoy.models.errors import BundleError
from convoy.models.files import check_only_files
from convoy.models.onnx_digest import check_onnx_files
from convoy.models.spec import ModelSpec
from convoy.models.store import StoredVersion

_log = logging.getLogger("convoy")
# Reading 10 GB from a slow disk twice, or tuning a large network on a GPU, takes less.
DEFAULT_LIMIT_S = 300.0
_ONNX_PLATFORM = "onnxruntime_onnx"


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What the operator decided about engines, and the machine they run on. `max_batch` None: as the model says.

    `configured_batch` stands in the place of what the model's configuration says; None: as it says.
    `plan_cache` None: no plan is kept or looked for. A load that takes longer than `limit_s` is given up.
    """

    precision: PrecisionChoice
    threads: int
    max_batch: int | None
    configured_batch: int | None = None
    engine: EngineChoice = "auto"
    machine: Machine = CPU_ONLY
    plan_cache: Path | None = None
    limit_s: float = DEFAULT_LIMIT_S


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """One version and the engines that serve it, one for each device, at least one.

    `spec` carries the batch size that is served, which the operator may have lowered. `skipped` says why
    other engines and variants do not serve. `wishes` are the plans that would serve better, were they built, and
    `untried` what may be faster than what serves. `objections` are the export's own against serving it at all.
    """

    stored: StoredVersion
    spec: ModelSpec
    engines: tuple[ProvedEngine, ...]
    skipped: tuple[str, ...]
    load_s: float
    wishes: tuple[PlanWish, ...] = ()
    untried: tuple[Untried, ...] = ()
    objections: tuple[str, ...] = ()


def load(stored: StoredVersion, options: LoadOptions) -> LoadedModel:
    """Load one version and prove it. Raises BundleError, whose message says what to do."""
    started = time.monotonic()
    try:
        check_only_files(stored.folder)
    except OSError as error:
        raise BundleError(f"{stored.folder}: cannot be read ({error}); mend it or remove it") from error
    return _load_bundle(stored, options, started) if stored.is_bundle else _load_bare(stored, options, started)


def _load_bundle(stored: StoredVersion, options: LoadOptions, started: float) -> LoadedModel:
    bundle = open_bundle(stored.folder)
    spec = bundle.manifest.spec
    _check_configured(spec, options)
    _check_external_data(bundle)
    limit = _limit(spec, options)
    wanted, skipped = runners(options.machine, options.engine)
    on_gpus = load_on_gpus(_gpu_job(bundle, limit, options), wanted)
    skipped += tuple(dict.fromkeys(on_gpus.skipped))
    engines = tuple(on_gpus.engines)
    if not engines:
        if "cpu" not in wanted:
            advice = "; --engine auto builds the plan and serves meanwhile" if on_gpus.wishes else ""
            raise _cannot_serve(bundle.folder, options, skipped, advice)
        try:
            proved, passed_over = _load_on_cpu(bundle, limit, options)
        except BundleError as error:
            raise BundleError("; ".join((str(error), *skipped))) from error
        engines, skipped = (proved,), skipped + passed_over
    return LoadedModel(
        stored=stored,
        spec=replace(spec, max_batch_size=limit),
        engines=engines,
        skipped=skipped,
        load_s=time.monotonic() - started,
        wishes=tuple(on_gpus.wishes) if options.engine == "auto" else (),
        untried=tuple(on_gpus.untried),
        objections=bundle.manifest.objections,
    )


def _cannot_serve(model: Path, options: LoadOptions, skipped: tuple[str, ...], advice: str = "") -> BundleError:
    return BundleError(f"{model}: --engine {options.engine} cannot serve it ({'; '.join(skipped)}){advice}")


def _gpu_job(bundle: Bundle, limit: int, options: LoadOptions) -> GpuJob:
    # Where one engine was asked for by name, there is none to serve meanwhile.
    may_wait = options.engine != "auto"
    return GpuJob(bundle, limit, options.precision, options.machine, options.plan_cache, may_wait)


def _load_on_cpu(bundle: Bundle, limit: int, options: LoadOptions) -> tuple[ProvedEngine, tuple[str, ...]]:
    choice = choose_on_cpu(bundle, options.precision, cpu.fingerprint(options.threads, LIBRARY))
    candidates: list[Candidate] = []
    refused: list[str] = []
    canary = bundle.canary()
    for variant in choice.variants:
        engine = _open_on_cpu(bundle, variant, limit, options)
        try:
            candidates.append(prove(variant, canary, engine))
        except NotProved as failure:
            refused.append(str(failure))
    if not candidates:
        raise BundleError(f"{bundle.folder}: no variant answers its canary rightly here ({'; '.join(refused)})")
    tables = _latencies(candidates)
    best = pick(candidates, tables)
    points = tables[candidates.index(best)].points
    reason = f"{best.variant.file}: {choice.reason}"
    proved = ProvedEngine(best.engine, best.canary, points, reason, _ONNX_PLATFORM)
    return proved, (*choice.skipped, *refused)


def _open_on_cpu(bundle: Bundle, variant: Variant, limit: int, options: LoadOptions) -> Engine:
    spec = bundle.manifest.spec
    return OnnxRuntimeCpuEngine(
        bundle.path(variant.file),
        inputs=spec.inputs,
        outputs=spec.outputs,
        max_batch_size=limit,
        precision=variant.precision,
        threads=options.threads,
    )


def _latencies(candidates: list[Candidate]) -> tuple[LatencyTable, ...]:
    """One table per candidate: export's, where the only one was measured on this device, else measured now."""
    if len(candidates) == 1:
        (only,) = candidates
        if only.variant.latency and measured_here(only.variant, only.engine.info.device_fingerprint):
            return (only.variant.latency,)
    return measure([candidate.engine for candidate in candidates])


def _load_bare(stored: StoredVersion, options: LoadOptions, started: float) -> LoadedModel:
    bare = read_bare_model(stored, options.threads, options.configured_batch)
    limit = _limit(bare.spec, options)
    wanted, skipped = runners(options.machine, options.engine)
    engines: list[ProvedEngine] = []
    if {"tensorrt", "rtx"} & set(wanted):
        skipped += ("tensorrt: a bare model has no answers that a plan could be held to; make a bundle of it",)
    if "cuda" in wanted:
        engines, refused = _load_bare_on_gpus(bare, limit, options)
        skipped += refused
    if not engines:
        if "cpu" not in wanted:
            raise _cannot_serve(bare.path, options, skipped)
        try:
            engines = [_proved_by_itself(bare, _open_bare_on_cpu(bare, limit, options))]
        except NotProved as failure:
            raise BundleError(str(failure)) from failure
    _log.info("%s version %d is a bare model, %s", stored.name, stored.version, bare.batch_reason)
    return LoadedModel(
        stored=stored,
        spec=replace(bare.spec, max_batch_size=limit),
        engines=tuple(engines),
        skipped=skipped,
        load_s=time.monotonic() - started,
    )


def _load_bare_on_gpus(bare: BareModel, limit: int, options: LoadOptions) -> tuple[list[ProvedEngine], tuple[str, ...]]:
    opened, refused = open_bare_on_gpus(bare.path, bare.spec, limit, options.machine, options.plan_cache)
    reference = _answer_of_cpu(bare, limit, options) if opened else None
    engines: list[ProvedEngine] = []
    for engine in opened:
        try:
            engines.append(_proved_by_itself(bare, engine, reference))
        except NotProved as failure:
            refused += (f"{engine.info.engine} on {engine.info.device}: {failure}",)
    return engines, refused


def _answer_of_cpu(bare: BareModel, limit: int, options: LoadOptions) -> CanaryCheck | None:
    """What a GPU is compared with; None where the CPU cannot run the model."""
    engine = _open_bare_on_cpu(bare, min(1, limit), options)
    try:
        engine.warm_up()
        return CanaryCheck.of_another_device(engine)
    except EngineFailure as failure:
        _log.warning("%s: no CPU can tell whether a GPU answers rightly (%s)", bare.path, failure)
        return None
    finally:
        engine.close()


def _open_bare_on_cpu(bare: BareModel, limit: int, options: LoadOptions) -> Engine:
    return OnnxRuntimeCpuEngine(
        bare.path,
        inputs=bare.spec.inputs,
        outputs=bare.spec.outputs,
        max_batch_size=limit,
        precision="fp32",
        threads=options.threads,
    )


def _proved_by_itself(bare: BareModel, engine: Engine, reference: CanaryCheck | None = None) -> ProvedEngine:
    """Without a canary of its own, the engine's first answer is what it must go on giving; it agrees with `reference`.

    Raises NotProved, and the engine is closed then.
    """
    try:
        engine.warm_up()
        if reference is not None:
            reference.run(engine)
        canary = CanaryCheck.of_first_answer(engine)
        (table,) = measure([engine])
    except EngineFailure as failure:
        engine.close()
        why = str(failure) if failure.blast is Blast.MEMORY else f"does not run on zeros or random input ({failure})"
        raise NotProved(f"{bare.path}: {why}") from failure
    except CanaryFailed as failure:
        engine.close()
        raise NotProved(f"{bare.path}: does not answer as the CPU does: {failure}") from failure
    return ProvedEngine(engine, canary, table.points, f"bare model: {bare.batch_reason}", _ONNX_PLATFORM)


def _limit(spec: ModelSpec, options: LoadOptions) -> int:
    """The model's own limit, lowered by its configuration and the operator's; 0 stays 0. Raises BundleError."""
    limits = (spec.max_batch_size, options.max_batch, options.configured_batch)
    limit = min(limit for limit in limits if limit is not None)
    check_batch(spec.inputs, spec.outputs, limit)
    return limit


def _check_external_data(bundle: Bundle) -> None:
    """Every byte that a library will read for a bundle is one that was checked. Raises BundleError."""
    for variant in bundle.manifest.variants:
        unknown = set(check_onnx_files(bundle.path(variant.file))) - set(bundle.manifest.files)
        if unknown:
            raise BundleError(
                f"{bundle.folder}: {variant.file} keeps tensors in {sorted(unknown)[0]!r}, of which the manifest has "
                "no digest; export the model again"
            )


def _check_configured(spec: ModelSpec, options: LoadOptions) -> None:
    """A bundle's engines are proved up to its own limit and only with their batch dimension."""
    asked = options.configured_batch
    if asked is not None and not min(1, spec.max_batch_size) <= asked <= spec.max_batch_size:
        raise BundleError(f"max_batch_size {asked} does not fit this bundle, whose own is {spec.max_batch_size}")
