"""The folder of results: the run that it belongs to, and each part's file.

The run's file records what determines the rows, and a different run is refused; what only affects speed (batch size,
workers, Ray) is not recorded. A part's file is complete or absent. The metadata of its schema records its run, its part
and the unreadable images, so no other file has to be kept consistent with it.
"""

from __future__ import annotations

import fcntl
import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Struct
from msgspec.json import decode, encode, format

from convoy.app.batch.labeller import Result, Unreadable
from convoy.app.batch.records import BatchPart, RunFile, RunIdentity, Runner
from convoy.app.pictures.answering import RankedClasses
from convoy.models.activation import NAN
from convoy.models.answers import Detection
from convoy.models.errors import JobError
from convoy.models.files import replace_file
from convoy.models.spec import TensorSpec
from convoy.models.store import disk_errors

_KEY = b"convoy"
_ASIDE = ".writing-"
ERRORS = "errors.parquet"
_ERRORS_SCHEMA = pa.schema([("path", pa.string()), ("error", pa.string())])


class PartFileRecord(Struct, frozen=True):
    """A part file's metadata. `errors` are paths and why they have no labels."""

    run: str
    number: int
    images: int
    runner: Runner
    errors: list[tuple[str, str]]


class PartResults:
    """Collects the results of a part's images, which arrive in order, except for unreadable ones.

    Those of a detector have a column of boxes.
    """

    def __init__(
        self, part: BatchPart, labels: Sequence[str], embeddings: TensorSpec | None, *, has_boxes: bool = False
    ) -> None:
        self.part, self._labels = part, pa.array(labels, pa.string())
        columns = {"path": pa.string()} | {
            name: pa.list_(values)
            for name, values in (("class_ids", pa.int32()), ("labels", pa.string()), ("scores", pa.float32()))
        }
        if has_boxes:
            columns["boxes"] = pa.list_(pa.list_(pa.float32(), 4))
        if embeddings is not None:
            columns["embeddings"] = pa.list_(pa.from_numpy_dtype(embeddings.numpy_dtype))
        self._tables = [pa.schema(columns).empty_table()]
        self._errors: dict[int, tuple[str, str]] = {}
        self._left = part.images

    def add(self, result: Result) -> None:
        if isinstance(result, Unreadable):
            self._errors[result.image.place] = (_text(result.image.path), result.error)
            self._left -= 1
            return
        if isinstance(result.found, RankedClasses):
            errors = {int(row): NAN for row in np.flatnonzero(result.found.is_nan)}
            good = ~result.found.is_nan
            columns = {"class_ids": _lists(result.found.class_ids[good]), "scores": _lists(result.found.scores[good])}
        else:
            errors = {row: why for row, why in enumerate(result.found) if isinstance(why, str)}
            good = np.array([not isinstance(one, str) for one in result.found])
            columns = _box_columns([one for one in result.found if not isinstance(one, str)])
        class_ids = columns["class_ids"]
        columns["labels"] = pa.ListArray.from_arrays(class_ids.offsets, self._named(class_ids.values))
        columns["path"] = [_text(image.path) for image, is_good in zip(result.images, good, strict=True) if is_good]
        if result.embeddings is not None:
            columns["embeddings"] = _lists(result.embeddings[good])
        self._tables.append(pa.table(columns, schema=self._tables[0].schema))
        for row, why in errors.items():
            image = result.images[row]
            self._errors[image.place] = (_text(image.path), why)
        self._left -= len(result.images)

    @property
    def is_complete(self) -> bool:
        return not self._left

    @property
    def errors(self) -> int:
        return len(self._errors)

    def write(self, out: Path, run: str, runner: Runner) -> None:
        """Write the part. Raises JobError for a full or read-only disk."""
        errors = [error for _, error in sorted(self._errors.items())]
        record = PartFileRecord(run, self.part.number, self.part.images, runner, errors)
        table = pa.concat_tables(self._tables).replace_schema_metadata({_KEY: encode(record)})
        write_table(table, out / name_of(self.part.number))

    def _named(self, class_ids: pa.Array) -> pa.Array:
        """The labels; null if the model has no name for a class."""
        numbers = class_ids.to_numpy()
        return self._labels.take(pa.array(numbers, mask=numbers >= len(self._labels)))


def name_of(number: int) -> str:
    return f"part-{number:05d}.parquet"


def parts_done(out: Path, run: RunFile, parts: Sequence[BatchPart]) -> dict[int, PartFileRecord]:
    """The records of finished parts, by number. Raises JobError for one of another run."""
    found: dict[int, PartFileRecord] = {}
    for part in parts:
        path = out / name_of(part.number)
        if path.exists():
            record = None
            with suppress(KeyError, ValueError, pa.ArrowException):
                record = decode((pq.read_schema(path).metadata or {})[_KEY], type=PartFileRecord)
            own = run.digest, part.number, part.images
            if record is None or (record.run, record.number, record.images) != own:
                raise JobError(f"{path} does not belong to this run; remove it, or choose another --out")
            found[part.number] = record
    return found


