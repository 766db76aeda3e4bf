"""The test stand: one server at a time, started, examined, warmed up, measured and stopped.

Knows the order of these things. Does not know why a measurement is wanted or what becomes of it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Generator as Readings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from convoy.loadtest.peers.contender import Contender
from convoy.loadtest.peers.definition import Route
from convoy.loadtest.peers.exam import Exam
from convoy.loadtest.peers.generator import Generator, Salvo, SenderTotals, write_requests
from convoy.loadtest.peers.results import ClosedLoad, Reading, Setting, Stage
from convoy.loadtest.peers.server import RunningServer, free_ports, serving
from convoy.models.errors import JobError


class Unfit(JobError):
    """A server cannot be measured; `stage` is how far it came."""

    def __init__(self, stage: Stage, reason: str) -> None:
        super().__init__(reason)
        self.stage: Stage = stage


@dataclass(frozen=True, slots=True)
class Stand:
    """What is the same for every server."""

    exam: Exam
    generator: Generator
    warm_up_s: float

    def measure(
        self, contender: Contender, setting: Setting, loads: Sequence[ClosedLoad], duration_s: float
    ) -> Readings[tuple[ClosedLoad, Reading]]:
        """One start of the server, and its readings as they come. Raises Unfit."""
        with tempfile.TemporaryDirectory(prefix="convoy-peers-", ignore_cleanup_errors=True) as temporary:
            folder = Path(temporary)
            ports = free_ports()
            route = contender.routes[loads[0].body]
            try:
                launch = contender.launch(setting, ports)
                with serving(
                    contender.title, launch, ports.http, folder, lambda url: self.exam.first_answer(url, route)
                ) as server:
                    for load in loads:
                        yield load, self._measure_load(server, contender.routes[load.body], load, duration_s, folder)
            except Unfit:
                raise
            except JobError as error:
                raise Unfit("start", str(error)) from error

    def _measure_load(
        self, server: RunningServer, route: Route, load: ClosedLoad, duration_s: float, folder: Path
    ) -> Reading:
        self._examine(server, route, load)
        try:
            requests = write_requests(folder, server.url, route.path, self.exam.payloads(route))
            self.generator.run(Salvo(server.url, requests, load.connections, self.warm_up_s))
            before_s = server.family.cpu_s()
            totals = self.generator.run(Salvo(server.url, requests, load.connections, duration_s))
            server_cpu_s = server.family.cpu_s() - before_s
        except JobError as error:
            raise Unfit("load", str(error)) from error
        self._examine(server, route, load)
        return reading_of(totals, server_cpu_s)

    def _examine(self, server: RunningServer, route: Route, load: ClosedLoad) -> None:
        try:
            self.exam.verify(server.url, route, load.connections)
        except JobError as error:
            raise Unfit("answers", str(error)) from error


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
