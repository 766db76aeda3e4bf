"""How fast is each variant? Latency per batch size in the serving engine, variants taking turns.

Knows which variants can be compared on this device and how long that may take; the measuring itself is the
server's own (`convoy.app.engines.measure`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from convoy.app.engines.measure import Pace, batch_knots, latency_tables, run_in_turns
from convoy.export.profiling.busy import CpuWatch
from convoy.export.progress import Progress
from convoy.export.variants.variant import OpenVariant
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
    tables = dict(zip((candidate.path for candidate in here), timed, strict=True))
    return tuple(tables.get(candidate.path) for candidate in candidates)


def _told(table: LatencyTable, shares: Sequence[float | None]) -> LatencyTable:
    """With what others took of the CPUs while each point was measured."""
    points = zip(table.points, shares, strict=True)
    return replace(table, points=tuple(replace(point, others_share=share) for point, share in points))
