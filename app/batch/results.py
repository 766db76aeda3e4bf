"""The folder of results: which run it belongs to, and each part's file.

What decides the rows stands in the run's file, and another run is refused; what only decides the speed (batch size,
workers, Ray) does not count. A part's file is there whole or not at all. It says itself, in the metadata of its schema,
which part of which run it is and which of its images could not be read, so that nothing has to be kept in step with it.
"""

from __future__ import annotations

import fcntl
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Struct
from msgspec.json import decode, encode, format

from convoy.app.batch.labeller import Result, Unreadable
from convoy.app.batch.records import BatchPart, RunFile, RunIdentity, Runner
from convoy.app.pictures.answering import RankedClasses
from convoy.models.activation import NAN
from convoy.models.errors import JobError
from convoy.models.files import replace_file
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
    """Collects what becomes of a part's images, which come in their order but for those that cannot be read."""

    def __init__(self, part: BatchPart, labels: Sequence[str], embeddings: TensorSpec | None) -> None:
        self.part, self._spec = part, embeddings
        self._labels = pa.array(labels, pa.string())
        # Not the rows themselves, whose images may hold their bytes.
        self._paths: list[str] = []
        self._ranked: list[RankedClasses] = []
        self._embeddings: list[np.ndarray] = []
        self._errors: dict[int, tuple[str, str]] = {}
        self._left = part.images

    def add(self, result: Result) -> None:
        if isinstance(result, Unreadable):
            self._errors[result.image.place] = (result.image.path, result.error)
            self._left -= 1
            return
        self._paths += [image.path for image in result.images]
        self._ranked.append(result.ranked)
        if result.embeddings is not None:
            self._embeddings.append(result.embeddings)
        for row in np.flatnonzero(result.ranked.is_nan):
            image = result.images[row]
            self._errors[image.place] = (image.path, NAN)
        self._left -= len(result.images)

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
        """Raises JobError where an output's rows are now longer, now shorter."""
        nothing = np.zeros((0, 0))
        good = np.concatenate([np.zeros(0, bool), *(~one.is_nan for one in self._ranked)])
        paths = [_text(path) for path, is_good in zip(self._paths, good, strict=True) if is_good]
        class_ids = _lists([one.class_ids for one in self._ranked] or [nothing.astype(np.int32)], good)
        columns = {
            "path": pa.array(paths, pa.string()),
            "class_ids": class_ids,
            "labels": pa.ListArray.from_arrays(class_ids.offsets, self._named(class_ids.values)),
            "scores": _lists([one.scores for one in self._ranked] or [nothing.astype(np.float32)], good),
        }
        if self._spec is not None:
            columns["embeddings"] = _lists(self._embeddings or [nothing.astype(self._spec.numpy_dtype)], good)
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
    except (FileNotFoundError, KeyError, ValueError, pa.ArrowException):
        return None


def write_errors(out: Path, records: Iterable[PartFileRecord]) -> int:
    """All parts' errors as one table, in the order of the parts; how many there are. Raises JobError."""
    errors = [error for record in records for error in record.errors]
    columns = [[path for path, _ in errors], [error for _, error in errors]]
    write_table(pa.table([pa.array(column, pa.string()) for column in columns], _ERRORS_SCHEMA), out / ERRORS)
    return len(errors)


def write_table(table: pa.Table, path: Path) -> None:
    """Written aside, synced and renamed. Raises JobError for a full or read-only disk."""
    file = io.BytesIO()
    pq.write_table(table, file, compression="zstd")
    with disk_errors(path.parent):
        try:
            replace_file(path, file.getvalue(), prefix=_ASIDE, mode=0o644)
        except FileNotFoundError as error:
            raise JobError(f"{path.parent} was removed meanwhile; run the command again") from error


def remove_leftovers(out: Path) -> None:
    """What writers that were killed have left."""
    for leftover in out.glob(f"{_ASIDE}*"):
        with suppress(OSError):
            leftover.unlink()


def _lists(batches: list[np.ndarray], good: np.ndarray) -> pa.ListArray:
    """The `good` rows of all batches, [samples, values] each, as a column of lists."""
    lengths = {batch.shape[1] for batch in batches}
    if len(lengths) > 1:
        now, then = sorted(lengths)[:2]
        raise JobError(f"an output has now {now} and now {then} values a sample, which no column holds")
    rows = np.concatenate(batches)[good]
    offsets = pa.array(np.arange(len(rows) + 1, dtype=np.int32) * rows.shape[1])
    return pa.ListArray.from_arrays(offsets, pa.array(rows.reshape(-1)))


def _text(path: str) -> str:
    """A name that parquet can hold: what of it is no UTF-8 is written as Python would show it."""
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
    "embeddings": "--embeddings",
    "max_pixels": "--max-pixels",
    "inputs": "list of inputs",
    "images": "number of images",
}


@contextmanager
def own_folder(out: Path) -> Iterator[None]:
    """Lock the folder, and make it. Raises JobError where another run has it, or it cannot be written to."""
    with disk_errors(out):
        try:
            out.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise JobError(f"{out} is a file; name a folder with --out") from error
        descriptor = os.open(out / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise JobError(
                f"another convoy batch is writing into {out}; wait for its end, or name another --out"
            ) from error
        yield
    finally:
        os.close(descriptor)


def begin_or_go_on(out: Path, identity: RunIdentity, part_images: int) -> RunFile:
    """The folder's run, begun now or earlier. Raises JobError where the folder belongs to another one."""
    path = out / RUN_FILE
    try:
        found = decode(path.read_bytes(), type=RunFile)
    except FileNotFoundError:
        if next(out.glob("part-*.parquet"), None) is not None:
            raise JobError(
                f"{out} has parquet files that are of no run ({RUN_FILE} is missing); choose another --out"
            ) from None
        found = RunFile(identity, part_images)
        write_run_file(out, found)
        return found
    except (ValueError, OSError) as error:
        raise JobError(f"{path} cannot be read ({error}); choose another --out") from error
    if differences := _differences(found.identity, identity):
        raise JobError(
            f"{out} belongs to another run: {differences}; give what it was begun with, or choose another --out"
        )
    return found


def write_run_file(out: Path, run: RunFile) -> None:
    """Raises JobError for a full or read-only disk."""
    with disk_errors(out):
        replace_file(out / RUN_FILE, format(encode(run)), prefix=_ASIDE, mode=0o644)


def _differences(then: RunIdentity, now: RunIdentity) -> str:
    told = []
    for name, words in _NAMES.items():
        was, is_now = getattr(then, name), getattr(now, name)
        if was != is_now:
            is_digest = name in ("bundle", "inputs")
            told.append(f"the {words} is another" if is_digest else f"{words} was {was} and is {is_now}")
    return ", ".join(told)
