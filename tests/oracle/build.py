"""A build: a folder with the project's files, of any age, from which `convoy` is started as its users start it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

_START_S, _STOP_S = 120.0, 60.0
_LISTENING = re.compile(r"listening on http://\S+:(\d+)")
_GRPC_LISTENING = re.compile(r"listening on grpc://\S+:(\d+)")


class BuildFailure(Exception):
    """A build does not start, or there is none; says what it wrote."""


@dataclass(frozen=True, slots=True)
class Running:
    """A server that is ready. `grpc_port` is None where it has none."""

    process: subprocess.Popen[bytes]
    port: int
    grpc_port: int | None


@dataclass(frozen=True, slots=True)
class Build:
    """The files in `tree`, run by the Python that runs this."""

    tree: Path

    def command(self, *arguments: str) -> list[str]:
        """By whichever door the build has."""
        door = ["convoy.py"] if (self.tree / "convoy.py").exists() else ["-m", "convoy"]
        return [sys.executable, *door, *arguments]

    def environment(self, cache: str) -> dict[str, str]:
        """Nothing of the caller's options or modules, nor of what an earlier run has left in a cache.

        Sets have one order in every process, or the framework would list methods that are allowed in another each time.
        """
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("CONVOY_", "PYTHON"))}
        own = {"PYTHONPATH": str(self.tree), "PYTHONHASHSEED": "0", "XDG_CACHE_HOME": cache}
        return {**kept, **own, "COLUMNS": "200", "NO_COLOR": "1"}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        """A command that ends by itself."""
        with tempfile.TemporaryDirectory(prefix="convoy-oracle-cache-") as cache:
            return subprocess.run(
                self.command(*arguments),
                cwd=self.tree,
                env=self.environment(cache),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=120,
                check=False,
            )

    @contextmanager
    def serve(self, *options: str) -> Iterator[Running]:
        """`convoy serve` on free ports, ready; told to end afterwards. Raises BuildFailure.

        Older builds serve in several processes on a machine of four cores; the variable says one, and no option, which
        later builds do not have.
        """
        with tempfile.TemporaryDirectory(prefix="convoy-oracle-run-") as folder:
            log = Path(folder) / "log"
            command = self.command("serve", "--port", "0", "--grpc-port", "0", *options)
            with log.open("wb") as file:
                process = subprocess.Popen(
                    command,
                    cwd=self.tree,
                    env={**self.environment(folder), "CONVOY_EDGES": "0"},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                )
            try:
                yield _await_ready(process, log, has_grpc="-1" not in options)
            finally:
                stop(process)


def stop(process: subprocess.Popen[bytes]) -> int:
    """The exit code after SIGTERM, or at last after SIGKILL; it may have ended before."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


@contextmanager
def build_of(place: str, repository: Path) -> Iterator[Build]:
    """The build in a folder, or of a revision, whose files are put into a folder for as long as it is used.

    Raises BuildFailure.
    """
    if Path(place).is_dir():
        yield Build(Path(place).resolve())
        return
    with tempfile.TemporaryDirectory(prefix="convoy-oracle-build-") as folder:
        archive = subprocess.run(
            ["git", "archive", "--format=tar", place], cwd=repository, capture_output=True, check=False
        )
        if archive.returncode:
            raise BuildFailure(f"{place!r} is neither a folder nor a revision: {archive.stderr.decode().strip()}")
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield Build(Path(folder))


def _await_ready(process: subprocess.Popen[bytes], log: Path, *, has_grpc: bool) -> Running:
    # A proxy of the environment's would be asked for 127.0.0.1, too.
    web = build_opener(ProxyHandler({}))
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        text = log.read_text(errors="replace")
        http, grpc = _LISTENING.search(text), _GRPC_LISTENING.search(text)
        if http and (
            grpc or not has_grpc
        ):  # a thread writes the log, so a server may be ready before its line is there
            try:
                with web.open(f"http://127.0.0.1:{http[1]}/v2/health/ready", timeout=10):
                    return Running(process, int(http[1]), int(grpc[1]) if grpc else None)
            except OSError:
                pass
        time.sleep(0.02)
    words = log.read_text(errors="replace")[-3000:]
    raise BuildFailure(f"{' '.join(process.args)} is not ready; exit code {process.poll()}:\n{words}")  # type: ignore[arg-type]


def options_of(options: Sequence[str], folder: Path, placeholder: str) -> list[str]:
    """With the corpus' folder in the place of its placeholder."""
    return [option.replace(placeholder, str(folder)) for option in options]
