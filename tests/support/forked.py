"""Servers and commands that need not import what all of them import: copies of one process that has done so.

Importing is most of what a start costs, and the suite starts hundreds. From its main module on, a copy is what a
process of its own would be: with an environment, outputs, signals and an exit code of its own.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        *("tests.support.forked", "tests.support.fake_engine", "uvloop", "convoy.command"),
        *("convoy.app.server.main", "convoy.app.grpc.server"),
    ]
)

# At this signal the process gives all memory back that its heap keeps for later, so that what it still has is in use.
GIVE_BACK = signal.SIGUSR2


class ForkedProcess:
    """`python -m module arguments`. As far as the tests use it, it is a `Popen`.

    Both outputs are in one log, unless there is a place for what it says of errors.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        cwd: Path,
        env: dict[str, str],
        log_path: Path,
        error_path: Path | None = None,
    ) -> None:
        self._called = [module, *arguments]
        given = (self._called, cwd, env, log_path, error_path or log_path)
        self._process = _FORKS.Process(target=_become, args=given, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.returncode
        if code is None:
            raise subprocess.TimeoutExpired(self._called, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _become(called: list[str], cwd: Path, env: dict[str, str], log_path: Path, error_path: Path) -> None:
    with Path(os.devnull).open("rb") as nothing, log_path.open("ab") as log, error_path.open("ab") as errors:
        for stream, file in enumerate((nothing, log, errors)):
            os.dup2(file.fileno(), stream)
    # What the pytest process would write to is not what this one writes to.
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    signal.signal(GIVE_BACK, lambda *_: ctypes.CDLL(None).malloc_trim(0))
    module, *arguments = called
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
