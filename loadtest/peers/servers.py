"""The servers under test: what is known of each, its environment, and its process with all that it starts.

A contender is a folder with `peer.toml`, the server `serve.py`, and the pinned `requirements.txt` of an environment of
its own. Without that file this program's interpreter runs it: Convoy, and what is built of its parts.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from convoy.models.errors import JobError, UsageError

HERE = Path(__file__).parent
DEFINITION, REQUIREMENTS, SERVER = "peer.toml", "requirements.txt", "serve.py"
MARK = "PEER_MARK"
_INSTALL_WITHIN_S, _STOP_WITHIN_S, _POLL_S = 1800.0, 15.0, 0.02


class Setting(NamedTuple):
    """How a server batches: at most `max_batch` samples, which wait at most `window_ms` for others.

    `decoders` are processes that only decode pictures; 0: the process that computes decodes.
    """

    max_batch: int = 1
    window_ms: float = 0.0
    decoders: int = 0


class Route(msgspec.Struct, frozen=True):
    """How a server takes one kind of body. `late` is added to the path where requests have a deadline."""

    form: str
    path: str = ""
    late: str = ""


class SettingGrid(msgspec.Struct, frozen=True):
    """The settings to try are every combination of these, and no batching."""

    max_batch: tuple[int, ...]
    window_ms: tuple[float, ...]
    decoders: tuple[int, ...] = (0,)


class Contender(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`peer.toml`. `python`: which interpreter its environment needs; `run`: interpreter and script."""

    title: str
    bodies: dict[str, Route]
    batching: SettingGrid | None = None
    environment: dict[str, str] = {}
    python: str = ""
    ready_within_s: float = 60.0
    run: tuple[str, str] = ("", "")

    @property
    def settings(self) -> list[Setting]:
        """One where nothing is said of batching."""
        if self.batching is None:
            return [Setting()]
        sizes = [(1, 0.0), *((size, ms) for size in self.batching.max_batch for ms in self.batching.window_ms)]
        return [Setting(*size, decoders) for decoders in self.batching.decoders for size in sizes]


def find_contender(name: str, more: Path | None, home: Path) -> Contender:
    """The one of this name, looked for in `more` first, its environment made now if it is not in `home`.

    Raises UsageError for an unknown name or a definition that cannot be used, JobError where nothing can be installed.
    """
    folder = next((at / name for at in (more, HERE) if at and (at / name / DEFINITION).is_file()), None)
    if folder is None:
        known = ", ".join(sorted(file.parent.name for file in HERE.glob(f"*/{DEFINITION}")))
        raise UsageError(f"there is no peer {name!r}; known are bare, {known}, and the folders of --peers-from")
    try:
        found = msgspec.toml.decode((folder / DEFINITION).read_text(), type=Contender)
    except msgspec.DecodeError as error:
        raise UsageError(f"{folder / DEFINITION}: {error}; compare it with those in {HERE}") from error
    python = sys.executable
    if (folder / REQUIREMENTS).is_file():
        python = _ensure_environment(found, folder / REQUIREMENTS, (home / "environments" / name).absolute())
    return msgspec.structs.replace(found, run=(python, str((folder / SERVER).absolute())))


def _ensure_environment(contender: Contender, requirements: Path, folder: Path) -> str:
    """The interpreter of an environment with these requirements, made once and kept."""
    interpreter = shutil.which(contender.python or sys.executable)
    if interpreter is None:
        raise JobError(f"{contender.title} needs {contender.python}, which is not on the PATH; install it")
    python, stamp = str(folder / "bin" / "python"), folder / ".complete"
    wanted = hashlib.sha256(interpreter.encode() + requirements.read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    # With this environment's pip, because a pip for each takes longer to install than most peers.
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--requirement", str(requirements)]
    for command in [interpreter, "-m", "venv", "--without-pip", str(folder)], pip:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_WITHIN_S)
        if done.returncode != 0:
            output = " / ".join((done.stdout + done.stderr).split("\n")[-6:])
            raise JobError(f"{contender.title} cannot be installed: {output}")
    stamp.write_text(wanted)
    return python


class ProcessTree:
    """Every process that has this mark in its environment, by whatever detour it was started.

    A framework's work is spread over workers, proxies and daemons; what counts is what they all cost, and none of them
    may outlive the measurement.
    """

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def members(self) -> list[psutil.Process]:
        """Without zombies: where init does not collect its orphans, one would wait for them in vain."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def cpu_s(self) -> float:
        """CPU time of all of them, in user and system mode, since each began."""
        return float(sum(sum(one.cpu_times()[:2]) for one in self.members()))

    def resident_mib(self) -> float:
        """What they hold of memory; pages that they share count for each."""
        return float(sum(one.memory_info().rss for one in self.members()) / 2**20)

    def end(self) -> None:
        """Kills all of them, and those that they start meanwhile. Raises JobError."""
        deadline_s = time.monotonic() + _STOP_WITHIN_S
        while left := self.members():
            if time.monotonic() > deadline_s:
                raise JobError(f"these processes do not end: {left}; end them before you measure again")
            for process in left:
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, timeout=5)


@contextmanager
def serving(
    contender: Contender, asked: Mapping[str, str], folder: Path, is_ready: Callable[[], bool]
) -> Iterator[ProcessTree]:
    """Starts the server in `folder`, which gets its log, and stops it at the end with all that it started.

    Raises JobError, with the end of the log, for a server that ends or is not ready in time.
    """
    tree, log = ProcessTree(uuid.uuid4().hex), folder / "server.log"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("CONVOY_", "RAY_"))}
    environment = {**clean, "PYTHONPATH": str(HERE / "beside"), **contender.environment, **asked, MARK: tree.mark}
    deadline_s = time.monotonic() + contender.ready_within_s
    try:
        with log.open("wb") as output:
            # A session of its own: Ctrl-C is for the comparison, which then stops the server in good order.
            process = subprocess.Popen(
                contender.run, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        try:
            while not is_ready():
                if process.poll() is not None or time.monotonic() > deadline_s:
                    lines = log.read_text(errors="replace").strip().split("\n")[-12:]
                    raise JobError("\n    ".join([f"{contender.title} did not come up; its log ends with", *lines]))
                time.sleep(_POLL_S)
            yield tree
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_WITHIN_S)
    finally:
        # Also where Ctrl-C came in the midst of the start.
        tree.end()


def free_port() -> int:
    """A port that nobody uses at this moment."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        return int(holder.getsockname()[1])
