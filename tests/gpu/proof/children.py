"""An experiment in a process of its own, with a limit: what it noted, and how it ended.

Knows processes and the notes' file; knows nothing of what is measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu.proof.experiment import Ended, Experiment, Ran

ROOT = Path(__file__).resolve().parents[3]
_LAST_STEPS, _LAST_LINES = 8, 6
_KILL_WAIT_S, _LOOK_AGAIN_S = 2.0, 0.01


@dataclass(frozen=True, slots=True)
class Children:
    """How they are started. `environment` is what a carried folder adds to ours."""

    results: Path
    environment: Mapping[str, str]

    def run(self, experiment: Experiment, limit_s: float) -> Ran:
        """At most so long; whatever it started is dead afterwards. `hung` is what did not end."""
        with tempfile.TemporaryDirectory(prefix="gpu-proof-") as temporary:
            folder = Path(temporary)
            notes, log = folder / "notes.jsonl", folder / "log"
            command = (
                *(sys.executable, "-m", "tests.gpu.proof.child", experiment.path),
                *(json.dumps(dict(experiment.arguments)), str(notes), str(self.results.resolve()), str(limit_s)),
            )
            # Its temporary files go with ours, however it ends.
            environment = {**os.environ, **self.environment, "TMPDIR": temporary, "PYTHONUNBUFFERED": "1"}
            began_s = time.monotonic()
            with log.open("wb") as output:
                child = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
                try:
                    status = wait_for(child, limit_s)
                finally:
                    _kill_family(child)
            seconds = round(time.monotonic() - began_s, 1)
            return read_notes(_read(notes), status, _read(log), seconds)


def wait_for(child: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """Its exit code, or None where it did not end."""
    try:
        return child.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None


def read_notes(text: str, status: int | None, log: str, seconds: float) -> Ran:
    """`status` is the process's exit code, None where it had to be killed at its limit."""
    figures: dict[str, float] = {}
    facts: dict[str, str] = {}
    steps: list[str] = []
    said: dict[str, Any] = {}
    for note in _notes(text):
        if "figure" in note:
            figures[note["figure"]] = note["value"]
        elif "fact" in note:
            facts[note["fact"]] = note["value"]
        elif "step" in note:
            steps.append(note["step"])
        else:
            said |= note
    ended, how = _ending(status, said, log)
    return Ran(ended, how, figures, facts, tuple(steps[-_LAST_STEPS:]), seconds, said.get("not_measurable", ""))


def _ending(status: int | None, said: Mapping[str, Any], log: str) -> tuple[Ended, str]:
    last = " / ".join(line.strip() for line in log.strip().splitlines()[-_LAST_LINES:])[-600:]
    if status is None:
        return "hung", "it did not end in its time"
    if status < 0:
        name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
        when = " when it had done everything" if "done" in said else ""
        return "crashed", f"{name}{when}{': ' if last else ''}{last}"
    if "failed" in said:
        return "failed", said["failed"]
    if status or not ("done" in said or "not_measurable" in said):
        return "failed", f"exit code {status}{': ' if last else ''}{last}"
    return "done", ""


def _notes(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        with contextlib.suppress(ValueError):  # the last one may be torn
            note = json.loads(line)
            if isinstance(note, dict):
                yield note


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _kill_family(child: subprocess.Popen[bytes]) -> None:
    """The process and all that it started, sessions of their own included: they would hold the GPU."""
    family = [*_descendants(child.pid), child.pid] if child.poll() is None else []
    for pid in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)  # who is left of its group, should it have died first
    # A process may be stuck in the driver for good; the next one should not have to share the GPU with one that goes.
    end_s = time.monotonic() + _KILL_WAIT_S
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_KILL_WAIT_S)
    while any(is_running(pid) for pid in family) and time.monotonic() < end_s:
        time.sleep(_LOOK_AGAIN_S)


def is_running(pid: int) -> bool:
    """Not gone, and no zombie that nobody has asked for yet."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _descendants(pid: int) -> list[int]:
    """Children and theirs, the youngest first."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name in parentheses may hold anything.
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found: list[int] = []
    new = [pid]
    while new:
        new = [child for child, parent in parents.items() if parent in new]
        found = [*new, *found]
    return found
