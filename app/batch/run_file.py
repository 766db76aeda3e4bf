"""Which run a folder of results belongs to: a file holds what decides its rows, and another run is refused.

What only decides the speed (batch size, workers, Ray) does not count.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec.json import decode, encode, format

from convoy.app.batch.records import RunFile, RunIdentity
from convoy.models.errors import JobError
from convoy.models.files import replace_file
from convoy.models.store import disk_errors

# Readers of a folder of parquet files skip names that begin with "_" or ".".
RUN_FILE, _LOCK, _ASIDE = "_run.json", ".lock", ".writing-run-"
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
