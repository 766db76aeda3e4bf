"""How long `convoy serve` takes from its start to its first ready answer, and how much memory it then holds.

Measures the installed command from outside, several times in one run, and prints the median. A benchmark:
it asserts nothing, because machines differ.
"""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx

RUNS = 7
_GIVE_UP_S = 30.0


@dataclass(frozen=True, slots=True)
class Startup:
    """One start: seconds until ready, and resident MiB after it has been idle for a moment."""

    ready_s: float
    idle_mib: float


@dataclass(frozen=True, slots=True)
class ReadyServer:
    """A server that has said that it is ready, `ready_s` after its start."""

    process: subprocess.Popen[bytes]
    url: str
    ready_s: float


@contextmanager
def serving(address_file: Path, *options: str, log: IO[bytes] | None = None) -> Iterator[ReadyServer]:
    """`convoy serve` on free ports, ready, with its log in `log`. Stopped at the end."""
    address_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "convoy", "serve", "--port", "0", "--grpc-port", "0"]
    started_s = time.perf_counter()
    process = subprocess.Popen([*command, "--address-file", str(address_file), *options], stderr=log)
    try:
        url = _wait_until_ready(process, address_file, started_s + _GIVE_UP_S)
        yield ReadyServer(process, url, time.perf_counter() - started_s)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(_GIVE_UP_S)


def measure() -> Startup:
    """One cold start."""
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder, "address"), "--log-level", "error") as server:
        return Startup(server.ready_s, _resident_mib(server.process.pid))


def _wait_until_ready(process: subprocess.Popen[bytes], address_file: Path, give_up_s: float) -> str:
    """The server's URL."""
    with httpx.Client() as client:
        while time.perf_counter() < give_up_s:
            if process.poll() is not None:
                raise SystemExit(f"the server ended with exit code {process.returncode}")
            try:
                url = address_file.read_text().strip()
                if url and client.get(f"{url}/v2/health/ready").status_code == 200:
                    return url
            except (FileNotFoundError, httpx.TransportError):
                pass
            time.sleep(0.002)
    raise SystemExit(f"the server was not ready after {_GIVE_UP_S:g} s")


def _resident_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise SystemExit("the process has no VmRSS")


def main() -> None:
    starts = [measure() for _ in range(RUNS)]
    ready_s = [start.ready_s for start in starts]
    idle_mib = [start.idle_mib for start in starts]
    print(
        f"cold start to ready: median {statistics.median(ready_s):.2f} s of {RUNS} (target 1.2 s), "
        f"from {min(ready_s):.2f} to {max(ready_s):.2f} s"
    )
    print(f"idle memory: median {statistics.median(idle_mib):.0f} MiB (target 150 MiB)")


if __name__ == "__main__":
    main()
