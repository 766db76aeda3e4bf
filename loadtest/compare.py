"""`convoy loadtest compare A.json B.json`: which figures differ significantly?

Reads two files of `--json`. Exit codes: 0 - compared; 2 - a file cannot be read, or, without `--anyway`, the loads
differ or a run is not valid. Errors are raised as UsageError.

The ratio of a figure is B / A. Its interval combines the intervals of both runs: on the logarithmic scale, the
half-widths on each side are added in quadrature (MOVER: Zou and Donner, Statistics in Medicine 27(10), 2008), which
keeps asymmetric intervals asymmetric. The difference is significant if the interval excludes 1. Intervals cover the
variation within a run, not between starts of the server.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from convoy.loadtest.statistics import ConfidenceInterval
from convoy.models.errors import UsageError
from convoy.models.page.axis import number

Bounds = tuple[float, float]


class KeptOptions(msgspec.Struct):
    """The options that define the load. Fields with a default may be missing in older files."""

    rate: float | None
    steps: tuple[float, ...]
    concurrency: int | None
    find_capacity: bool
    slo_ms: float | None
    arrivals: str
    burst_on_s: float
    burst_off_s: float
    deadline_ms: float | None = None
    images: str | None = None


class KeptTarget(msgspec.Struct):
    url: str
    model: str
    body: str
    protocol: str = "http"


class KeptFigures(msgspec.Struct):
    """The figures of a run or step, with 95 % intervals."""

    void: str | None
    throughput_rps: float
    throughput_rps_95: Bounds | None
    goodput: float | None
    goodput_95: Bounds | None
    latency_ms: dict[str, float | None]
    latency_ms_95: dict[str, Bounds | None]


class KeptRow(KeptFigures, kw_only=True):
    name: str
    rate: float | None


class KeptCapacity(msgspec.Struct):
    sustained_rps: float | None
    failed_rps: float | None
    ending: str


class KeptUse(msgspec.Struct):
    cpu_ms_per_answer: float | None
    cpu_ms_per_answer_95: Bounds | None
    peak_mib: float


class KeptRun(KeptFigures, kw_only=True):
    schema_version: int
    environment: dict[str, object]
    target: KeptTarget
    options: KeptOptions
    interrupted: bool
    rows: list[KeptRow]
    capacity: KeptCapacity | None
    server_use: KeptUse | None = None


def read_run(path: Path) -> KeptRun:
    """Read a file. Raises UsageError for anything but a file of `convoy loadtest --json`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=KeptRun)
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); give a file of `convoy loadtest --json`") from None
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path} is not a file of `convoy loadtest --json`: {error}") from None


Told = Literal["higher", "lower", "no difference"]
# Differences of the load generator's machine that are reported.
MACHINE = ("platform", "machine", "cores_allowed", "python", "convoy")


@dataclass(frozen=True, slots=True)
class RatioRow:
    """One figure of both runs. `step` is "" for the whole run.

    `ratio` is B / A; None if one figure is missing or 0. `interval` is None if one of them has none. A `bracket` is not
    a confidence interval, but what the brackets of the two searches allow.
    """

    step: str
    figure: str
    a: float | None
    b: float | None
    ratio: float | None
    interval: ConfidenceInterval | None
    bracket: bool = False

    @property
    def told(self) -> Told | None:
        """How B compares with A; None without an interval."""
        if self.interval is None:
            return None
        if self.interval.low > 1:
            return "higher"
        return "lower" if self.interval.high < 1 else "no difference"


def different_loads(a: KeptRun, b: KeptRun) -> list[str]:
    """The differences between the loads; empty if the runs can be compared."""
    ours, theirs = _load(a), _load(b)
    found = [(name, ours.get(name, "none"), theirs.get(name, "none")) for name in {**ours, **theirs}]
    return [f"{name} {one} and {other}" for name, one, other in found if one != other]


def no_figures(run: KeptRun) -> str | None:
    """Why a run is not valid; None if it is valid."""
    if run.options.find_capacity:
        ending = run.capacity.ending if run.capacity is not None else "none"
        return None if ending == "bracketed" else f"no capacity was found ({ending})"
    voids = [row.void for row in run.rows if row.void is not None]
    return run.void or (voids[0] if voids else None)


def different_machines(a: KeptRun, b: KeptRun) -> list[str]:
    """The differences between the machines of the load generators."""
    sides = [(name, a.environment.get(name), b.environment.get(name)) for name in MACHINE]
    return [f"{name.replace('_', ' ')} {one} and {other}" for name, one, other in sides if one != other]


def ratios(a: KeptRun, b: KeptRun) -> list[RatioRow]:
    """The ratio of every figure that both runs have; of two searches, only that of the capacities."""
    if a.options.find_capacity and b.options.find_capacity:
        return list(_capacities(a, b))
    alike = a.options.slo_ms == b.options.slo_ms
    rows = [*_figures("", a, b, alike), *_uses(a, b)]
    if len(a.rows) > 1 and len(b.rows) > 1:
        others = {row.rate: row for row in b.rows}
        for row in a.rows:
            if row.rate in others:
                rows += _figures(f"{row.rate:g}/s", row, others[row.rate], alike)
    return rows


