"""How fast is each variant? Latency per batch size in the serving engine, variants taking turns.

Knows which variants can be compared on this device and how long that may take; the measuring itself is the
server's own (`convoy.app.engines.measure`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from convoy.app.engines.measure import Pace, batch_knots, latency_tables, run_in_turns
from convoy.export.profiling.busy import CpuWatch
from convoy.export.progress import Progress
from convoy.export.variants.variant import OpenVariant, OtherEngines
from convoy.models.bundle import LatencyTable

# A small network is measured in some seconds, and none for longer than a minute or two.
PACE = Pace(budget_s=0.7, limit_s=20.0, warm_up=2, fewest=7, most=300)


def measure_latencies(candidates: Sequence[OpenVariant], progress: Progress) -> tuple[LatencyTable | None, ...]:
    """One table per candidate, the first of which is the fp32 reference; points at batch sizes 1, 2, 4, ...

    None for a variant that is made for another device than the one that ran it: its time here says nothing.
    """
    here = [candidate for candidate in candidates if not candidate.is_twin]
    engines = [candidate.engine for candidate in here]
    measured = []
    watch = CpuWatch()
    with progress.step("measure latency", len(batch_knots(engines[0].info.batch_sizes[-1]))) as step:
        for rounds in run_in_turns(engines, PACE):
            measured.append(rounds)
            watch.look()
            step.advance()
    shares = watch.busy_shares(len(measured) + 1)
    timed = [_told(table, shares) for table in latency_tables(engines, measured)]
    tables = iter(timed)
    return tuple(None if candidate.is_twin else next(tables) for candidate in candidates)


@dataclass(frozen=True, slots=True)
class OtherLatencies:
    """One variant in the other engines of this machine: `refused_by` is as in `Variant`."""

    latencies: tuple[LatencyTable, ...] = ()
    refused_by: Mapping[str, str] = field(default_factory=dict)


def measured_everywhere(
    candidates: Sequence[OpenVariant], others: OtherEngines, progress: Progress
) -> tuple[tuple[LatencyTable | None, ...], tuple[OtherLatencies, ...]]:
    """The candidates' own tables, and for each what the other engines take, all in turns."""
    measured = measure_latencies([*candidates, *others.candidates], progress)
    own, rest = measured[: len(candidates)], measured[len(candidates) :]
    found: dict[Path, list[LatencyTable]] = {}
    for candidate, table in zip(others.candidates, rest, strict=True):
        if table is not None:
            found.setdefault(candidate.path, []).append(table)
    elsewhere = (
        OtherLatencies(tuple(found.get(one.path, ())), others.refused.get(one.recipe.file, {})) for one in candidates
    )
    return own, tuple(elsewhere)


def _told(table: LatencyTable, shares: Sequence[float | None]) -> LatencyTable:
    """With what others took of the CPUs while each point was measured."""
    points = zip(table.points, shares, strict=True)
    return replace(table, points=tuple(replace(point, others_share=share) for point, share in points))
