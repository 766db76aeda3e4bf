"""From a version in the store to an engine that has proved itself.

Blocking work, done in threads: check the hashes, open the engine, warm it up, ask the canary, and settle
which variant serves. A version that fails any of it is refused with a reason and touches nothing else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from app.bare_model import read_bare_model
from app.canary import CanaryCheck, CanaryFailed
from app.engines import cpu
from app.engines.base import Engine, EngineFailure
from app.engines.measure import Pace, batch_knots, measure_in_turns
from app.engines.onnxruntime import LIBRARY, OnnxRuntimeCpuEngine
from app.engines.select import Choice, PrecisionChoice, choose, measured_here
from app.engines.speedup import best_per_sample_ms, is_worthwhile
from models.bundle import Bundle, LatencyPoint, LatencyTable, Variant, open_bundle
from models.errors import BundleError
from models.spec import ModelSpec
from models.store import StoredVersion

_log = logging.getLogger("convoy")
# Start-up is waited for: so long may measuring one variant take where no table fits this device. A network so
# slow that it needs longer is measured at small batches only, and the server learns the others as it goes.
MEASURING_BUDGET_S = 0.15
_MEASURING_LIMIT_S = 1.0


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What the operator decided about engines. `max_batch` None: as the model says.

    `configured_batch` stands in the place of what the model's configuration says; None: as it says.
    """

    precision: PrecisionChoice
    threads: int
    max_batch: int | None
    configured_batch: int | None = None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An engine that answered its canary rightly, and all that is known about it.

    `spec` carries the batch size that is served, which the operator may have lowered. `reason` says why
    this engine and variant serve, `skipped` why others do not.
    """

    stored: StoredVersion
    spec: ModelSpec
    engine: Engine
    canary: CanaryCheck
    latency: tuple[LatencyPoint, ...]
    reason: str
    skipped: tuple[str, ...]
    platform: str
    load_s: float


@dataclass(frozen=True, slots=True)
class _Candidate:
    variant: Variant
    engine: Engine
    canary: CanaryCheck


def load(stored: StoredVersion, options: LoadOptions) -> LoadedModel:
    """Load one version and prove it. Raises BundleError, whose message says what to do."""
    started = time.monotonic()
    return _load_bundle(stored, options, started) if stored.is_bundle else _load_bare(stored, options, started)


def _load_bundle(stored: StoredVersion, options: LoadOptions, started: float) -> LoadedModel:
    bundle = open_bundle(stored.folder)
    spec = bundle.manifest.spec
    _check_configured(spec, options)
    choice = choose(bundle, options.precision, cpu.fingerprint(options.threads, LIBRARY))
    candidates, refused = _prove_all(bundle, choice, options)
    tables = _latencies(candidates)
    best = _pick(candidates, tables)
    return LoadedModel(
        stored=stored,
        spec=replace(spec, max_batch_size=_limit(spec.max_batch_size, options)),
        engine=best.engine,
        canary=best.canary,
        latency=tables[candidates.index(best)].points,
        reason=f"{best.variant.file}: {choice.reason}",
        skipped=(*choice.skipped, *refused),
        platform="onnxruntime_onnx",
        load_s=time.monotonic() - started,
    )


def _prove_all(bundle: Bundle, choice: Choice, options: LoadOptions) -> tuple[list[_Candidate], list[str]]:
    candidates: list[_Candidate] = []
    refused: list[str] = []
    canary = bundle.canary()
    for variant in choice.variants:
        engine = _open_variant(bundle, variant, options)
        check = CanaryCheck.of_variant(canary, variant, batched=engine.batched)
        try:
            engine.warm_up()
            check.run(engine)
        except (EngineFailure, CanaryFailed) as failure:
            engine.close()
            refused.append(f"{variant.file}: {failure}")
            continue
        candidates.append(_Candidate(variant, engine, check))
    if not candidates:
        raise BundleError(f"{bundle.folder}: no variant answers its canary rightly here ({'; '.join(refused)})")
    return candidates, refused


def _open_variant(bundle: Bundle, variant: Variant, options: LoadOptions) -> Engine:
    spec = bundle.manifest.spec
    return OnnxRuntimeCpuEngine(
        bundle.path(variant.file),
        inputs=spec.inputs,
        outputs=spec.outputs,
        max_batch_size=_limit(spec.max_batch_size, options),
        precision=variant.precision,
        threads=options.threads,
    )


def _latencies(candidates: Sequence[_Candidate]) -> tuple[LatencyTable, ...]:
    """One table per candidate: export's, where the only one was measured on this device, else measured now."""
    if len(candidates) == 1:
        (only,) = candidates
        if only.variant.latency and measured_here(only.variant, only.engine.info.device_fingerprint):
            return (only.variant.latency,)
    return _measure([candidate.engine for candidate in candidates])


def _measure(engines: Sequence[Engine]) -> tuple[LatencyTable, ...]:
    knots = batch_knots(engines[0].info.batch_sizes[-1])
    budget_s = MEASURING_BUDGET_S * len(engines) / len(knots)
    return measure_in_turns(engines, Pace(budget_s, _MEASURING_LIMIT_S, warm_up=1, fewest=3, most=50))


def _pick(candidates: Sequence[_Candidate], tables: Sequence[LatencyTable]) -> _Candidate:
    """The fastest of those that are faster beyond doubt than the first, the more exact one; else that one."""
    faster = [(one, table) for one, table in zip(candidates, tables, strict=True) if is_worthwhile(table)]
    best = min(faster, key=lambda pair: best_per_sample_ms(pair[1]))[0] if faster else candidates[0]
    for candidate in candidates:
        if candidate is not best:
            candidate.engine.close()
    return best


def _load_bare(stored: StoredVersion, options: LoadOptions, started: float) -> LoadedModel:
    bare = read_bare_model(stored, options.threads, options.configured_batch)
    engine = OnnxRuntimeCpuEngine(
        bare.path,
        inputs=bare.spec.inputs,
        outputs=bare.spec.outputs,
        max_batch_size=_limit(bare.spec.max_batch_size, options),
        precision="fp32",
        threads=options.threads,
    )
    try:
        engine.warm_up()
        canary = CanaryCheck.of_first_answer(engine)
        (table,) = _measure([engine])
    except EngineFailure as failure:
        engine.close()
        raise BundleError(f"{bare.path}: does not run on zeros or random input ({failure})") from failure
    _log.info("%s version %d is a bare model, %s", stored.name, stored.version, bare.batch_reason)
    return LoadedModel(
        stored=stored,
        spec=replace(bare.spec, max_batch_size=_limit(bare.spec.max_batch_size, options)),
        engine=engine,
        canary=canary,
        latency=table.points,
        reason=f"bare model: {bare.batch_reason}",
        skipped=(),
        platform="onnxruntime_onnx",
        load_s=time.monotonic() - started,
    )


def _limit(max_batch_size: int, options: LoadOptions) -> int:
    """The model's own limit, lowered by its configuration and the operator's; 0 stays 0."""
    limits = (max_batch_size, options.max_batch, options.configured_batch)
    return min(limit for limit in limits if limit is not None)


def _check_configured(spec: ModelSpec, options: LoadOptions) -> None:
    """A bundle's engines are proved up to its own limit and only with their batch dimension."""
    asked = options.configured_batch
    if asked is not None and not min(1, spec.max_batch_size) <= asked <= spec.max_batch_size:
        raise BundleError(f"max_batch_size {asked} does not fit this bundle, whose own is {spec.max_batch_size}")
