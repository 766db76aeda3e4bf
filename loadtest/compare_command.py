"""`convoy loadtest compare A.json B.json`: reads two runs, refuses what cannot be compared, shows the rest.

Knows the order of things, tables and words. Exit codes: 0 - compared, whatever came of it; 2 - a file cannot be read,
or the two are of different loads or void, and nobody said `--anyway`. Both by UsageError.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from convoy.loadtest.compare import KeptRun, RatioRow, different_loads, different_machines, no_figures, ratios, read_run
from convoy.models.errors import UsageError
from convoy.models.page.axis import number

SCHEMA_VERSION = 1
CAVEAT = (
    "Intervals hold with 95 % and cover what varies within a run, not what differs from one start of a server to the "
    "next: run each several times, in turn, before you rely on a small difference."
)
BRACKETS = "What stands behind a capacity's ratio is no confidence interval, but what the searches' brackets allow."
VERDICTS = {"higher": "B higher", "lower": "B lower", "no difference": "no difference can be told", None: "no interval"}


def compare(first: Path, second: Path, *, anyway: bool, as_json: bool, console: Console) -> None:
    """Prints the comparison. Raises UsageError."""
    a, b = read_run(first), read_run(second)
    notes = [*_objections(first, a, second, b)]
    if notes and not anyway:
        raise UsageError(f"{'; '.join(notes)}; compare sound runs of the same load, or say --anyway")
    notes += [
        f"the load was made differently: {difference}"
        for difference in [", ".join(different_machines(a, b))]
        if difference
    ]
    rows = ratios(a, b)
    if as_json:
        print(_document(first, second, rows, notes))
        return
    console.print(f"A: {_run(first, a)}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"B: {_run(second, b)}", markup=False, highlight=False, soft_wrap=True)
    console.print(_table(rows))
    for note in [*notes, *([BRACKETS] if any(row.bracket for row in rows) else [CAVEAT])]:
        console.print(f"Note: {note.rstrip('.')}.", markup=False, highlight=False, soft_wrap=True)


def _objections(first: Path, a: KeptRun, second: Path, b: KeptRun) -> list[str]:
    found = []
    differences = different_loads(a, b)
    if differences:
        found.append(f"{first} and {second} are of different loads: {', '.join(differences)}")
    for path, run in ((first, a), (second, b)):
        reason = no_figures(run)
        if reason is not None:
            found.append(f"the figures of {path} mean nothing: {reason}")
    return found


def _run(path: Path, run: KeptRun) -> str:
    stopped = ", stopped early" if run.interrupted else ""
    return f"{path}: {run.target.model} at {run.target.url}, {run.target.body} bodies{stopped}"


def _table(rows: list[RatioRow]) -> Table:
    """In less than 80 columns, with figures whole."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    with_steps = any(row.step for row in rows)
    if with_steps:
        table.add_column("step", no_wrap=True)
    table.add_column("figure", no_wrap=True)
    for heading in ("A", "B", "B / A", "bracket" if any(row.bracket for row in rows) else "95 %"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("told", min_width=len("no difference"))
    for row in rows:
        figures = ["–" if value is None else number(value) for value in (row.a, row.b)]
        ratio = "–" if row.ratio is None else f"{row.ratio:.3f}"
        around = "–" if row.interval is None else f"{row.interval.low:.3f} to {row.interval.high:.3f}"
        step = [row.step or "all"] if with_steps else []
        table.add_row(*step, row.figure, *figures, ratio, around, VERDICTS[row.told])
    return table


def _document(first: Path, second: Path, rows: list[RatioRow], notes: list[str]) -> str:
    told = [
        {
            **asdict(row),
            "interval": None if row.interval is None else [row.interval.low, row.interval.high],
            "told": row.told,
        }
        for row in rows
    ]
    content = {"schema_version": SCHEMA_VERSION, "a": str(first), "b": str(second), "rows": told, "notes": notes}
    return json.dumps(content, indent=2)
