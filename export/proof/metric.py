"""The user's own measure: `--metric file.py:function`, whose scores take the place of the task's.

    scores = function(outputs, targets)      a number for each sample, more is better

`outputs` is the one array [n, ...], or a dict of arrays by name where there are several; `targets` [n, ...] are those
of the data set. The function runs in a process of its own, for it may import anything, and that process ends with the
export. Knows processes and frames; `convoy.export.proof.metric_child` is the other side.
"""

from __future__ import annotations

import io
import json
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from convoy.export.proof.judging import Judge, judge_of, with_metric
from convoy.export.proof.metric_child import OUT, TARGETS, read_frame, write_frame
from convoy.export.rows import Rows, count_of
from convoy.export.sources.torch_job import one_line
from convoy.export.sources.torch_process import child_process
from convoy.models.errors import JobError
from convoy.models.spec import ModelSpec

_CHILD = ("-P", "-B", "-m", "convoy.export.proof.metric_child")


@contextmanager
def metric_judge(metric: tuple[Path, str] | None, spec: ModelSpec) -> Iterator[Judge]:
    """The judge of the spec's task, with the user's function in the place of its score while the context lasts.

    Raises JobError for a function that is not there.
    """
    if metric is None:
        yield judge_of(spec)
        return
    file, name = metric
    with (
        tempfile.TemporaryFile() as log,
        child_process([*_CHILD, str(file), name], subprocess.PIPE, log) as child,
    ):
        process = MetricProcess(file, name, child, log)
        process.asked(b"")
        # What else the file imports is not known, so that no score is kept for the next run.
        yield with_metric(judge_of(spec), process.shown, uuid.uuid4().hex, process.scores, spec)


class MetricProcess:
    """A process that has the function. Made by `metric_judge`."""

    def __init__(self, file: Path, name: str, child: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        self.shown = f"{file.name}:{name}"
        self._child, self._log = child, log

    def scores(self, outputs: Rows, targets: np.ndarray) -> np.ndarray:
        """float64 [n], finite. Raises JobError for what the function may not do, and with its own errors."""
        if len(targets) != count_of(outputs):
            raise JobError(f"there are {len(targets)} targets for {count_of(outputs)} samples; this is a bug")
        file = io.BytesIO()
        arrays: dict[str, Any] = {TARGETS: targets, **{f"{OUT}{name}": array for name, array in outputs.items()}}
        np.savez(file, **arrays)
        return np.array(self.asked(file.getvalue())["scores"], np.float64)

    def asked(self, frame: bytes) -> dict[str, list[float]]:
        """The child's answer to a frame; an empty one only asks whether it is ready."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            write_frame(self._child.stdin, frame)
            answer = json.loads(read_frame(self._child.stdout))
        except (OSError, EOFError):
            raise JobError(
                f"--metric {self.shown} ended its process{self._final_error()}; let it return scores"
            ) from None
        if "error" in answer:
            raise JobError(f"--metric {answer['error']}")
        return dict(answer)

    def _final_error(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f" ({one_line(lines[-1], 160)})" if lines else ""
