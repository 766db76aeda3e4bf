"""Bursts of requests: by wrk where it can, which costs the cores the least, and else by the load test, which knows gRPC
and schedules. wrk reads nothing but statuses, which is why answers are checked before and after.
"""

from __future__ import annotations

import json
import resource
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from convoy.loadtest.answers import AnswerCheck
from convoy.loadtest.bodies import Payload, request_bytes
from convoy.loadtest.endpoint import find_endpoint
from convoy.loadtest.options import LoadTestOptions
from convoy.loadtest.request_pool import RequestPool
from convoy.loadtest.results import Result, whole
from convoy.loadtest.runner import run
from convoy.models.errors import JobError

OBJECTIVE_MS = 500.0  # of an answer in overload, and the deadline that goes with its request
_TIMES_OVER = 3.0
_AROUND = (0.8, 1.0, 1.25)  # of what a closed loop gets through: the highest goodput lies near it
_TRIES = 3  # of a rate at which the generator was late
_SCRIPT = Path(__file__).parent / "wrk.lua"

Reading = dict[str, float]  # what was measured, by name and unit


@dataclass(frozen=True, slots=True)
class Burst:
    """`connections` clients send the payloads in turn. `late` is added to the path where requests have a deadline;
    `folder` takes what wrk reads, and `server_cpu_s` tells what the server has used so far.
    """

    url: str
    path: str
    late: str
    payloads: Sequence[Payload]
    connections: int
    folder: Path
    server_cpu_s: Callable[[], float]

    def closed(self, seconds: float) -> Reading:
        """Each client asks again as soon as it is answered. Raises JobError for a request that failed."""
        server_s, own_s = self.server_cpu_s(), _children_cpu_s()
        answers, reading = self._by_load_test(seconds) if self.url.startswith("grpc") else self._by_wrk(seconds)
        server_us, own_us = 1e6 * (self.server_cpu_s() - server_s), 1e6 * (_children_cpu_s() - own_s)
        return {**reading, "CPU us/answer": server_us / answers, "generator us/answer": own_us / answers}

    def overload(self, seconds: float) -> Reading:
        """Goodput at three times the rate at which most is answered in time, and how much of that is left."""
        closed = self.closed(seconds)["answers/s"]
        around = {times * closed: self._good(times * closed, seconds)[0] for times in _AROUND}
        peak = max(around, key=lambda rate: around[rate])
        good_rps, used_s = self._good(_TIMES_OVER * peak, seconds)
        reading = {"good/s": good_rps, "good/s at capacity": around[peak], "share of it": good_rps / around[peak]}
        return {**reading, "CPU us/good answer": 1e6 * used_s / max(1.0, good_rps * seconds)}

    def _by_wrk(self, seconds: float) -> tuple[int, Reading]:
        files, endpoint = [], find_endpoint(self.url)
        for number, payload in enumerate(self.payloads):
            files.append(self.folder / f"request_{number:02d}")
            files[-1].write_bytes(request_bytes(endpoint, self.path, payload, None))
        command = ["wrk", "--duration", f"{max(1, round(seconds))}s", "--timeout", "10s", "--script", str(_SCRIPT)]
        command += ["--threads", "1", "--connections", str(self.connections), self.url, "--", *map(str, files)]
        done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
        if done.returncode != 0:
            raise JobError(f"wrk failed: {done.stderr.strip() or done.stdout.strip()}")
        report = json.loads(done.stderr.strip().split("\n")[-1])
        problems = {kind: report[kind] for kind in ("status", "connect", "read", "write", "timeout") if report[kind]}
        if problems or not report["requests"]:
            raise JobError(f"{report['requests']} requests were answered; failed: {problems or 'nothing'}")
        rate = 1e6 * report["requests"] / report["duration_us"]
        return report["requests"], {
            "answers/s": rate,
            "p50 ms": report["p50_us"] / 1e3,
            "p99 ms": report["p99_us"] / 1e3,
        }

    def _by_load_test(self, seconds: float) -> tuple[int, Reading]:
        options = LoadTestOptions(concurrency=self.connections, duration_s=seconds, warm_up_s=0.0, processes=1)
        summary = self._load_test(options, self.path).summary
        if summary.failed or not summary.good:
            raise JobError(f"of {summary.offered} requests {summary.failed} failed: {summary.errors[:1]}")
        reading = {"answers/s": summary.good / summary.window_s, "p50 ms": summary.median_ms or 0.0}
        p99_ms = next(one.latency_ms for one in summary.percentiles if one.name == "99")
        # None where there were too few answers: then the slowest is the honest thing to show.
        return summary.good, {**reading, "p99 ms": p99_ms or summary.max_ms or 0.0}

    def _good(self, rate: float, seconds: float) -> tuple[float, float]:
        """Good answers a second, and the server's CPU time, of the first try with a punctual generator, or the last."""
        options = LoadTestOptions(rate=rate, duration_s=seconds, warm_up_s=0.0, slo_ms=OBJECTIVE_MS)
        for _ in range(_TRIES):
            before_s = self.server_cpu_s()
            found = self._load_test(options, self.path + self.late)
            used_s = self.server_cpu_s() - before_s
            if found.verdict.void is None:
                break
        return (found.summary.goodput or 0.0) * found.summary.offered / found.summary.window_s, used_s

    def _load_test(self, options: LoadTestOptions, path: str) -> Result:
        endpoint = find_endpoint(self.url)
        is_grpc = endpoint.is_grpc
        requests = [one.body if is_grpc else request_bytes(endpoint, path, one, None) for one in self.payloads]
        pool = RequestPool(requests, AnswerCheck("plain"), "grpc" if is_grpc else "http")
        measured = run(options, pool, endpoint)
        if measured.interrupted:
            # Ctrl-C is no error to the load test; here it ends the whole comparison.
            raise KeyboardInterrupt
        return whole(options, measured)


def _children_cpu_s() -> float:
    """Of the children that have been waited for: the server runs on, so the difference is the generator's alone."""
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
