"""How much of the bare engine and decoder is left over HTTP: `python -m convoy.loadtest.peers.ceiling`.

Three networks of torchvision with random weights, which cost what trained ones cost: two asked with JPEGs, one with
tensors. Server, engine and decoder take turns on the same cores; the server is up, and idle, while the others run.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import httpx
import typer
from rich.console import Console

from convoy.loadtest.bodies import Input, Payload, binary_payloads, infer_path, predictions_path
from convoy.loadtest.peers import conditions
from convoy.loadtest.peers.bare import Bare, open_bare
from convoy.loadtest.peers.bound import Round, bound_table
from convoy.loadtest.peers.contender import convoy_launch
from convoy.loadtest.peers.generator import Generator, Salvo, choose_generator, write_requests
from convoy.loadtest.peers.network import convoy
from convoy.loadtest.peers.page import replace_block
from convoy.loadtest.peers.pictures import jpegs
from convoy.loadtest.peers.results import write_text
from convoy.loadtest.peers.server import RunningServer, free_ports, serving
from convoy.loadtest.peers.stand import reading_of
from convoy.models.errors import ConvoyError, UsageError

HOME = Path("build/peers/ceiling")
MARK = "ceiling"
MAX_BATCH = 16
# Twice a full batch: one computes while the next one gathers.
CONNECTIONS = 2 * MAX_BATCH
_WARM_UP_S = 2.0
# What a camera's picture is after somebody made it small for the web; the shorter side is what networks resize to.
_PICTURE = (340, 256)
_FACTORY = """import torch
import torchvision


def network():
    torch.manual_seed(0)
    return torchvision.models.{name}(weights=None)
"""


@dataclass(frozen=True, slots=True)
class Subject:
    """A network, and what its requests carry."""

    network: str
    body: Literal["jpeg", "tensor"]

    def requests(self) -> tuple[str, list[Payload]]:
        """The route and the bodies."""
        if self.body == "jpeg":
            return predictions_path(self.network), [
                Payload(picture, (("Content-Type", "image/jpeg"),)) for picture in jpegs(_PICTURE)
            ]
        return infer_path(self.network), binary_payloads([Input("images", "UINT8", (-1, 224, 224, 3))], 0)


SUBJECTS = (Subject("mobilenet_v3_small", "jpeg"), Subject("resnet18", "jpeg"), Subject("resnet50", "tensor"))
NETWORKS = [subject.network for subject in SUBJECTS]


def measure(
    subjects: tuple[Subject, ...], home: Path, rounds: int, seconds: float, generator: Generator, console: Console
) -> list[Round]:
    """The rounds so far at Ctrl-C. Raises JobError where a network cannot be exported or served."""
    bundles = [ensure_bundle(subject, home) for subject in subjects]
    bare = {subject: open_bare(bundle) for subject, bundle in zip(subjects, bundles, strict=True)}
    lots, done = random.Random(0), list[Round]()
    ports = free_ports()
    launch = convoy_launch(home / "store", ports, ())
    with (
        tempfile.TemporaryDirectory(prefix="convoy-peers-", ignore_cleanup_errors=True) as temporary,
        serving("Convoy", launch, ports.http, Path(temporary), is_ready) as server,
    ):
        try:
            for _ in range(rounds):
                for subject in lots.sample(subjects, len(subjects)):
                    done.append(_round(subject, bare[subject], server, generator, seconds, Path(temporary)))
                    console.print(f"{subject.network}: {done[-1].share:.3f} of the bound", highlight=False)
        except KeyboardInterrupt:
            console.print("stopped; writing what was measured so far")
    return done


def _round(
    subject: Subject, bare: Bare, server: RunningServer, generator: Generator, seconds: float, folder: Path
) -> Round:
    path, payloads = subject.requests()
    requests = write_requests(folder, server.url, path, payloads)
    engine_rps = bare.engine_rps(seconds / 2)
    decoder_rps = bare.decoder_rps([one.body for one in payloads], seconds / 2) if subject.body == "jpeg" else None
    generator.run(Salvo(server.url, requests, CONNECTIONS, _WARM_UP_S))
    before_s = server.family.cpu_s()
    totals = generator.run(Salvo(server.url, requests, CONNECTIONS, seconds))
    reading = reading_of(totals, server.family.cpu_s() - before_s)
    return Round(subject.network, subject.body, bare.batch_size, engine_rps, decoder_rps, reading)


def _subject(network: str) -> Subject:
    for subject in SUBJECTS:
        if subject.network == network:
            return subject
    raise UsageError(f"--networks knows {', '.join(NETWORKS)}, and not {network!r}")


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v2/health/ready", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def ensure_bundle(subject: Subject, home: Path) -> Path:
    """The network's bundle in the store of `home`, exported now if it is not there."""
    bundle = home / "store" / subject.network / "1"
    if not bundle.is_dir():
        factory = home / f"{subject.network}.py"
        write_text(factory, _FACTORY.format(name=subject.network))
        shape = ("--input", "3x224x224", "--preprocess", "imagenet", "--max-batch", MAX_BATCH)
        # What they answer does not matter here, only how long it takes.
        plain = (*shape, "--precisions", "fp32", "--random-weights")
        convoy("export", f"{factory}:network", "--name", subject.network, *plain, "--store", home / "store")
    return bundle


def main(
    home: Annotated[Path, typer.Option(help="Where the networks are kept.")] = HOME,
    networks: Annotated[str, typer.Option(help="Which of them.")] = ",".join(NETWORKS),
    rounds: Annotated[int, typer.Option(help="Rounds.", min=1)] = 5,
    duration: Annotated[float, typer.Option(help="Seconds of each measurement.", min=1)] = 20.0,
    json_file: Annotated[Path, typer.Option("--json", help="File for everything measured.")] = HOME / "ceiling.json",
    page: Annotated[Path | None, typer.Option(help="Page to put the table into.")] = None,
) -> None:
    """Measure Convoy over HTTP against its own engine and decoder."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        chosen = tuple(_subject(name) for name in networks.split(","))
        generator, console = choose_generator("auto"), Console()
        machine, started_at = conditions.machine(), conditions.now()
        done = measure(chosen, home, rounds, duration, generator, console)
        document = {"started_at": started_at, "machine": asdict(machine), "generator": generator.title}
        write_text(json_file, json.dumps(document | {"rounds": [asdict(one) for one in done]}, indent=1) + "\n")
        console.print(bound_table(done), markup=False, soft_wrap=True)
        if page is not None:
            where = f"Measured on {started_at} on {machine.cpu}, {machine.cores} cores, {generator.title}"
            how = f"Python {machine.python}, load average at the start {machine.load_average:.2f}"
            replace_block(page, MARK, f"{where}, {how}.\n\n{bound_table(done)}")
    except ConvoyError as error:
        print(f"ceiling: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from error


if __name__ == "__main__":
    typer.run(main)
