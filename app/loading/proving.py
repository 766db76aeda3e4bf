"""How an engine proves itself before it may serve: it runs, it is right, and it is known how long it takes.

Of those that are right one serves on a device: all are measured in turns, and all but the best are closed. Knows
engines, canaries and clocks; knows nothing of files or of which engine ought to be tried.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from convoy.app.engines.base import Engine, EngineInfo, WarmShapes
from convoy.app.engines.batch import EngineFailure, FailureScope
from convoy.app.engines.jobs import NotProved, refusal
from convoy.app.engines.measure import Pace, Rounds, batch_knots, run_in_turns, summarise
from convoy.app.engines.select import measured_here
from convoy.app.engines.speedup import is_beyond_doubt, paired_speedup
from convoy.app.engines.table import row_named
from convoy.app.loading.canary import CanaryCheck, CanaryFailed
from convoy.models.bundle import Canary, LatencyPoint, Variant
from convoy.models.errors import JobError

_log = logging.getLogger("convoy")

NOTHING_SERVES = "no variant serves"
# How long start-up may measure one variant where no table fits this device. A network that needs longer is measured at
# small batches only, and the server learns the others as it goes.
MEASURING_BUDGET_S = 0.15


@dataclass(frozen=True, slots=True)
class ProvedEngine:
    """An engine that answered its canary rightly, and all that is known about it.

    `reason` says why this engine and variant serve, `platform` what they are in the protocol's words, `file` is the
    variant's.
    """

    engine: Engine
    canary: CanaryCheck
    latency: tuple[LatencyPoint, ...]
    reason: str
    platform: str
    file: str = ""

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    @property
    def shapes(self) -> WarmShapes | None:
        """What the engine holds for free sizes."""
        return self.engine.warm_shapes()


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that is right, and the variant that it runs. `reason` says why it is tried."""

    variant: Variant
    engine: Engine
    canary: CanaryCheck
    reason: str


def prove(variant: Variant, canary: Canary, reason: str, engine: Engine, warm_up_runs: int = 1) -> Candidate:
    """Warm an engine up and ask it the canary. Raises NotProved."""
    check = CanaryCheck.of_variant(canary, variant, batched=engine.batched)
    try:
        _warm_up(engine, warm_up_runs)
        check.run(engine)
    except (EngineFailure, CanaryFailed) as failure:
        raise NotProved(f"{variant.file}: {failure}") from failure
    return Candidate(variant, engine, check, reason)


def prove_by_itself(
    variant: Variant, reference: CanaryCheck | None, reason: str, engine: Engine, warm_up_runs: int = 1
) -> Candidate:
    """Without a canary of its own, the engine's first answer is what it must go on giving; it agrees with `reference`.

    Raises NotProved.
    """
    try:
        _warm_up(engine, warm_up_runs)
        if reference is not None:
            reference.run(engine)
        return Candidate(variant, engine, CanaryCheck.of_first_answer(engine), reason)
    except EngineFailure as failure:
        why = (
            str(failure)
            if failure.scope is FailureScope.MEMORY
            else f"does not run on zeros or random input ({failure})"
        )
        raise NotProved(f"{variant.file}: {why}") from failure
    except CanaryFailed as failure:
        raise NotProved(f"{variant.file}: does not answer as the CPU does: {failure}") from failure


def _warm_up(engine: Engine, runs: int) -> None:
    """Raises EngineFailure."""
    for _ in range(runs):
        engine.warm_up()


def open_and_prove(
    variant: Variant, open_engine: Callable[[], Engine], prove_engine: Callable[[Engine], Candidate]
) -> Candidate:
    """Raises NotProved, whatever went wrong; then nothing is left open."""
    try:
        engine = open_engine()
        try:
            return prove_engine(engine)
        except BaseException:
            engine.close()
            raise
    except NotProved:
        raise
    except (JobError, OSError, EngineFailure) as failure:
        raise NotProved(f"{variant.file}: {failure}") from failure
    except Exception as error:  # a bug, here or in a library, which must cost no more than this engine
        _log.exception("%s failed in an engine; this is a bug", variant.file)
        raise NotProved(f"{variant.file}: {type(error).__name__}: {error}") from error


def race(engines: Sequence[Engine]) -> list[Rounds]:
    """The engines' runs in turns, so that any two can be compared. Raises EngineFailure."""
    knots = batch_knots(engines[0].info.batch_sizes[-1])
    budget_s = MEASURING_BUDGET_S * len(engines) / len(knots)
    return list(run_in_turns(engines, Pace(budget_s, 1.0, warm_up=1, fewest=3, most=50)))


def fastest(measured: Sequence[Rounds]) -> int:
    """Which engine is faster beyond doubt than all that are more exact and might serve; they come most exact first."""
    best = 0
    for own in range(1, len(measured[0].runs_ms)):
        # Held against the best so far: what beats a slow first one beyond doubt may beat that by noise alone.
        of_best, of_own = ([rounds.runs_ms[index] for rounds in measured] for index in (best, own))
        if is_beyond_doubt(paired_speedup(of_best, of_own)):
            best = own
    return best


def choose(candidates: list[Candidate], refused: list[str]) -> ProvedEngine:
    """The best of them, the first where others are hardly faster; `refused` gets a line for each of the others.

    Raises NotProved where there is none or the only one cannot be measured.
    """
    if not candidates:
        raise NotProved(NOTHING_SERVES)
    try:
        best, points = _winner(candidates)
    except EngineFailure as failure:
        if len(candidates) > 1:
            return choose(_sound(candidates, refused), refused)
        candidates[0].engine.close()
        raise NotProved(f"{candidates[0].variant.file}: {_fails(failure)}") from failure
    info = best.engine.info
    for one in candidates:
        if one is not best:
            one.engine.close()
            refused.append(_told(one, f"it is not faster than {info.engine} in {info.precision}"))
    best.engine.rest()
    platform = row_named(info.engine).platform
    return ProvedEngine(best.engine, best.canary, points, best.reason, platform, best.variant.file)


def _winner(candidates: list[Candidate]) -> tuple[Candidate, tuple[LatencyPoint, ...]]:
    """The best and its latencies: export's, where the only one was measured here, else new. Raises EngineFailure."""
    if len(candidates) == 1:
        (only,) = candidates
        if table := measured_here(only.variant, only.engine.info.device_fingerprint):
            return only, table.points
    measured = race([candidate.engine for candidate in candidates])
    best = fastest(measured)
    return candidates[best], tuple(summarise(rounds.batch_size, rounds.runs_ms[best]) for rounds in measured)


def _sound(candidates: list[Candidate], refused: list[str]) -> list[Candidate]:
    """Fewer of them: one that fails when it is measured does not take the others with it."""
    failures: dict[int, EngineFailure] = {}
    for one in candidates:
        try:
            race([one.engine])
        except EngineFailure as failure:
            failures[id(one)] = failure
    failures = failures or {id(candidates[-1]): EngineFailure("beside others")}
    for one in candidates:
        if id(one) in failures:
            one.engine.close()
            refused.append(_told(one, _fails(failures[id(one)])))
    return [one for one in candidates if id(one) not in failures]


def _fails(failure: EngineFailure) -> str:
    return f"it fails when it is measured: {failure}"


def _told(candidate: Candidate, why: str) -> str:
    info = candidate.engine.info
    return refusal(info.engine, info.device, f"{candidate.variant.file}: {why}")
