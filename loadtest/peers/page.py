"""The comparison as a page that people read: a table per load, and who is missing and why.

Knows Markdown. Draws no conclusions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from convoy.loadtest.peers.compare import Figures, Match, PairRatio, matches
from convoy.loadtest.peers.results import BodyKind, ClosedLoad, Results, write_text
from convoy.models.errors import JobError

# Where the tables go if nothing else is said.
MARK = "peers"
# In the order in which they stand there.
_TITLES: dict[BodyKind, str] = {
    "binary": "binary bodies",
    "json": "json bodies",
    "grpc": "gRPC calls",
    "ids": "binary bodies of 12 KB, each with an id of its own",
    "ids150k": "binary bodies of 150 KB, each with an id of its own",
    "png": "PNGs of 32x32",
    "jpeg340": "JPEGs of 340x256",
    "jpeg500": "JPEGs of 500x375",
}
_HEAD = (
    "| server | setting | pairs | requests/s | p50 ms | p99 ms | server CPU, us a request "
    "| Convoy's rate over its | its p50 over Convoy's | its CPU over Convoy's |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def replace_block(path: Path, name: str, text: str) -> None:
    """Puts `text` between the marks of `name`; a page that is not there yet gets nothing but that.

    Raises JobError where the page lacks the marks or cannot be written.
    """
    begin, end = f"<!-- measured: {name} -->", f"<!-- end of {name} -->"
    block = f"{begin}\n{text}\n{end}"
    if not path.exists():
        write_text(path, block + "\n")
        return
    before, found_begin, rest = path.read_text().partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise JobError(f"{path} has no lines {begin!r} and {end!r}, between which the figures go; add them")
    write_text(path, before + block + after)


def write_page(path: Path, block: str, results: Results) -> None:
    """Puts the tables into that block of the page.

    Raises JobError where it has no place for them or cannot be written.
    """
    replace_block(path, block, tables(results))


def tables(results: Results) -> str:
    """Everything that is measured, in Markdown."""
    found = matches(results.pairs)
    loads = sorted({match.load for match in found}, key=lambda load: (list(_TITLES).index(load.body), load.connections))
    parts = [_conditions(results)]
    if found:
        parts.append(_account(found, results))
    parts += [_load_table(load, [match for match in found if match.load == load], results) for load in loads]
    if results.failures:
        parts.append(_failures(results))
    notes = [f"- {results.conditions.titles[name]}: {note}." for name, note in results.conditions.notes.items() if note]
    if notes:
        parts.append("\n".join(notes))
    return "\n\n".join(parts)


def _conditions(results: Results) -> str:
    asked = results.conditions
    machine = asked.machine
    networks = ", ".join(f"{name} (sha256 {digest[:12]})" for name, digest in asked.networks.items())
    lines = [
        f"Measured on {asked.started_at} on {machine.cpu}, {machine.cores} cores shared with the load generator "
        f"({asked.generator}); load average at the start {machine.load_average:.2f}. "
        f"{asked.threads} engine thread{'s' if asked.threads > 1 else ''} each, {asked.rounds} pairs of "
        f"{asked.duration_s:g} s, {asked.rounds_per_start} a start after {asked.warm_up_s:g} s of warm-up, order drawn "
        f"with seed {asked.seed}. Networks: {networks}. Python {machine.python}."
    ]
    if results.interrupted:
        lines.append("**The comparison was stopped before its end; the rounds that it finished are shown.**")
    rows = [
        f"| {asked.titles[name]} | {', '.join(f'{package} {version}' for package, version in packages.items())} |"
        for name, packages in asked.versions.items()
    ]
    return "\n\n".join(lines) + "\n\n| server | versions |\n|---|---|\n" + "\n".join(rows)


def _account(found: Sequence[Match], results: Results) -> str:
    """How the rows came out, those that were lost by name."""
    lines = []
    for what, ratios in (
        ("rate", [one.rps_ratio for one in found]),
        ("CPU a request", [one.cpu_ratio for one in found]),
    ):
        by_verdict: dict[str, list[str]] = {"won": [], "lost": [], "open": []}
        for match, ratio in zip(found, ratios, strict=True):
            name = f"{results.conditions.titles[match.peer]} at {match.load.name}"
            by_verdict[ratio.verdict].append(name)
        named = [f"{verdict} {len(names)}" for verdict, names in by_verdict.items()]
        lost, undecided = by_verdict["lost"], by_verdict["open"]
        told = f" Lost: {', '.join(lost)}." * bool(lost) + f" Open: {', '.join(undecided)}." * bool(undecided)
        lines.append(f"- By {what}, of {len(found)} rows Convoy has {', '.join(named)}.{told}")
    return "\n".join(lines)


def _load_table(load: ClosedLoad, found: Sequence[Match], results: Results) -> str:
    title = f"### {_TITLES[load.body]}, {load.connections} connection{'s' if load.connections > 1 else ''}"
    ours = Figures.of([pair.ours for pair in results.pairs if pair.load == load])
    rows = [_row("Convoy", "untouched", "-", ours) + " - | - | - |"]
    for match in sorted(found, key=lambda one: one.rps_ratio.median):
        row = _row(results.conditions.titles[match.peer], match.setting.title, str(match.pairs), match.theirs)
        rows.append(f"{row} {_ratio(match.rps_ratio)} | {_ratio(match.p50_ratio)} | {_ratio(match.cpu_ratio)} |")
    readings = [reading for pair in results.pairs if pair.load == load for reading in (pair.ours, pair.theirs)]
    generator_us = Figures.of(readings).generator_cpu_us
    cost = (
        f"The load generator spent {generator_us.low:.0f} to {generator_us.high:.0f} us of CPU a request, "
        f"{generator_us.median:.0f} in the middle."
    )
    return f"{title}\n\n{_HEAD}\n" + "\n".join(rows) + f"\n\n{cost}"


def _row(title: str, setting: str, pairs: str, figures: Figures) -> str:
    rate = f"{figures.rps.median:,.0f}" + (f" ({figures.failed} failed)" if figures.failed else "")
    latencies = f"{figures.p50_ms.median:.2f} | {figures.p99_ms.median:.2f}"
    return f"| {title} | {setting} | {pairs} | {rate} | {latencies} | {figures.server_cpu_us.median:.0f} |"


def _ratio(found: PairRatio) -> str:
    verdict = found.verdict if found.has_bounds else "too few pairs"
    return f"**{found.median:.2f}** ({found.low:.2f} to {found.high:.2f}), {verdict}"


def _failures(results: Results) -> str:
    titles = results.conditions.titles
    rows = [
        f"- {titles.get(one.peer, one.peer)} ({one.stage}): {' '.join(one.reason.split())}" for one in results.failures
    ]
    return "### What could not be measured\n\n" + "\n".join(rows)
