"""Who makes the load: wrk where it is installed, else the load test's own generator. Always a process of its own.

Knows how to run each and read its report. The load and the server share the machine's cores, so the cheapest
generator shows the most of the servers, and that is wrk. It reads nothing but statuses, which is why answers are
examined before and after.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from convoy.loadtest.answers import AnswerCheck
from convoy.loadtest.bodies import Payload, request_bytes
from convoy.loadtest.endpoint import find_endpoint
from convoy.loadtest.options import LoadTestOptions
from convoy.loadtest.request_pool import RequestPool
from convoy.loadtest.runner import run
from convoy.loadtest.statistics import summarise
from convoy.models.errors import JobError, UsageError

Choice = Literal["auto", "wrk", "own"]
TIMEOUT_S = 10.0
_GRACE_S = 30.0
_SCRIPT = Path(__file__).parent / "wrk.lua"


@dataclass(frozen=True, slots=True)
class Salvo:
    """`connections` clients send what lies in `requests`, in turn, for `duration_s`: whole HTTP requests, or gRPC's."""

    url: str
    requests: tuple[str, ...]
    connections: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class SenderTotals:
    """What became of a salvo. `failed` are not among `answered`; at least 1 where nothing was answered."""

    seconds: float
    answered: int
    failed: int
    p50_ms: float
    p99_ms: float
    cpu_s: float
    problem: str | None


class Generator(Protocol):
    """Raises JobError where the generator itself fails."""

    title: str

    def run(self, salvo: Salvo) -> SenderTotals: ...


class Wrk:
    """One thread of wrk."""

    def __init__(self, program: str) -> None:
        self._program = program
        version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout.split("[")[0]
        self.title = f"{version.strip()}, 1 thread"

    def run(self, salvo: Salvo) -> SenderTotals:
        command = [self._program, "--threads", "1", "--connections", str(salvo.connections)]
        command += ["--duration", f"{max(1, round(salvo.duration_s))}s", "--timeout", f"{TIMEOUT_S:g}s"]
        command += ["--script", str(_SCRIPT), salvo.url, "--", *salvo.requests]
        before_s = _children_cpu_s()
        report = json.loads(_run(command, salvo.duration_s))
        problems = {kind: report[kind] for kind in ("status", "connect", "read", "write", "timeout") if report[kind]}
        failed = sum(problems.values())
        answered = report["requests"] - report["status"]
        return SenderTotals(
            seconds=report["duration_us"] / 1e6,
            answered=answered,
            failed=failed or int(answered == 0),
            p50_ms=report["p50_us"] / 1e3,
            p99_ms=report["p99_us"] / 1e3,
            cpu_s=_children_cpu_s() - before_s,
            problem=", ".join(f"{count} {kind} errors" for kind, count in problems.items()) or None,
        )


class OwnGenerator:
    """The load test's closed loop in one process, which it starts itself."""

    title = "Convoy's own load test, 1 process"

    def run(self, salvo: Salvo) -> SenderTotals:
        options = LoadTestOptions(
            concurrency=salvo.connections,
            duration_s=salvo.duration_s,
            warm_up_s=0.0,
            timeout_s=TIMEOUT_S,
            processes=1,
        )
        endpoint = find_endpoint(salvo.url)
        requests = [Path(name).read_bytes() for name in salvo.requests]
        pool = RequestPool(requests, AnswerCheck("plain"), "grpc" if endpoint.is_grpc else "http")
        measured = run(options, pool, endpoint)
        if measured.interrupted:
            # Ctrl-C is no error to the load test; here it ends the whole comparison.
            raise KeyboardInterrupt
        summary = summarise(measured.records, measured.window, None)
        slowest_ms = summary.max_ms or 0.0
        return SenderTotals(
            seconds=summary.window_s,
            answered=summary.good,
            failed=summary.failed or int(summary.good == 0),
            p50_ms=summary.median_ms or 0.0,
            # None where there were too few answers: then the slowest is the honest thing to show.
            p99_ms=next(one.latency_ms for one in summary.percentiles if one.name == "99") or slowest_ms,
            cpu_s=measured.generator_cpu_s,
            problem=summary.errors[0].problem.text if summary.errors else None,
        )


def choose_generator(choice: Choice) -> Generator:
    """Raises UsageError where wrk is asked for and not there."""
    program = shutil.which("wrk")
    if choice == "own" or (choice == "auto" and program is None):
        return OwnGenerator()
    if program is None:
        raise UsageError("wrk is not installed; install it (apt-get install wrk), or say --generator own")
    return Wrk(program)


def write_requests(folder: Path, url: str, path: str, payloads: Sequence[Payload]) -> tuple[str, ...]:
    """The requests as files, for `Salvo.requests`; those that are there already are written anew."""
    endpoint = find_endpoint(url)
    names = []
    for number, payload in enumerate(payloads):
        file = folder / f"request_{number:02d}"
        file.write_bytes(payload.body if endpoint.is_grpc else request_bytes(endpoint, path, payload, None))
        names.append(str(file))
    return tuple(names)


def _children_cpu_s() -> float:
    """Of the children that have been waited for: the server runs on, so the difference is the generator's alone."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _run(command: Sequence[str], duration_s: float) -> str:
    """The last line that the generator wrote to stderr."""
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=duration_s + TIMEOUT_S + _GRACE_S,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise JobError("the load generator did not come to its end; try again, or with --generator own") from None
    lines = done.stderr.strip().splitlines()
    if done.returncode != 0 or not lines:
        raise JobError(f"the load generator failed: {lines[-1] if lines else 'it said nothing'}")
    return lines[-1]
