"""The test stand: servers that are started, examined, warmed up, measured and stopped.

Knows how each of these things is done. Does not know why a measurement is wanted or what becomes of it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from convoy.loadtest.peers.contender import Contender
from convoy.loadtest.peers.definition import Route
from convoy.loadtest.peers.exam import Exam
from convoy.loadtest.peers.generator import Generator, OwnGenerator, Salvo, SenderTotals, write_requests
from convoy.loadtest.peers.network import ServedNetwork
from convoy.loadtest.peers.results import BodyKind, ClosedLoad, Reading, Setting, Stage
from convoy.loadtest.peers.server import Ports, RunningServer, free_ports, serving
from convoy.models.errors import JobError


class Unfit(JobError):
    """A server cannot be measured; `stage` is how far it came."""

    def __init__(self, stage: Stage, reason: str) -> None:
        super().__init__(reason)
        self.stage: Stage = stage


@dataclass(frozen=True, slots=True)
class Stand:
    """What is the same for every server."""

    networks: Mapping[BodyKind, ServedNetwork]
    exams: Mapping[BodyKind, Exam]
    generator: Generator
    warm_up_s: float

    @contextmanager
    def up(self, contender: Contender, setting: Setting, body: BodyKind) -> Iterator[ServerUp]:
        """A fresh start of the server, with the network that such bodies ask. Raises Unfit if it does not come up."""
        ports, route = free_ports(), contender.routes[body]

        def is_ready(_: str) -> bool:
            return self.exams[body].first_answer(_url(ports, route), route)

        with ExitStack() as stack:
            temporary = tempfile.TemporaryDirectory(prefix="convoy-peers-", ignore_cleanup_errors=True)
            folder = Path(stack.enter_context(temporary))
            try:
                launch = contender.launch(setting, ports, self.networks[body])
                server = stack.enter_context(serving(contender.title, launch, ports.http, folder, is_ready))
            except JobError as error:
                raise Unfit("start", str(error)) from error
            yield ServerUp(self, contender, server, ports, folder)


@dataclass(frozen=True, slots=True)
class ServerUp:
    """One server that is up."""

    stand: Stand
    contender: Contender
    server: RunningServer
    ports: Ports
    folder: Path

    def prepare(self, load: ClosedLoad) -> None:
        """Examines the server and warms it up. Raises Unfit."""
        self.examine(load)
        self._send(load, self.stand.warm_up_s)

    def measure(self, load: ClosedLoad, duration_s: float) -> Reading:
        """To be believed only if the server is examined before and after. Raises Unfit."""
        before_s = self.server.family.cpu_s()
        totals = self._send(load, duration_s)
        return reading_of(totals, self.server.family.cpu_s() - before_s)

    def examine(self, load: ClosedLoad) -> None:
        """Raises Unfit for wrong answers."""
        route = self.contender.routes[load.body]
        try:
            self.stand.exams[load.body].verify(_url(self.ports, route), route, load.connections)
        except JobError as error:
            raise Unfit("answers", str(error)) from error

    def _send(self, load: ClosedLoad, duration_s: float) -> SenderTotals:
        route = self.contender.routes[load.body]
        url = _url(self.ports, route)
        payloads = self.stand.exams[load.body].payloads(route)
        generator = OwnGenerator() if route.form.wire == "grpc" else self.stand.generator
        try:
            requests = write_requests(self.folder, url, route.path, payloads)
            return generator.run(Salvo(url, requests, load.connections, duration_s))
        except JobError as error:
            raise Unfit("load", str(error)) from error


def _url(ports: Ports, route: Route) -> str:
    """Whoever speaks gRPC does so on the first of the spare ports."""
    return f"grpc://127.0.0.1:{ports.spare}" if route.form.wire == "grpc" else f"http://127.0.0.1:{ports.http}"


def reading_of(totals: SenderTotals, server_cpu_s: float) -> Reading:
    """CPU seconds become microseconds an answer; 0 where there was none."""
    share_us = 1e6 / totals.answered if totals.answered else 0.0
    return Reading(
        seconds=totals.seconds,
        answered=totals.answered,
        failed=totals.failed,
        p50_ms=totals.p50_ms,
        p99_ms=totals.p99_ms,
        server_cpu_us=server_cpu_s * share_us,
        generator_cpu_us=totals.cpu_s * share_us,
        problem=totals.problem,
    )
