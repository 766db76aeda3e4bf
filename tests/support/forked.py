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
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from multiprocessing.forkserver import ForkServer
from multiprocessing.popen_forkserver import Popen
from pathlib import Path
from typing import IO, Any
from unittest import mock

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        *("tests.support.forked", "tests.support.fake_engine", "uvloop", "convoy.command"),
        *("convoy.app.server.main", "convoy.app.grpc.server"),
    ]
)

# Another such process, which has imported torch: a server never does.
_WITH_TORCH = ForkServer()
_WITH_TORCH.set_forkserver_preload(
    [
        *("tests.support.forked", "convoy.export.sources.torch_child.child"),
        *("torchvision", "onnxscript", "torch.onnx._internal.exporter._core"),
    ]
)

# At this signal the process gives all memory back that its heap keeps for later, so that what it still has is in use.
GIVE_BACK = signal.SIGUSR2


class ForkedProcess:
    """`python -m module arguments`. As far as the tests use it, it is a `Popen`.

    Both outputs are in one log, unless there is a place for what it says of errors. `start` makes the copy.
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
        in_path: Path = Path(os.devnull),
        start: type[ForkServerProcess] = _FORKS.Process,
    ) -> None:
        self._called = [module, *arguments]
        given = (self._called, cwd, env, (in_path, log_path, error_path or log_path))
        self._process = start(target=_become, args=given, daemon=True)
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


class _TorchPopen(Popen):
    def _launch(self, process_obj: Any) -> None:
        with mock.patch("multiprocessing.forkserver.connect_to_new_process", _WITH_TORCH.connect_to_new_process):
            super()._launch(process_obj)


class _TorchProcess(ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 - the library's name
        return _TorchPopen(process_obj)


@contextmanager
def torch_child(arguments: Sequence[str], stdout: IO[bytes], stderr: IO[bytes]) -> Iterator[ForkedProcess]:
    """In the place of the export's `child_process`, for its torch step."""
    log, folder = Path(stdout.name), arguments[-1]
    with tempfile.TemporaryDirectory() as own:
        pipe = Path(own) / "stdin"  # that never ends
        os.mkfifo(pipe)
        where = {"cwd": Path.cwd(), "env": dict(os.environ), "log_path": log, "in_path": pipe}
        where["env"]["PYTHONDONTWRITEBYTECODE"] = "1"  # as by -B, on the command line of the real one
        child = ForkedProcess("convoy.export.sources.torch_child", [folder], start=_TorchProcess, **where)
        try:
            yield child
        finally:
            child.kill()


def _become(called: list[str], cwd: Path, env: dict[str, str], streams: tuple[Path, Path, Path]) -> None:
    for stream, (path, mode) in enumerate(zip(streams, ("r+b", "ab", "ab"), strict=True)):
        with path.open(mode, buffering=0) as file:
            os.dup2(file.fileno(), stream)
    # What the pytest process would read and write is not what this one does.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.dont_write_bytecode = bool(env.get("PYTHONDONTWRITEBYTECODE"))
    signal.signal(GIVE_BACK, lambda *_: ctypes.CDLL(None).malloc_trim(0))
    module, *arguments = called
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
