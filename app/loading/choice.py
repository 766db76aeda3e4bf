"""Which of the engines that are right serves on a device: all are measured in turns, and all but one are closed.

Knows engines that have proved themselves, and how it is told why one does not serve; opens none.
"""

from __future__ import annotations

from convoy.app.engines.batch import EngineFailure
from convoy.app.engines.jobs import NotProved, refusal
from convoy.app.engines.measure import summarise
from convoy.app.engines.select import measured_here
from convoy.app.engines.table import row_named
from convoy.app.loading.proving import Candidate, ProvedEngine, fastest, race
from convoy.models.bundle import LatencyPoint

NOTHING_SERVES = "no variant serves"


def choose(candidates: list[Candidate], refused: list[str]) -> ProvedEngine:
    """The best of them, the first where others are hardly faster; `refused` is told of the others.

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
    failures = {id(one): failure for one in candidates if (failure := _failure(one)) is not None}
    if not failures:
        failures = {id(candidates[-1]): EngineFailure("beside others")}
    for one in candidates:
        if id(one) in failures:
            one.engine.close()
            refused.append(_told(one, _fails(failures[id(one)])))
    return [one for one in candidates if id(one) not in failures]


def _failure(candidate: Candidate) -> EngineFailure | None:
    try:
        race([candidate.engine])
    except EngineFailure as failure:
        return failure
    return None


def _fails(failure: EngineFailure) -> str:
    return f"it fails when it is measured: {failure}"


def _told(candidate: Candidate, why: str) -> str:
    info = candidate.engine.info
    return refusal(info.engine, info.device, f"{candidate.variant.file}: {why}")
