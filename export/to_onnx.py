"""The parent's side of the torch child: starts it, waits for it, and reads what it left.

Knows processes and files, not torch. The child gets a session of its own, so that Ctrl-C reaches only us and
we end it; and it holds our pipe, so that it ends with us whatever happens.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.numpy

from app.engines.cpu import cpu_budget
from export import torch_job as files
from export.plan import Plan
from export.torch_job import TENSOR, Job, Outcome, one_line
from models.errors import JobError
from models.records import from_jsonable, to_jsonable

_ROOT = Path(__file__).resolve().parent.parent
_LOG = "child.log"
# -P: not the folder of the script, whose `profile.py` is also a module of Python's. -B: no litter in the user's folder.
_CHILD = ("-P", "-B", "-m", "export.torch_child")


@dataclass(frozen=True, slots=True)
class TorchResult:
    """The fp32 graph, and torch's own answers to the samples: float32 [n, outputs]."""

    onnx: Path
    reference: np.ndarray
    torch_version: str


def to_onnx(plan: Plan, samples: np.ndarray, folder: Path) -> TorchResult:
    """Export the plan's network in a child; `folder` is an empty one for the exchange.

    Raises JobError with the child's one line, or with what killed it.
    """
    job = Job(
        kind=plan.source.kind,
        name=plan.source.name,
        file=str(plan.source.file) if plan.source.file else None,
        weights=str(plan.weights.resolve()) if plan.weights else None,
        classes=len(plan.labels) or None,
        uint8_front=plan.image.front == "uint8_nhwc",
        mean=plan.image.mean,
        std=plan.image.std,
        max_batch=plan.max_batch,
        threads=cpu_budget(),
    )
    (folder / files.JOB).write_text(json.dumps(to_jsonable(job)))
    (folder / files.SAMPLES).write_bytes(safetensors.numpy.save({TENSOR: samples}))
    outcome = _run(folder)
    if outcome.error is not None:
        raise JobError(outcome.error)
    reference = safetensors.numpy.load((folder / files.REFERENCE).read_bytes())[TENSOR]
    return TorchResult(folder / files.ONNX, reference, outcome.torch_version)


def _run(folder: Path) -> Outcome:
    command = [sys.executable, *_CHILD, str(folder)]
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with (folder / _LOG).open("wb") as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        try:
            status = child.wait()
        finally:
            _end(child)
    try:
        text = (folder / files.OUTCOME).read_text()
    except FileNotFoundError:
        raise JobError(_obituary(status, folder / _LOG)) from None
    return from_jsonable(Outcome, json.loads(text), files.OUTCOME)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Leave nothing running, not even what the user's code started."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    assert child.stdin is not None
    child.stdin.close()


def _obituary(status: int, log: Path) -> str:
    if status == -signal.SIGKILL:
        return "the torch step was killed, most likely for want of memory; close other programs or use a larger machine"
    lines = log.read_text(errors="replace").strip().splitlines()
    last = f": {one_line(lines[-1])}" if lines else ""
    how = f"signal {-status}" if status < 0 else f"exit code {status}"
    return f"the torch step died with {how}{last}; check the network's code and run the command again"
