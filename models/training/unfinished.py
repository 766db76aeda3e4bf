"""A run that is not over, on disk: written after each epoch, taken up by `--resume`, removed when the run is over.

torch writes and reads it, tensors and plain values only (`weights_only`). It names the options and the images that the
run was started with, so that nothing else goes on from it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from convoy.models.checkpoint import write_whole
from convoy.models.errors import JobError
from convoy.models.records import from_jsonable, to_jsonable
from convoy.models.training.epochs import EpochRecord

_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class UnfinishedRun:
    """`asked` is what the run was started with, by option. `kept` is the best of the epochs that are done."""

    asked: dict[str, str]
    records: tuple[EpochRecord, ...]
    kept: EpochRecord


@dataclass(frozen=True, slots=True)
class _Found:
    run: UnfinishedRun
    state: dict[str, Any]


class UnfinishedFile:
    """The file of one run, which is known by what was `asked` of it."""

    def __init__(self, path: Path, asked: Mapping[str, str]) -> None:
        self.path = path
        self._asked = dict(asked)

    def write(self, records: list[EpochRecord], kept: EpochRecord, state: dict[str, Any]) -> None:
        """Replaces what is there, in one step. Raises JobError when the disk does not take it."""
        run = UnfinishedRun(self._asked, tuple(records), kept)
        content = io.BytesIO()
        torch.save({"schema": _SCHEMA_VERSION, "run": json.dumps(to_jsonable(run)), "state": state}, content)
        write_whole(self.path, content.getvalue())

    def read(self) -> _Found | None:
        """What is there, or None. Raises JobError where it is broken, or was started with other options."""
        if not self.path.exists():
            return None
        try:
            found = torch.load(self.path, map_location="cpu", weights_only=True)
            if found["schema"] != _SCHEMA_VERSION:
                raise ValueError(f"schema {found['schema']}, this version reads {_SCHEMA_VERSION}")
            run = from_jsonable(UnfinishedRun, json.loads(found["run"]), "it")
        except Exception as error:  # a zip, pickle or storage error, by what is broken
            why = " ".join(str(error).split())[:120] or type(error).__name__
            raise JobError(f"{self.path} is no unfinished run that can be read ({why}); leave --resume out") from error
        self._refuse_other(run.asked)
        return _Found(run, found["state"])

    def remove(self) -> None:
        """The run is over."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _refuse_other(self, asked: Mapping[str, str]) -> None:
        for name in sorted({*asked, *self._asked}):
            then, now = asked.get(name, "nothing"), self._asked.get(name, "nothing")
            if then != now:
                raise JobError(
                    f"the unfinished run in {self.path} was started with {name} {then}, not {now}; say the same, or "
                    "leave --resume out to start anew"
                )
