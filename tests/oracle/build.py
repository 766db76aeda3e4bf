"""A build: a folder with the project's files, from which `convoy` is started as its users start it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.servers import Server
from tests.support.stores import ROOT


@dataclass(frozen=True, slots=True)
class Build:
    """The files in `tree`, run by the Python that runs this, in the corpus' folder. Caches and logs go to `scratch`."""

    tree: Path
    corpus: Path
    scratch: Path

    def run(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        """A command that ends by itself."""
        with self._begun(arguments, subprocess.PIPE, subprocess.PIPE) as process:
            said, wrong = process.communicate(timeout=120)
            return subprocess.CompletedProcess(arguments, process.returncode, said, wrong)

    @contextmanager
    def serve(self, name: str, *options: str) -> Iterator[Server]:
        """`convoy serve` on free ports, ready; it is killed afterwards unless it has ended."""
        log_path = self.scratch / f"{name}.log"
        command = ("serve", "--port", "0", "--grpc-port", "0", *options)
        with log_path.open("wb") as log, self._begun(command, log, log) as process:
            server = Server(process, log_path)
            try:
                server.await_port()
                server.await_ready()
                yield server
            finally:
                process.kill()

    def _begun(self, arguments: tuple[str, ...], stdout: object, stderr: object) -> subprocess.Popen[bytes]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("CONVOY_", "PYTHON"))}
        # Sets have one order in every process, or the framework would list allowed methods in another each time.
        own = {"PYTHONPATH": str(self.tree), "PYTHONHASHSEED": "0", "XDG_CACHE_HOME": str(self.scratch)}
        return subprocess.Popen(
            [sys.executable, "-m", "convoy", *arguments],
            cwd=self.corpus,
            env={**kept, **own, "COLUMNS": "200", "NO_COLOR": "1"},
            stdin=subprocess.DEVNULL,
            stdout=stdout,  # type: ignore[arg-type]
            stderr=stderr,  # type: ignore[arg-type]
        )


@contextmanager
def build_of(place: str, corpus: Path) -> Iterator[Build]:
    """The build in a folder, or of a revision, whose files are unpacked for as long as it is used.

    Raises ValueError when there is neither.
    """
    with tempfile.TemporaryDirectory(prefix="convoy-oracle-build-") as folder:
        scratch, tree = Path(folder), Path(place).resolve()
        if not tree.is_dir():
            tree = scratch / "tree"
            tree.mkdir()
            archive = subprocess.run(["git", "archive", place], cwd=ROOT, capture_output=True, check=False)
            if archive.returncode:
                raise ValueError(f"{place!r} is neither a folder nor a revision: {archive.stderr.decode().strip()}")
            subprocess.run(["tar", "-x", "-C", tree], input=archive.stdout, check=True)
        yield Build(tree, corpus, scratch)
