"""The command line: `python -m convoy.loadtest.scale --help`."""

from __future__ import annotations

import json as json_text
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from convoy.loadtest.peers import conditions
from convoy.loadtest.peers.forms import MODEL
from convoy.loadtest.peers.generator import choose_generator
from convoy.loadtest.peers.network import ensure_networks
from convoy.loadtest.peers.page import replace_block
from convoy.loadtest.peers.results import write_text
from convoy.loadtest.scale.forms import FORMS, PLAIN
from convoy.loadtest.scale.measure import CONNECTIONS, ScalePair, ScaleStand, ScaleTrial
from convoy.models.errors import ConvoyError

HOME = Path("build/peers")
MARK = "scale"


def main(
    rounds: Annotated[int, typer.Option(help="Rounds of pairs.", min=1)] = 3,
    duration: Annotated[float, typer.Option(help="Seconds of each measurement.", min=1)] = 3.0,
    home: Annotated[Path, typer.Option(help="Where the model is kept.")] = HOME,
    model: Annotated[Path | None, typer.Option(help="ONNX file to serve instead of the CIFAR CNN.")] = None,
    add: Annotated[bool, typer.Option("--add", help="To what the file has, measured in the same way.")] = False,
    json: Annotated[Path, typer.Option(help="File for everything measured.")] = HOME / "scale.json",
    page: Annotated[Path | None, typer.Option(help="Page to put the table into.")] = None,
) -> None:
    """Measure what Convoy costs behind Ray Serve. The machine must have nothing else to do."""
    console = Console()
    generator = choose_generator("wrk")
    kept, machine = _kept(json if add else None), conditions.machine()
    kept["machine"], kept["load_average"] = asdict(machine), max(kept.get("load_average", 0.0), machine.load_average)
    with tempfile.TemporaryDirectory(prefix="convoy-scale-") as folder:
        network = ensure_networks({"binary"}, home, model, Path(folder))["binary"]
        stand = ScaleStand(network.store, MODEL, generator, Path(folder), duration)
        before = _rounds(kept)
        for number in range(before, before + rounds):
            kept["pairs"] += [asdict(pair) for pair in stand.round(number, console.print)]
            kept["measured"], kept["generator"] = conditions.now(), generator.title
            write_text(json, json_text.dumps(kept, indent=1) + "\n")
    table = scale_table([ScalePair(ScaleTrial(**one["plain"]), ScaleTrial(**one["other"])) for one in kept["pairs"]])
    print(table)
    if page is not None:
        replace_block(page, MARK, f"{_conditions(kept)}\n\n{table}")


def _kept(file: Path | None) -> dict[str, Any]:
    """What an earlier call has measured in the same way."""
    if file is not None and file.exists():
        found: dict[str, Any] = json_text.loads(file.read_text())
        return found
    return {"pairs": []}


def _rounds(kept: dict[str, Any]) -> int:
    return len(kept["pairs"]) // (len(CONNECTIONS) * (len(FORMS) - 1))


def _conditions(kept: dict[str, Any]) -> str:
    machine = kept["machine"]
    rounds = _rounds(kept)
    busy = kept["load_average"]
    # Ray's processes cost something by the second as well, which weighs more where fewer requests come through.
    noise = (
        f" The machine was busy with other work (load average {busy:.0f}): compare rows, and no more."
        if busy > 1
        else ""
    )
    return (
        f"{machine['cpu']}, {machine['cores']} cores; {kept['generator']}; bodies of 12 KB; "
        f"medians of {rounds} rounds of pairs. CPU: user and system time of all processes of the form, the generator "
        f"left out; times: of `convoy serve` in the same pair.{noise}"
    )


def scale_table(pairs: list[ScalePair]) -> str:
    """Medians over the pairs of each form and number of connections, in Markdown."""
    lines = [
        "| form | connections | requests a second | CPU a request | times | p50 | p99 |",
        "|---|---|---|---|---|---|---|",
    ]
    for form in FORMS:
        for connections in CONNECTIONS:
            own = [pair for pair in pairs if form in (PLAIN,) or pair.other.form == form.name]
            own = [pair for pair in own if pair.plain.connections == connections]
            if not own:
                continue
            trials = [pair.plain if form is PLAIN else pair.other for pair in own]
            times = statistics.median(trial.cpu_us / pair.plain.cpu_us for trial, pair in zip(trials, own, strict=True))
            rps, cpu, p50, p99 = (
                statistics.median(getattr(trial, name) for trial in trials)
                for name in ("rps", "cpu_us", "p50_ms", "p99_ms")
            )
            lines.append(
                f"| {form.title} | {connections} | {rps:,.0f} | {cpu:,.0f} µs | {times:.2f} "
                f"| {p50:.1f} ms | {p99:.1f} ms |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        typer.run(main)
    except ConvoyError as error:
        print(f"convoy: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
