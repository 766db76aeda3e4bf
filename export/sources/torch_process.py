"""The parent's side of the torch child: starts it, waits for it, and reads its results.

Knows processes and files, not torch. The child gets its own session, so that Ctrl-C only reaches the parent, which then
ends it; and it holds the parent's pipe, so that it ends with the parent in any case.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
import safetensors.numpy

from convoy.export.rows import Rows
from convoy.export.sources import torch_job as files
from convoy.export.sources.torch_job import (
    ANY_BATCH,
    IN,
    INPUT_NAME,
    NOISE,
    OUT,
    Answered,
    Description,
    Inquiry,
    TorchJob,
    TorchOutcome,
    TorchResult,
    one_line,
)
from convoy.models.checkout import IMPORT_ROOT
from convoy.models.errors import JobError, UsageError
from convoy.models.records import from_jsonable, to_jsonable

# -P: not the script's folder, whose `profile.py` would shadow Python's module. -B: no bytecode in the user's folder.
_CHILD = ("-P", "-B", "-m", "convoy.export.sources.torch_child")


def run_job(job: TorchJob, samples: Rows, folder: Path, others: Sequence[np.ndarray], noise: Rows) -> TorchResult:
    """Let a child do the job; `folder` is empty and used for the exchange. `others` are images of other sizes; the job
    need not run on `noise`.

    Raises JobError with the child's one line, or with what killed it.
    """
    (folder / files.JOB).write_text(json.dumps(to_jsonable(job)))
    named = dict(zip(files.OTHERS, others, strict=False))
    own = {f"{IN}{name}": np.ascontiguousarray(array) for name, array in samples.items()}
    noisy = {f"{NOISE}{name}": np.ascontiguousarray(array) for name, array in noise.items()}
    (folder / files.SAMPLES).write_bytes(safetensors.numpy.save({**own, **noisy, **named}))
    _run(folder, files.OUTCOME)
    return read_result(folder, others, noise)


def read_result(folder: Path, others: Sequence[np.ndarray], noise: Rows) -> TorchResult:
    """The results of a job in its folder. Raises JobError with the child's one line."""
    named = dict(zip(files.OTHERS, others, strict=False))
    outcome = from_jsonable(TorchOutcome, json.loads((folder / files.OUTCOME).read_text()), files.OUTCOME)
    if outcome.error is not None:
        raise JobError(outcome.error)
    answers = safetensors.numpy.load((folder / files.REFERENCE).read_bytes())
    return TorchResult(
        folder / files.ONNX,
        {name: answers[f"{OUT}{name}"] for name in outcome.outputs},
        outcome.torch_version,
        max_batch=1 if outcome.why_alone else ANY_BATCH,
        remark="; ".join(filter(None, (outcome.why_fixed, outcome.why_alone))),
        weights_entry=outcome.weights_entry,
        elsewhere=tuple(
            Answered({INPUT_NAME: array}, {output: answers[f"{other}:{output}"] for output in outcome.outputs})
            for other, array in named.items()
            if f"{other}:{outcome.outputs[0]}" in answers
        ),
        task=outcome.task,
        detection=outcome.detection,
        noise=_answered(noise, answers, outcome.outputs),
    )


def _answered(noise: Rows, answers: Rows, outputs: Sequence[str]) -> Answered | None:
    if any(f"{NOISE}{name}" not in answers for name in outputs):
        return None
    return Answered(noise, {name: answers[f"{NOISE}{name}"] for name in outputs})


def ask(inquiry: Inquiry) -> Description:
    """A registry's answer about a model, asked in a child. Raises UsageError for an unknown name, and JobError."""
    with tempfile.TemporaryDirectory(prefix="convoy-inquiry-") as temporary:
        folder = Path(temporary)
        (folder / files.INQUIRY).write_text(json.dumps(to_jsonable(inquiry)))
        text = _run(folder, files.DESCRIPTION)
    description = from_jsonable(Description, json.loads(text), files.DESCRIPTION)
    if description.error is not None:
        raise (UsageError if description.is_wrong_call else JobError)(description.error)
    return description


def _run(folder: Path, answer: str) -> str:
    """The text of the file `answer` that a child leaves in `folder`."""
    log_file = folder / "child.log"
    with log_file.open("wb") as log, child_process([*_CHILD, str(folder)], log, log) as child:
        status = child.wait()
    try:
        return (folder / answer).read_text()
    except FileNotFoundError:
        raise JobError(_obituary(status, log_file)) from None


@contextmanager
def child_process(
    arguments: Sequence[str], stdout: IO[bytes] | int, stderr: IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    """A Python with Convoy in its own session, which ends with the block, with everything that the user's code started.

    Its stdin is the parent's pipe.
    """
    path = os.pathsep.join([str(IMPORT_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    child = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def _obituary(status: int, log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    # A memory limit shows as an uncaught C++ exception, or as Python's own.
    starved = any("bad_alloc" in line or line.startswith("MemoryError") for line in lines[-5:])
    if status == -signal.SIGKILL or starved:
        why = "most likely because memory ran out"
        return f"the torch step was killed, {why}; close other programs or use a larger machine"
    last = f": {one_line(lines[-1])}" if lines else ""
    how = f"signal {-status}" if status < 0 else f"exit code {status}"
    return f"the torch step died with {how}{last}; check the network's code and run the command again"
