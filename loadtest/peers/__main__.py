"""The command line of the comparison: `python -m convoy.loadtest.peers --help`."""

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from convoy.loadtest.peers.campaign import Effort
from convoy.loadtest.peers.command import EXIT_INTERRUPTED, Options, run
from convoy.loadtest.peers.definition import KNOWN
from convoy.loadtest.peers.page import MARK
from convoy.loadtest.peers.plan import LOADS
from convoy.models.errors import ConvoyError

HOME = Path("build/peers")
_LOADS = ",".join(load.name for load in LOADS)


def main(
    peers: Annotated[str, typer.Option(help="Whom to compare with, by folder.")] = ",".join(KNOWN),
    loads: Annotated[str, typer.Option(help="Which loads.")] = _LOADS,
    peers_from: Annotated[Path | None, typer.Option(help="Folder with further peers.")] = None,
    home: Annotated[Path, typer.Option(help="Where environments and the model are kept.")] = HOME,
    model: Annotated[Path | None, typer.Option(help="ONNX file to serve instead of the CIFAR CNN.")] = None,
    threads: Annotated[int, typer.Option(help="Engine threads of every server.", min=1)] = 1,
    generator: Annotated[str, typer.Option(help="auto, wrk or own.")] = "auto",
    convoy_options: Annotated[str, typer.Option(help="Words for `convoy serve`; none leaves it untouched.")] = "",
    rounds: Annotated[int, typer.Option(help="Pairs per peer and load.", min=1)] = 15,
    rounds_per_start: Annotated[int, typer.Option(help="Pairs before both are started anew.", min=1)] = 5,
    duration: Annotated[float, typer.Option(help="Seconds of each measurement.", min=0.1)] = 3.0,
    sweep: Annotated[float, typer.Option(help="Seconds of each trial of a setting.", min=0.1)] = 1.0,
    sweep_rounds: Annotated[int, typer.Option(help="Trials of each setting.", min=1)] = 2,
    warm_up: Annotated[float, typer.Option(help="Seconds of load after each start.", min=0.1)] = 1.0,
    seed: Annotated[int, typer.Option(help="Of samples and order.")] = 0,
    json: Annotated[Path, typer.Option(help="File for everything measured.")] = HOME / "peers.json",
    page: Annotated[Path | None, typer.Option(help="Page to put the tables into.")] = None,
    block: Annotated[str, typer.Option(help="Between which marks of the page.")] = MARK,
) -> None:
    """Measure Convoy beside its peers. The machine must have nothing else to do."""
    if generator not in ("auto", "wrk", "own"):
        raise typer.BadParameter("must be auto, wrk or own", param_hint="--generator")
    by_name = {load.name: load for load in LOADS}
    asked = [name.strip() for name in loads.split(",") if name.strip()]
    if not asked or not by_name.keys() >= set(asked):
        raise typer.BadParameter(f"must be some of {', '.join(by_name)}", param_hint="--loads")
    options = Options(
        peers=tuple(name.strip() for name in peers.split(",") if name.strip()),
        loads=tuple(by_name[name] for name in asked),
        peers_from=peers_from,
        home=home,
        model=model,
        threads=threads,
        generator=generator,  # type: ignore[arg-type]  # one of the three, as was just seen
        convoy_options=convoy_options,
        effort=Effort(sweep, sweep_rounds, duration, rounds, rounds_per_start, seed),
        warm_up_s=warm_up,
        json_file=json,
        page=page,
        block=block,
    )
    # Whoever ends the comparison with a plain kill gets what Ctrl-C gets: no server stays behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = run(options, Console())
    except ConvoyError as error:
        print(f"peers: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    raise typer.Exit(code)


if __name__ == "__main__":
    typer.run(main)
