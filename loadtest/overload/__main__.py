"""The command line: `python -m convoy.loadtest.overload --help`."""

from __future__ import annotations

import json as json_text
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console

from convoy.loadtest.endpoint import find_endpoint
from convoy.loadtest.overload.measure import TIMES_OVER, Company, Offered, Overload, OverloadStand
from convoy.loadtest.overload.mix import largest, mixed
from convoy.loadtest.peers import conditions
from convoy.loadtest.peers.ceiling import HOME, SUBJECTS, ensure_bundle, is_ready
from convoy.loadtest.peers.compare import PairRatio, Spread
from convoy.loadtest.peers.contender import convoy_launch
from convoy.loadtest.peers.page import replace_block
from convoy.loadtest.peers.results import write_text
from convoy.loadtest.peers.server import free_ports, serving
from convoy.models.errors import ConvoyError, JobError

MARK = "overload"
Row = TypeVar("Row")
SUBJECT = SUBJECTS[0]


def measure(
    home: Path, rounds: int, seconds: float, slo_ms: float, console: Console
) -> tuple[list[Overload], list[Company]]:
    """The rounds so far at Ctrl-C. Raises JobError where the network cannot be exported or served."""
    ensure_bundle(SUBJECT, home)
    ports, overloads, companies = free_ports(), list[Overload](), list[Company]()
    with (
        tempfile.TemporaryDirectory(prefix="convoy-overload-", ignore_cleanup_errors=True) as folder,
        serving("Convoy", convoy_launch(home / "store", ports, ()), ports.http, Path(folder), is_ready) as server,
    ):
        stand = OverloadStand(server, find_endpoint(server.url), SUBJECT.network, slo_ms, seconds, mixed(), largest())
        closed_rps = stand.warm_up()
        console.print(f"a closed loop gets {closed_rps:.0f} requests/s", highlight=False)
        try:
            for number in range(rounds):
                overloads.append(stand.overload(closed_rps))
                console.print(
                    f"goodput at {TIMES_OVER:g} times: {overloads[-1].share:.2f} of the peak", highlight=False
                )
                companies.append(stand.company(beside_first=number % 2 == 1))
                console.print(f"p99 beside large ones: {companies[-1].times:.2f} times", highlight=False)
        except (KeyboardInterrupt, JobError) as error:
            console.print(f"stopped ({error or 'Ctrl-C'}); writing what was measured so far", markup=False)
    return overloads, companies


def overload_tables(overloads: Sequence[Overload], companies: Sequence[Company]) -> str:
    """Medians over the rounds, in Markdown; of how late the generator was the worst."""
    around, over = [rate for one in overloads for rate in one.around], [one.over for one in overloads]
    lines = [
        "| offered | requests/s | answered within the objective, a second | refused (429, 503, 504) | lost "
        "| server CPU, us a good answer | sent late, p99 ms |",
        "|---|--:|--:|--:|--:|--:|--:|",
        _offered_row("where most are good", [one.peak for one in overloads], around) if overloads else "",
        _offered_row(f"{TIMES_OVER:g} times as many", over, over) if overloads else "",
        "",
        f"Of the highest goodput is left: {_ratio([one.share for one in overloads])}." if overloads else "",
    ]
    if overloads:
        spread = PairRatio.of([one.refusal_us for one in overloads])
        lines += [
            "",
            f"A refusal costs {spread.median:,.0f} us of the server's CPU ({spread.low:,.0f} to {spread.high:,.0f}): "
            "the same pictures, all of which come after their deadline.",
        ]
    if companies:
        middle = _medians(companies)
        lines += [
            "",
            "| small pictures | p50 ms | p99 ms | sent late, p99 ms |",
            "|---|--:|--:|--:|",
            f"| alone | {middle(lambda one: one.alone_p50_ms):.2f} | {middle(lambda one: one.alone_p99_ms):.2f} "
            f"| {max(one.alone_sent_late_ms for one in companies):.1f} |",
            f"| beside {middle(lambda one: one.large_rps):.1f} large ones a second "
            f"| {middle(lambda one: one.beside_p50_ms):.2f} | {middle(lambda one: one.beside_p99_ms):.2f} "
            f"| {max(one.beside_sent_late_ms for one in companies):.1f} |",
            "",
            f"Their p99 is {_ratio([one.times for one in companies])} times that of alone.",
        ]
    return "\n".join(lines)


def _offered_row(title: str, found: Sequence[Offered], tried: Sequence[Offered]) -> str:
    middle = _medians(found)
    refused = middle(lambda one: 100 * one.refused / max(1, one.offered))
    return (
        f"| {title} | {middle(lambda one: one.rate):,.0f} | {middle(lambda one: one.good_rps):,.0f} "
        f"| {refused:.0f} % | {sum(one.lost for one in found)} | {middle(lambda one: one.cpu_us):,.0f} "
        f"| {max(one.sent_late_ms for one in tried):.1f} |"
    )


def _medians(found: Sequence[Row]) -> Callable[[Callable[[Row], float]], float]:
    return lambda value: Spread.of([value(one) for one in found]).median


def _ratio(ratios: Sequence[float]) -> str:
    found = PairRatio.of(ratios)
    return f"**{found.median:.2f}** ({found.low:.2f} to {found.high:.2f})"


def main(
    rounds: Annotated[int, typer.Option(help="Rounds.", min=1)] = 15,
    duration: Annotated[float, typer.Option(help="Seconds of each rate; a p99 needs twelve.", min=12)] = 12.0,
    slo: Annotated[float, typer.Option(help="Milliseconds within which an answer is good; its deadline.")] = 500.0,
    home: Annotated[Path, typer.Option(help="Where the network is kept.")] = HOME,
    json: Annotated[Path, typer.Option(help="File for everything measured.")] = HOME / "overload.json",
    page: Annotated[Path | None, typer.Option(help="Page to put the tables into.")] = None,
) -> None:
    """Measure pictures in overload, and a small one beside large ones. The machine must have nothing else to do."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        machine, started_at, console = conditions.machine(), conditions.now(), Console()
        overloads, companies = measure(home, rounds, duration, slo, console)
        found = {"overload": [asdict(one) for one in overloads], "company": [asdict(one) for one in companies]}
        document = {"started_at": started_at, "machine": asdict(machine), "slo_ms": slo}
        write_text(json, json_text.dumps(document | found, indent=1) + "\n")
        tables = overload_tables(overloads, companies)
        console.print(tables, markup=False, soft_wrap=True)
        if page is not None:
            where = f"Measured on {started_at} on {machine.cpu}, {machine.cores} cores that the generator shares"
            how = f"load average at the start {machine.load_average:.2f}"
            times = f"{len(companies)} rounds of {duration:g} s a rate, an objective of {slo:g} ms, {SUBJECT.network}"
            replace_block(page, MARK, f"{where}, {how}; {times}.\n\n{tables}")
    except ConvoyError as error:
        print(f"overload: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from error


if __name__ == "__main__":
    typer.run(main)
