"""The part of a page that shows the table of hard networks, between two marks. Knows the Markdown, measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from convoy.export.hard_networks.rows import ENOUGH, HardRow, HardTable
from convoy.export.zoo_table.kept import shown_tools, table_head, table_line
from convoy.models.checkpoint import write_whole

BEGIN, END = "<!-- written by `make hard-networks` -->", "<!-- end of the hard networks -->"
_HEAD = ("network", "epochs", "minutes", "fp32", "INT8 loses", "at most (95 %)", "in INT8", "kept in float")
_SPEED = ("speed", "INT8 in", "fp32 in", "goal")


def write_page(table: HardTable, networks: Sequence[str], path: Path) -> None:
    """Put the table between the marks of the page, at its end where there are none. Raises JobError where the disk does
    not take it."""
    text = path.read_text() if path.exists() else "# Hard networks\n"
    before, mark, rest = text.partition(BEGIN)
    after = rest.partition(END)[2] if mark else "\n"
    part = f"{BEGIN}\n{render(table, networks)}{END}"
    write_whole(path, (before + ("" if mark else "\n") + part + after).encode())


def render(table: HardTable, networks: Sequence[str]) -> str:
    """The table with a line for each of `networks`, also for those that were not tried yet."""
    rows = [table.find(name) for name in networks]
    reached = sum(row is not None and not row.misses() for row in rows)
    machines = sorted(
        {f"{row.machine}; {shown_tools(row.versions or {})}" for row in rows if row is not None and row.machine}
    )
    lines = [
        f"{reached} of {len(networks)} reach the goal, {ENOUGH} are to.",
        "",
        *table_head(*_HEAD, *_SPEED),
        *(table_line(*_cells(name, row)) for name, row in zip(networks, rows, strict=True)),
        "",
        *_reasons([row for row in rows if row is not None]),
        *(f"Machine: {machine}." for machine in machines),
    ]
    return "\n".join(lines) + "\n"


def _cells(name: str, row: HardRow | None) -> tuple[str, ...]:
    if row is None:
        return (name, *["-"] * (len(_HEAD) + len(_SPEED) - 2), "not run yet")
    misses = row.misses()
    return (
        name,
        str(row.epochs),
        f"{row.training_minutes:.1f}",
        "-" if row.accuracy is None else f"{100 * row.accuracy:.2f} %",
        "-" if row.loss_points is None else f"{row.loss_points:.2f}",
        "-" if row.loss_bound_points is None else f"{row.loss_bound_points:.2f}",
        "-" if row.int8_share is None else f"{100 * row.int8_share:.0f} %",
        str(row.layers_kept),
        "-" if row.speedup is None else f"{row.speedup.median:.2f} ({row.speedup.low:.2f} to {row.speedup.high:.2f})",
        row.engine or "-",
        row.fp32_engine or "-",
        "reached" if not misses else "no: " + "; ".join(misses),
    )


def _reasons(rows: Sequence[HardRow]) -> list[str]:
    """What the export says of each INT8 file that may not serve."""
    said = [f"- {row.network}: {row.why}." for row in rows if row.why]
    return ["Not served:", "", *said, ""] if said else []
