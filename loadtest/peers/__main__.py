"""The comparison: `python -m convoy.loadtest.peers --help`.

For each load, and each contender that takes it: both servers up, answers checked, then pairs in turns, each server idle
while the other one is measured, and answers checked again. What was measured is written, also at Ctrl-C.

Exit codes: 0 - every pair asked for was measured. 1 - one was not. 130 - stopped by Ctrl-C.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from convoy.loadtest.peers.bare import bare_rate
from convoy.loadtest.peers.bursts import OBJECTIVE_MS, Burst, Reading
from convoy.loadtest.peers.loads import LARGE, LOADS, AnswerSheet, PeerLoad, answer_sheet, ensure_network, sides_px
from convoy.loadtest.peers.servers import Contender, ProcessTree, Route, Setting, find_contender, free_port, serving
from convoy.models.errors import ConvoyError, JobError, UsageError

HOME = Path("build/peers")
BARE, SKETCH = "bare", "sketch"
PEERS = "mosec,litserve,pytriton,bentoml,mlserver,ray"
EXIT_FAILED, EXIT_INTERRUPTED = 1, 130
AS_IT_COMES = Setting()
_HEAD = "| load | against | what | ours | theirs | ours over theirs |\n|---|---|---|--:|--:|---|"

Pair = tuple[Reading, Reading]


@dataclass(frozen=True, slots=True)
class Effort:
    """Both servers are started `starts` times for each load, for so many `pairs` each; times are in seconds."""

    threads: int
    starts: int
    pairs: int
    seconds: float
    sweep: float
    warm_up: float


@dataclass(frozen=True, slots=True)
class Subject:
    """A load, its network's file and the right answers."""

    load: PeerLoad
    file: Path
    sheet: AnswerSheet
    effort: Effort

    @contextmanager
    def up(self, contender: Contender, setting: Setting) -> Iterator[tuple[Burst, Route, ProcessTree]]:
        """The server, started. Raises JobError where it does not answer."""
        load, route = self.load, contender.bodies[self.load.body]
        path, late = (one.format(network=load.network, ms=f"{OBJECTIVE_MS:g}") for one in (route.path, route.late))
        route = Route(route.form, path, late)
        port, grpc_port = free_port(), free_port()
        url = f"grpc://127.0.0.1:{grpc_port}" if route.form == "grpc" else f"http://127.0.0.1:{port}"
        asked = {
            "MODEL": self.file,
            "STORE": self.file.parents[2],
            **dict(zip(("RESIZE_PX", "CROP_PX"), sides_px(load), strict=True)),
            "PORT": port,
            "GRPC_PORT": grpc_port,
            "METRICS_PORT": free_port(),
            "THREADS": self.effort.threads,
            **{name.upper(): value for name, value in setting._asdict().items()},
        }
        environment = {f"PEER_{name}": str(value) for name, value in asked.items()}
        # A short path: Ray puts sockets into it, whose names have a limit.
        with (
            tempfile.TemporaryDirectory(prefix="cv", ignore_cleanup_errors=True) as name,
            serving(contender, environment, Path(name), lambda: self.sheet.has_answer(url, route)) as tree,
        ):
            payloads = self.sheet.payloads(route)
            yield Burst(url, path, late, payloads, load.connections, Path(name), tree.cpu_s), route, tree

    @contextmanager
    def measuring(self, contender: Contender | None, setting: Setting) -> Iterator[Callable[[float], Reading]]:
        """What measures for so many seconds; None is the bare engine. Answers are checked before and after.

        Raises JobError.
        """
        if contender is None:
            rate = bare_rate(self.file.parent, self.sheet.samples if self.load.body == "picture" else ())
            yield lambda seconds: {"answers/s": rate(seconds)}
        elif self.load.name == "start":
            yield lambda _: self._start(contender, setting)
        else:
            with self.up(contender, setting) as (burst, route, _):
                self.sheet.check(burst.url, route, burst.connections)
                burst.closed(self.effort.warm_up)
                yield burst.overload if self.load.name.startswith("overload") else burst.closed
                self.sheet.check(burst.url, route, burst.connections)

    def _start(self, contender: Contender, setting: Setting) -> Reading:
        begun_s = time.monotonic()
        with self.up(contender, setting) as (_, _, tree):
            ready_s = time.monotonic() - begun_s
            time.sleep(1.0)  # until it is idle
            return {"start to first answer s": ready_s, "idle MiB": tree.resident_mib()}

    def best_setting(self, contender: Contender) -> Setting:
        """The one with the highest rate; for one connection, where nothing else is at stake, with the lowest latency.

        Raises JobError where none can be measured.
        """
        settings = [one for one in contender.settings if self.load.body == "picture" or not one.decoders]
        if len(settings) == 1 or self.load.name == "start":
            return settings[-1]
        found, problem = dict[Setting, float](), ""
        for setting in settings:
            try:
                with self.up(contender, setting) as (burst, _, _):
                    reading = burst.closed(self.effort.sweep)
                found[setting] = -reading["p50 ms"] if burst.connections == 1 else reading["answers/s"]
            except JobError as error:
                problem = f"{setting}: {error}"
        if not found:
            raise JobError(problem)
        return max(found, key=lambda setting: found[setting])

    def compare(self, ours: Contender, theirs: Contender | None, setting: Setting) -> Iterator[list[Pair]]:
        """The pairs of each start. Raises JobError; of a server that answers wrongly at the end, nothing counts."""
        for start in range(self.effort.starts):
            pairs = list[Pair]()
            with self.measuring(ours, AS_IT_COMES) as us, self.measuring(theirs, setting) as them:
                for turn in range(self.effort.pairs):
                    # Whose turn is first changes, so that a drift helps nobody.
                    before = them(self.effort.seconds) if (start + turn) % 2 else None
                    our = us(self.effort.seconds)
                    pairs.append((our, before or them(self.effort.seconds)))
            yield pairs


