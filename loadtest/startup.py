"""How long `convoy serve` takes from its start to its first ready answer, and how much memory it then holds.

Measures the installed command from outside, several times in one run, and prints the median. A benchmark:
it asserts nothing, because machines differ.
"""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

RUNS = 7
_GIVE_UP_S = 30.0
_COMMAND = (sys.executable, "-m", "convoy", "serve", "--log-level", "error")


@dataclass(frozen=True, slots=True)
class Startup:
    """One start: seconds until ready, and resident MiB after it has been idle for a moment."""

    ready_s: float
    idle_mib: float


@contextmanager
def serving(port: int, *extra: str) -> Iterator[tuple[subprocess.Popen[bytes], float]]:
    """A server process on `port` that is ready, and the seconds that it took. Stopped at the end."""
    started_s = time.perf_counter()
    process = subprocess.Popen([*_COMMAND, "--port", str(port), "--grpc-port", "0", *extra])
    try:
        _wait_until_ready(process, port, started_s + _GIVE_UP_S)
        yield process, time.perf_counter() - started_s
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(_GIVE_UP_S)


def measure(port: int) -> Startup:
    """One cold start on `port`."""
    with serving(port) as (process, ready_s):
        return Startup(ready_s, _resident_mib(process.pid))


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, give_up_s: float) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        while time.perf_counter() < give_up_s:
            if process.poll() is not None:
                raise SystemExit(f"the server ended with exit code {process.returncode}")
            try:
                if client.get("/v2/health/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.002)
    raise SystemExit(f"the server was not ready after {_GIVE_UP_S:g} s")


def _resident_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise SystemExit("the process has no VmRSS")


def main() -> None:
    starts = [measure(18_200 + run) for run in range(RUNS)]
    ready_s = [start.ready_s for start in starts]
    idle_mib = [start.idle_mib for start in starts]
    print(
        f"cold start to ready: median {statistics.median(ready_s):.2f} s of {RUNS} (target 1.2 s), "
        f"from {min(ready_s):.2f} to {max(ready_s):.2f} s"
    )
    print(f"idle memory: median {statistics.median(idle_mib):.0f} MiB (target 150 MiB)")


if __name__ == "__main__":
    main()