def ratio_bounds(a: float, around_a: Bounds, b: float, around_b: Bounds) -> ConfidenceInterval | None:
    """The interval of b / a, from the 95 % interval of each; None if one reaches 0."""
    if min(a, b, *around_a, *around_b) <= 0:
        return None
    # A bootstrap interval may exclude its own figure by a hair; then that side has no width.
    down_a, up_a = (max(0.0, math.log(a / around_a[0])), max(0.0, math.log(around_a[1] / a)))
    down_b, up_b = (max(0.0, math.log(b / around_b[0])), max(0.0, math.log(around_b[1] / b)))
    centre = math.log(b / a)
    return ConfidenceInterval(math.exp(centre - math.hypot(down_b, up_a)), math.exp(centre + math.hypot(up_b, down_a)))


def _load(run: KeptRun) -> dict[str, str]:
    options, found = run.options, {"bodies": run.target.body, "protocol": run.target.protocol}
    if options.find_capacity:
        found |= {"search for a capacity": "one", "objective in ms": f"{options.slo_ms}"}
    elif options.steps:
        found["steps"] = ",".join(f"{rate:g}" for rate in options.steps)
    elif options.rate is not None:
        found["rate"] = f"{options.rate:g}"
    else:
        found["clients"] = f"{options.concurrency}"
    if options.steps or options.rate is not None:
        found["arrivals"] = options.arrivals
        if options.arrivals == "bursts":
            found["bursts"] = f"{options.burst_on_s:g} s of {options.burst_on_s + options.burst_off_s:g} s"
    for name, value in (("deadline in ms", options.deadline_ms), ("images", options.images)):
        if value is not None:
            found[name] = str(value)
    return found


def _figures(step: str, a: KeptFigures, b: KeptFigures, same_objective: bool) -> Iterator[RatioRow]:
    yield _row(step, "successful/s", a.throughput_rps, a.throughput_rps_95, b.throughput_rps, b.throughput_rps_95)
    if same_objective and a.goodput is not None and b.goodput is not None:
        yield _row(step, "in time", a.goodput, a.goodput_95, b.goodput, b.goodput_95)
    for name, ours in a.latency_ms.items():
        theirs = b.latency_ms.get(name)
        if name.startswith("p") and ours is not None and theirs is not None:
            yield _row(step, f"{name}, ms", ours, a.latency_ms_95.get(name), theirs, b.latency_ms_95.get(name))


def _uses(a: KeptRun, b: KeptRun) -> Iterator[RatioRow]:
    ours, theirs = a.server_use, b.server_use
    if ours is None or theirs is None:
        return
    yield _row(
        "",
        "CPU per request, ms",
        ours.cpu_ms_per_answer,
        ours.cpu_ms_per_answer_95,
        theirs.cpu_ms_per_answer,
        theirs.cpu_ms_per_answer_95,
    )
    yield _row("", "memory, MiB", ours.peak_mib, None, theirs.peak_mib, None)


def _row(
    step: str, figure: str, a: float | None, around_a: Bounds | None, b: float | None, around_b: Bounds | None
) -> RatioRow:
    if not a or not b:
        return RatioRow(step, figure, a, b, None, None)
    interval = ratio_bounds(a, around_a, b, around_b) if around_a and around_b else None
    return RatioRow(step, figure, a, b, b / a, interval)


def _capacities(a: KeptRun, b: KeptRun) -> Iterator[RatioRow]:
    brackets = [(run.capacity.sustained_rps, run.capacity.failed_rps) for run in (a, b) if run.capacity is not None]
    (low_a, high_a), (low_b, high_b) = brackets
    if low_a is None or low_b is None:
        yield RatioRow("", "capacity/s", low_a, low_b, None, None, bracket=True)
        return
    within = ConfidenceInterval(low_b / high_a, high_b / low_a) if high_a and high_b else None
    yield RatioRow("", "capacity/s", low_a, low_b, low_b / low_a, within, bracket=True)


SCHEMA_VERSION = 1
CAVEAT = (
    "95 % intervals cover the variation within a run, not between starts of the server. Repeat both runs in turn "
    "before you rely on a small difference."
)
BRACKETS = (
    "The range of a capacity's ratio is not a confidence interval, but the limits from the two searches' brackets."
)
VERDICTS = {"higher": "B higher", "lower": "B lower", "no difference": "not significant", None: "no interval"}


def compare(first: Path, second: Path, *, anyway: bool, as_json: bool, console: Console) -> None:
    """Print the comparison. Raises UsageError."""
    a, b = read_run(first), read_run(second)
    notes = [*_objections(first, a, second, b)]
    if notes and not anyway:
        raise UsageError(f"{'; '.join(notes)}; compare valid runs of the same load, or use --anyway")
    notes += [
        f"the load generators differ: {difference}"
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
        found.append(f"{first} and {second} have different loads: {', '.join(differences)}")
    for path, run in ((first, a), (second, b)):
        reason = no_figures(run)
        if reason is not None:
            found.append(f"{path} is not valid: {reason}")
    return found


def _run(path: Path, run: KeptRun) -> str:
    stopped = ", stopped early" if run.interrupted else ""
    return f"{path}: {run.target.model} at {run.target.url}, {run.target.body} bodies{stopped}"


def _table(rows: list[RatioRow]) -> Table:
    """In less than 80 columns, without cut figures."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    with_steps = any(row.step for row in rows)
    if with_steps:
        table.add_column("step", no_wrap=True)
    table.add_column("figure", no_wrap=True)
    for heading in ("A", "B", "B / A", "bracket" if any(row.bracket for row in rows) else "95 %"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("result", min_width=len("not significant"))
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