@dataclass(slots=True)
class Comparison:
    """One load against one contender: pairs of us and them, or why there are none."""

    load: str
    against: str
    setting: Setting = AS_IT_COMES
    pairs: list[Pair] = field(default_factory=list)
    problem: str = ""

    def rows(self) -> Iterator[str]:
        """A row of Markdown for every figure that both sides have: medians, and the median ratio with its spread.

        A ratio is taken within a pair, whose readings are seconds apart: machines drift more between pairs than servers
        differ.
        """
        size, window_ms, decoders = self.setting
        against = f"{self.against}, batch {size}, {window_ms:g} ms, {decoders} decoders" if size > 1 else self.against
        for name in self.pairs[0][0] if self.pairs else ():
            if name in self.pairs[0][1] and not name.startswith("generator"):
                ours, theirs = ([pair[side][name] for pair in self.pairs] for side in (0, 1))
                ratios = [our / their if their else float("inf") for our, their in zip(ours, theirs, strict=True)]
                middle, our, their = map(statistics.median, (ratios, ours, theirs))
                spread = f"**{middle:.2f}** ({min(ratios):.2f} to {max(ratios):.2f})"
                yield f"| {self.load} | {against} | {name} | {our:,.4g} | {their:,.4g} | {spread} |"
        if self.problem:
            yield f"| {self.load} | {against} | not measured: {' '.join(self.problem.split())} | | | |"


def conditions(effort: Effort) -> dict[str, Any]:
    """The machine and how much was measured."""
    _, _, model = Path("/proc/cpuinfo").read_text().partition("model name\t: ")
    return {
        "started": datetime.now(UTC).isoformat(timespec="minutes"),
        "load average": os.getloadavg()[0],
        "cpu": model.partition("\n")[0] or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **asdict(effort),
    }


def takes(name: str, contender: Contender | None, load: PeerLoad) -> bool:
    """Whether that contender, None for the bare engine, is measured under that load."""
    if contender is None:
        return load.network in LARGE and not load.name.startswith("overload")
    # Plain ASGI shows what small requests cost.
    return load.body in contender.bodies and (name != SKETCH or load.network not in LARGE)


def measure(subject: Subject, us: Contender, others: Mapping[str, Contender | None], done: list[Comparison]) -> None:
    """One load against all of them."""
    for name, them in others.items():
        done.append(Comparison(subject.load.name, name))
        try:
            done[-1].setting = AS_IT_COMES if them is None else subject.best_setting(them)
            for pairs in subject.compare(us, them, done[-1].setting):
                done[-1].pairs += pairs
                print(f"{subject.load.name}: {len(done[-1].pairs)} pairs against {name}", flush=True)
        except JobError as error:
            done[-1].problem = str(error)
            print(f"{subject.load.name}, {name}: {error}", flush=True)


