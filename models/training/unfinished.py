"""An unfinished run on disk: written after an epoch, read by `--resume`, removed at the end.

torch writes and reads it, with tensors and plain values only (`weights_only`). It records the run's options and images,
so that nothing else continues from it.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from convoy.models.checkpoint import write_whole
from convoy.models.errors import JobError
from convoy.models.records import from_jsonable, to_jsonable
from convoy.models.training.epochs import EpochRecord

_SCHEMA_VERSION = 1
# The largest share of a run's time for writing it, unless it was announced that the run may be killed.
COST_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class UnfinishedRun:
    """`asked` are the run's options. `kept` is the best of the finished epochs."""

    asked: dict[str, str]
    records: tuple[EpochRecord, ...]
    kept: EpochRecord


@dataclass(frozen=True, slots=True)
class _Found:
    run: UnfinishedRun
    state: dict[str, Any]


class UnfinishedFile:
    """The file of one run, which is identified by its options `asked`."""

    def __init__(self, path: Path, asked: Mapping[str, str], clock_s: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._asked = dict(asked)
        self._clock_s = clock_s
        self._due_s = 0.0
        self._waiting: _Found | None = None

    def keep(self, records: Sequence[EpochRecord], kept: EpochRecord, state: dict[str, Any], *, at_once: bool) -> None:
        """Save an epoch. If writing would cost more than `COST_SHARE` of the time, a copy waits for a later epoch or
        for `write_waiting`. Raises JobError if the disk refuses it.
        """
        found = _Found(UnfinishedRun(self._asked, tuple(records), kept), state)
        if at_once or self._clock_s() >= self._due_s:
            self._write(found)
        else:
            self._waiting = _Found(found.run, tree_map(_copied, state))

    def write_waiting(self) -> None:
        """Write what is not written yet. Raises JobError if the disk refuses it."""
        if self._waiting is not None:
            self._write(self._waiting)

    def _write(self, found: _Found) -> None:
        started_s = self._clock_s()
        content = io.BytesIO()
        run = json.dumps(to_jsonable(found.run))
        torch.save({"schema": _SCHEMA_VERSION, "run": run, "state": found.state}, content)
        write_whole(self.path, content.getvalue())
        self._waiting = None
        now_s = self._clock_s()
        self._due_s = now_s + (now_s - started_s) / COST_SHARE

    def read(self) -> _Found | None:
        """Read the file, or return None. Raises JobError if it is broken or belongs to other options."""
        if not self.path.exists():
            return None
        try:
            found = torch.load(self.path, map_location="cpu", weights_only=True)
            if found["schema"] != _SCHEMA_VERSION:
                raise ValueError(f"schema {found['schema']}, this version reads {_SCHEMA_VERSION}")
            run = from_jsonable(UnfinishedRun, json.loads(found["run"]), "it")
        except Exception as error:  # a zip, pickle or storage error
            why = " ".join(str(error).split()) or type(error).__name__
            raise JobError(f"{self.path} is not a readable unfinished run ({why}); remove --resume") from error
        self._refuse_other(run.asked)
        return _Found(run, found["state"])

    def remove(self) -> None:
        """Remove the file at the end of the run."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _refuse_other(self, asked: Mapping[str, str]) -> None:
        for name in sorted({*asked, *self._asked}):
            then, now = asked.get(name, "nothing"), self._asked.get(name, "nothing")
            if then != now:
                raise JobError(
                    f"the unfinished run in {self.path} was started with {name} {then}, not {now}; use the same, or "
                    "remove --resume to start again"
                )


def _copied(one: Any) -> Any:
    """A copy on the host that later steps do not change."""
    return one.detach().to("cpu", copy=True) if isinstance(one, Tensor) else one
