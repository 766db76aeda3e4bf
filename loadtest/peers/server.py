"""A server under test as a process: started, waited for, and stopped with all that it started.

Knows ports, logs and time limits. Does not know what the server is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from convoy.loadtest.peers.family import Family
from convoy.models.errors import JobError

STOP_WITHIN_S = 15.0
_POLL_S = 0.1
_LAST_LINES = 12
_SPARE_PORTS = 3
_INTERRUPTIONS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Ports:
    """`http` is for the requests; `spare` and the two after it are for whatever else a framework opens."""

    http: int
    spare: int


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a server; `environment` is added to ours."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    ready_within_s: float


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that answers."""

    url: str
    family: Family


@contextmanager
def serving(
    title: str, launch: Launch, port: int, folder: Path, is_ready: Callable[[str], bool]
) -> Iterator[RunningServer]:
    """Starts the server in `folder`, which gets its log, and stops it at the end, whatever happens.

    `is_ready` is asked with the server's URL until it says yes. Raises JobError, with the end of the log, for a
    server that ends or is not ready in time.
    """
    log = folder / "server.log"
    url = f"http://127.0.0.1:{port}"
    with contextlib.ExitStack() as stack:
        with _uninterrupted(), log.open("wb") as output:
            process = subprocess.Popen(
                launch.command,
                cwd=folder,
                env={**os.environ, **launch.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C is for the comparison, which then stops the server in good order.
                start_new_session=True,
            )
            family = Family(process.pid)
            stack.callback(_stop, process, family)
        _wait_until_ready(title, process, launch.ready_within_s, log, lambda: is_ready(url))
        yield RunningServer(url, family)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C and a plain kill wait for the end: in the midst of a start they would leave a server that nobody knows.

    Python hands signals to the main thread alone, so that any other has nothing to wait for.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in _INTERRUPTIONS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])


def free_ports() -> Ports:
    """Ports that nobody uses at this moment, the spare ones in a row."""
    while True:
        with contextlib.ExitStack() as held:
            http = _hold(held, 0)
            first = _hold(held, 0)
            try:
                for offset in range(1, _SPARE_PORTS):
                    _hold(held, first + offset)
            except (OSError, OverflowError):
                continue
            return Ports(http, first)


def _hold(held: contextlib.ExitStack, port: int) -> int:
    listener = held.enter_context(socket.socket())
    listener.bind(("127.0.0.1", port))
    chosen: int = listener.getsockname()[1]
    return chosen


def _wait_until_ready(
    title: str, process: subprocess.Popen[bytes], within_s: float, log: Path, is_ready: Callable[[], bool]
) -> None:
    deadline_s = time.monotonic() + within_s
    while not is_ready():
        if process.poll() is not None:
            raise JobError(f"{title} ended with exit code {process.returncode} instead of serving;{_end_of(log)}")
        if time.monotonic() > deadline_s:
            raise JobError(f"{title} gave no answer within {within_s:g} s of its start;{_end_of(log)}")
        time.sleep(_POLL_S)


def _end_of(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if not lines:
        return " it wrote no log"
    return "".join([" its log ends with", *(f"\n    {line[:300]}" for line in lines[-_LAST_LINES:])])


def _stop(process: subprocess.Popen[bytes], family: Family) -> None:
    try:
        family.look()
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_WITHIN_S)
        # What the first process left behind has had its chance; it is not worth another wait.
        family.wait(0.5)
    finally:
        family.kill()
        process.wait()
        family.wait(STOP_WITHIN_S)