def contenders(
    ours: str, against: str, base: Path | None, more: Path | None, home: Path, done: list[Comparison]
) -> tuple[Contender, dict[str, Contender | None]]:
    """Us and the others; those whose environment could not be made are in `done`. Raises UsageError."""
    us, others = find_contender(ours, more, home), dict[str, Contender | None]()
    if base is not None:
        python = base.absolute() / ".venv" / "bin" / "python"
        if not python.is_file():
            raise UsageError(f"--base {base} has no .venv/bin/python; run make install there")
        others["base"] = msgspec.structs.replace(us, run=(str(python), us.run[1]))
    for name in filter(None, against.split(",")):
        try:
            others[name] = None if name == BARE else find_contender(name, more, home)
        except JobError as error:
            done.append(Comparison("", name, problem=str(error)))
    return us, others


def main(
    against: Annotated[
        str, typer.Option(help="Folders of peers; sketch: plain ASGI; bare: engine and decoder alone.")
    ] = PEERS,
    loads: Annotated[str, typer.Option(help=f"Some of {', '.join(LOADS)}.")] = ",".join(LOADS),
    ours: Annotated[str, typer.Option(help="convoy, or replica: one of Ray Serve's behind HAProxy.")] = "convoy",
    base: Annotated[Path | None, typer.Option(help="Checkout of an earlier Convoy, with its .venv.")] = None,
    peers_from: Annotated[Path | None, typer.Option(help="Folder with further peers.")] = None,
    home: Annotated[Path, typer.Option(help="Where environments and networks are kept.")] = HOME,
    model: Annotated[Path | None, typer.Option(help="ONNX file to serve instead of the CIFAR CNN.")] = None,
    threads: Annotated[int, typer.Option(help="Engine threads of every server; 0: its own default.", min=0)] = 1,
    starts: Annotated[int, typer.Option(help="Starts of both servers for each load.", min=1)] = 3,
    pairs: Annotated[int, typer.Option(help="Pairs a start.", min=1)] = 5,
    seconds: Annotated[float, typer.Option(help="Seconds of each measurement.", min=1)] = 3.0,
    sweep: Annotated[float, typer.Option(help="Seconds of each trial of a setting.", min=1)] = 1.0,
    warm_up: Annotated[float, typer.Option(help="Seconds of load after each start.", min=1)] = 1.0,
    output: Annotated[Path, typer.Option("--json", help="File for everything measured.")] = HOME / "peers.json",
) -> None:
    """Measure Convoy beside its peers. The machine must have nothing else to do."""
    # A plain kill does what Ctrl-C does, also in the background of a shell: no server stays behind.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    code, done, effort = 0, list[Comparison](), Effort(threads, starts, pairs, seconds, sweep, warm_up)
    try:
        if not LOADS.keys() >= set(loads.split(",")):
            raise UsageError(f"--loads must be some of {', '.join(LOADS)}, not {loads}")
        if shutil.which("wrk") is None:
            raise UsageError("wrk is not installed, which makes the load; run apt-get install wrk")
        us, others = contenders(ours, against, base, peers_from, home, done)
        asked = conditions(effort)
        try:
            for load in (LOADS[name] for name in loads.split(",")):
                taking = {name: them for name, them in others.items() if takes(name, them, load)}
                if taking and takes(ours, us, load):
                    file = ensure_network(load.network, home, model)
                    measure(Subject(load, file, answer_sheet(file, load), effort), us, taking, done)
        except KeyboardInterrupt:
            code = EXIT_INTERRUPTED
        if not done and not code:
            raise UsageError(f"--against {against} takes none of these loads; name others with --against or --loads")
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(
            json.dumps({"conditions": asked, "comparisons": [asdict(one) for one in done]}, indent=1) + "\n"
        )
        print(", ".join(f"{name} {value}" for name, value in asked.items()), "", _HEAD, sep="\n")
        print(*(row for one in done for row in one.rows()), sep="\n")
    except ConvoyError as error:
        print(f"peers: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    raise typer.Exit(code or EXIT_FAILED * any(one.problem for one in done))


if __name__ == "__main__":
    typer.run(main)