def write_errors(out: Path, records: Iterable[PartFileRecord]) -> int:
    """Write the errors of all parts as one table, in order. Returns their number. Raises JobError."""
    errors = [error for record in records for error in record.errors]
    columns = [[path for path, _ in errors], [error for _, error in errors]]
    write_table(pa.table([pa.array(column, pa.string()) for column in columns], _ERRORS_SCHEMA), out / ERRORS)
    return len(errors)


def write_table(table: pa.Table, path: Path) -> None:
    """Write aside, sync and rename. Raises JobError for a full or read-only disk."""
    file = io.BytesIO()
    pq.write_table(table, file, compression="zstd")
    with disk_errors(path.parent):
        try:
            replace_file(path, file.getvalue(), prefix=_ASIDE, mode=0o644)
        except FileNotFoundError as error:
            raise JobError(f"{path.parent} was removed during the run; run the command again") from error


def remove_leftovers(out: Path) -> None:
    """Remove files of writers that were killed."""
    for leftover in out.glob(f"{_ASIDE}*"):
        with suppress(OSError):
            leftover.unlink()


def _lists(rows: np.ndarray) -> pa.ListArray:
    """[images, values] as a column of lists."""
    offsets = np.arange(len(rows) + 1, dtype=np.int32) * rows.shape[1]
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(rows.reshape(-1)))


def _box_columns(found: list[list[Detection]]) -> dict[str, Any]:
    """Each image's objects as columns of lists, which differ in length."""
    offsets = pa.array(np.cumsum([0, *map(len, found)]), pa.int32())
    every = [one for objects in found for one in objects]
    corners = np.array([one.box for one in every], np.float32).reshape(-1)
    values = {
        "class_ids": pa.array([one.class_id for one in every], pa.int32()),
        "scores": pa.array([one.score for one in every], pa.float32()),
        "boxes": pa.FixedSizeListArray.from_arrays(pa.array(corners), 4),
    }
    return {name: pa.ListArray.from_arrays(offsets, array) for name, array in values.items()}


def _text(path: str) -> str:
    """A name that parquet can store: bytes that are not UTF-8 are escaped as Python shows them."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


# Readers of a folder of parquet files skip names that begin with "_" or ".".
RUN_FILE, _LOCK = "_run.json", ".lock"
_NAMES = {
    "model": "model",
    "version": "model version",
    "bundle": "contents of the bundle",
    "engine": "--engine",
    "precision": "--precision",
    "top_k": "--top-k",
    "threshold": "--threshold",
    "embeddings": "--embeddings",
    "max_pixels": "--max-pixels",
    "inputs": "list of inputs",
    "images": "number of images",
}


@contextmanager
def own_folder(out: Path) -> Iterator[None]:
    """Create and lock the folder. Raises JobError if another run holds it or it cannot be written to."""
    with disk_errors(out):
        try:
            out.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise JobError(f"{out} is a file; pass a folder with --out") from error
        lock = (out / _LOCK).open("ab")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise JobError(
                f"another convoy batch is writing to {out}; wait until it ends, or choose another --out"
            ) from error
        yield


def begin_or_go_on(out: Path, identity: RunIdentity, part_images: int) -> RunFile:
    """The folder's run, new or continued. Raises JobError if the folder belongs to another run."""
    path = out / RUN_FILE
    try:
        found = decode(path.read_bytes(), type=RunFile)
    except FileNotFoundError:
        if next(out.glob("part-*.parquet"), None) is not None:
            raise JobError(
                f"{out} has parquet files of an unknown run ({RUN_FILE} is missing); choose another --out"
            ) from None
        found = RunFile(identity, part_images)
        write_run_file(out, found)
        return found
    except (ValueError, OSError) as error:
        raise JobError(f"{path} cannot be read ({error}); choose another --out") from error
    if differences := _differences(found.identity, identity):
        raise JobError(f"{out} belongs to another run: {differences}; use the same options, or choose another --out")
    return found


def write_run_file(out: Path, run: RunFile) -> None:
    """Write the run's file. Raises JobError for a full or read-only disk."""
    with disk_errors(out):
        replace_file(out / RUN_FILE, format(encode(run)), prefix=_ASIDE, mode=0o644)


def _differences(then: RunIdentity, now: RunIdentity) -> str:
    told = []
    for name, words in _NAMES.items():
        was, is_now = getattr(then, name), getattr(now, name)
        if was != is_now:
            is_digest = name in ("bundle", "inputs")
            told.append(f"the {words} changed" if is_digest else f"{words} was {was} and is {is_now}")
    return ", ".join(told)
