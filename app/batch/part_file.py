"""A part's results on disk: written aside, synced and renamed, so that they are there whole or not at all.

A file says itself which part of which run it is and which of its images could not be read, in the metadata of its
schema. So nothing else has to be kept in step with it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Struct
from msgspec.json import decode, encode

from convoy.app.batch.labeller import LabelledRows, Unreadable
from convoy.app.batch.records import BatchPart, Runner
from convoy.models.activation import NAN
from convoy.models.errors import JobError
from convoy.models.files import sync
from convoy.models.spec import TensorSpec
from convoy.models.store import disk_errors

_KEY = b"convoy"
_ASIDE = ".writing-"
ERRORS = "errors.parquet"
_ERRORS_SCHEMA = pa.schema([("path", pa.string()), ("error", pa.string())])


class PartFileRecord(Struct, frozen=True):
    """What a part's file says of itself. `errors` are paths and why they have no labels."""

    run: str
    number: int
    images: int
    runner: Runner
    errors: list[tuple[str, str]]


class PartResults:
    """Collects what becomes of a part's images, in any order."""

    def __init__(self, part: BatchPart, labels: Sequence[str], embeddings: TensorSpec | None) -> None:
        self.part, self._spec = part, embeddings
        self._labels = pa.array(labels, pa.string())
        self._paths: list[str | None] = [None] * part.images
        # As wide as the first rows are.
        self._class_ids = np.zeros((part.images, 0), np.int32)
        self._scores = np.zeros((part.images, 0), np.float32)
        self._embeddings = np.zeros((part.images, 0), embeddings.numpy_dtype if embeddings else np.float32)
        self._errors: dict[int, tuple[str, str]] = {}
        self._left = part.images

    def add(self, rows: LabelledRows) -> int:
        """A batch of this part; how many of its images gave NaN."""
        places = np.array([image.place for image in rows.images])
        self._class_ids = _filled(self._class_ids, places, rows.ranked.class_ids)
        self._scores = _filled(self._scores, places, rows.ranked.scores)
        if rows.embeddings is not None:
            self._embeddings = _filled(self._embeddings, places, rows.embeddings)
        for image, is_nan in zip(rows.images, rows.ranked.is_nan, strict=True):
            if is_nan:
                self._errors[image.place] = (image.path, NAN)
            else:
                self._paths[image.place] = image.path
        self._left -= len(rows.images)
        return int(rows.ranked.is_nan.sum())

    def add_error(self, unreadable: Unreadable) -> None:
        self._errors[unreadable.image.place] = (unreadable.image.path, unreadable.error)
        self._left -= 1

    @property
    def is_complete(self) -> bool:
        return not self._left

    @property
    def errors(self) -> int:
        return len(self._errors)

    def write(self, out: Path, run: str, runner: Runner) -> None:
        """Raises JobError for a full or read-only disk."""
        errors = [(_text(path), error) for _, (path, error) in sorted(self._errors.items())]
        record = PartFileRecord(run, self.part.number, self.part.images, runner, errors)
        table = self._table().replace_schema_metadata({_KEY: encode(record)})
        write_table(table, out / name_of(self.part.number))

    def _table(self) -> pa.Table:
        good = np.array([index for index, path in enumerate(self._paths) if path is not None], np.int64)
        class_ids = pa.array(self._class_ids[good].reshape(-1))
        columns = {
            "path": pa.array([_text(path) for path in self._paths if path is not None], pa.string()),
            "class_ids": _lists(class_ids, self._class_ids.shape[1]),
            "labels": _lists(self._named(class_ids), self._class_ids.shape[1]),
            "scores": _lists(pa.array(self._scores[good].reshape(-1)), self._scores.shape[1]),
        }
        if self._spec is not None:
            columns["embeddings"] = _lists(pa.array(self._embeddings[good].reshape(-1)), self._embeddings.shape[1])
        return pa.table(columns)

    def _named(self, class_ids: pa.Array) -> pa.Array:
        """Null where the model has no name for a class."""
        numbers = class_ids.to_numpy()
        known = pa.array(numbers, mask=numbers >= len(self._labels))
        return self._labels.take(known)


def name_of(number: int) -> str:
    return f"part-{number:05d}.parquet"


def read_record(path: Path) -> PartFileRecord | None:
    """What a part's file says of itself; None where it is no such file. Raises OSError."""
    try:
        return decode((pq.read_schema(path).metadata or {})[_KEY], type=PartFileRecord)
    except FileNotFoundError:
        return None
    except (KeyError, ValueError, pa.ArrowException):
        return None


def write_errors(out: Path, records: Iterable[PartFileRecord]) -> int:
    """All parts' errors as one table, in the order of the parts; how many there are. Raises JobError."""
    errors = [error for record in records for error in record.errors]
    columns = [[path for path, _ in errors], [error for _, error in errors]]
    write_table(pa.table([pa.array(column, pa.string()) for column in columns], _ERRORS_SCHEMA), out / ERRORS)
    return len(errors)


def write_table(table: pa.Table, path: Path) -> None:
    """Aside, synced, renamed. Raises JobError for a full or read-only disk."""
    with disk_errors(path.parent):
        descriptor, name = tempfile.mkstemp(prefix=_ASIDE, suffix=".parquet", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                pq.write_table(table, file, compression="zstd")
                os.fchmod(descriptor, 0o644)
                file.flush()
                os.fsync(descriptor)
            Path(name).replace(path)
        except BaseException as error:
            with suppress(OSError):
                Path(name).unlink()
            if isinstance(error, FileNotFoundError):
                raise JobError(f"{path.parent} was removed meanwhile; run the command again") from error
            raise
        sync(path.parent)


def remove_leftovers(out: Path) -> None:
    """What writers that were killed have left."""
    for leftover in out.glob(f"{_ASIDE}*"):
        with suppress(OSError):
            leftover.unlink()


def _filled(rows: np.ndarray, places: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Raises JobError where an output's rows are now longer, now shorter."""
    if not rows.shape[1]:
        rows = np.zeros((len(rows), own.shape[1]), rows.dtype)
    if rows.shape[1] != own.shape[1]:
        raise JobError(
            f"an output has now {rows.shape[1]} and now {own.shape[1]} values a sample, which no column holds"
        )
    rows[places] = own
    return rows


def _lists(values: pa.Array, length: int) -> pa.Array:
    rows = len(values) // length if length else 0
    offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * length)
    return pa.ListArray.from_arrays(offsets, values)


def _text(path: str) -> str:
    """A name that parquet can hold: what of it is no UTF-8 is written as Python would show it."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
