"""A virtual environment for each peer, made once from its pinned requirements and kept.

Knows interpreters, venv and pip. Two frameworks in one environment would have to agree on their dependencies, so
each has its own, and none has Convoy's.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from convoy.loadtest.peers.definition import REQUIREMENTS, Peer
from convoy.models.errors import JobError

PIP_INSTALL = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
_STAMP = ".complete"
INSTALL_WITHIN_S = 1800.0
_LAST_LINES = 5
_DESCRIBE = "import sys, sysconfig; print(sys.version, bool(sysconfig.get_config_var('Py_ENABLE_SHARED')), sep='|')"


def ensure_environment(peer: Peer, home: Path) -> Path:
    """The peer's interpreter in `home`, installed now if its requirements are not there yet.

    Raises JobError where there is no fitting interpreter or where pip fails.
    """
    interpreter, description = _interpreter(peer)
    folder = (home / peer.name).absolute()
    python = folder / "bin" / "python"
    requirements = peer.folder / REQUIREMENTS
    wanted = hashlib.sha256(description.encode() + requirements.read_bytes()).hexdigest()
    has_requirements = any(line.strip() for line in requirements.read_text().splitlines())

    def make() -> None:
        without_pip = () if has_requirements else ("--without-pip",)
        run_installer(peer.title, (interpreter, "-m", "venv", *without_pip, str(folder)))
        if has_requirements:
            run_installer(peer.title, (str(python), *PIP_INSTALL, "--requirement", str(requirements)))

    make_once(folder, wanted, make)
    return python


def make_once(folder: Path, wanted: str, make: Callable[[], None]) -> None:
    """Call `make`, which fills the folder, unless an earlier call has done so with the same `wanted`."""
    stamp = folder / _STAMP
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    shutil.rmtree(folder, ignore_errors=True)
    make()
    stamp.write_text(wanted)


def own_libraries(peer: Peer, python: Path) -> dict[str, str]:
    """What a peer that loads libpython must be told, so that it loads this interpreter's and not the system's."""
    if not peer.shared_libpython:
        return {}
    show = "import sysconfig; print(sysconfig.get_config_var('LIBDIR'))"
    folder = subprocess.run([python, "-c", show], capture_output=True, text=True, check=True).stdout.strip()
    return {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, (folder, os.environ.get("LD_LIBRARY_PATH"))))}


def _interpreter(peer: Peer) -> tuple[str, str]:
    """The interpreter to use and what it says of itself."""
    candidates = [sys.executable] if peer.python is None else _named(peer.python)
    for candidate in candidates:
        # A version manager's name for an interpreter is there even where the interpreter is not.
        answer = subprocess.run([candidate, "-c", _DESCRIBE], capture_output=True, text=True)
        version, _, shared = answer.stdout.strip().rpartition("|")
        fits = peer.python is None or version.startswith(f"{peer.python}.")
        if answer.returncode == 0 and fits and (shared == "True" or not peer.shared_libpython):
            return candidate, answer.stdout
    shared = " with a shared libpython" if peer.shared_libpython else ""
    raise JobError(f"{peer.title} needs Python {peer.python}{shared}, and there is none on the PATH; install it")


def _named(version: str) -> list[str]:
    # A version manager's may hide the system's, which has what some builds lack.
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    found = [shutil.which(f"python{version}", path=folder) for folder in folders]
    managed = sorted(Path.home().glob(f".pyenv/versions/{version}*/bin/python"), reverse=True)
    return [*(name for name in found if name), *map(str, managed)]


def run_installer(what: str, command: Sequence[str]) -> None:
    """Run what installs `what`. Raises JobError with its last words."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_WITHIN_S)
    except subprocess.TimeoutExpired:
        raise JobError(f"installing {what} took longer than {INSTALL_WITHIN_S:g} s; try again") from None
    if done.returncode != 0:
        # Where a package's own build fails, pip shows its output and then talks of itself.
        output, _, _ = (done.stdout + done.stderr).partition("[end of output]")
        lines = [line.strip() for line in output.splitlines() if line.strip() and not line.startswith("WARNING")]
        raise JobError(f"{what} cannot be installed: {' / '.join(lines[-_LAST_LINES:])}")
