"""How the builder writes into the cache: one builder per key, and each file complete or absent.

The record is written last, so readers refuse what a builder that died has left.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from convoy.export.tensorrt.watch import BuildWatch
from convoy.models.errors import JobError
from convoy.models.plan_cache import PARTIAL_PREFIX, NotTrusted, read_trusted, write_trusted
from convoy.models.plans import PlanPaths, PlanRecord
from convoy.models.records import to_jsonable
from convoy.models.store import disk_errors


@contextmanager
def sole_builder(cache: Path, paths: PlanPaths, watch: BuildWatch) -> Iterator[None]:
    """Run the body while no one else builds this key. Leftovers of dead builders are removed first.

    Raises JobError if the folder cannot be used, or if another build holds the key until the time is up.
    """
    with disk_errors(cache):
        cache.mkdir(parents=True, exist_ok=True)
        paths.folder.mkdir(exist_ok=True)
        _make_ours(paths.folder)
        descriptor = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        _acquire(descriptor, watch)
        for leftover in paths.folder.glob(f"{PARTIAL_PREFIX}{paths.stem}-*"):
            leftover.unlink(missing_ok=True)
        yield
    finally:
        # Closing releases the lock, and so does dying. The file stays: removing it would let two builders in.
        os.close(descriptor)


def store_plan(paths: PlanPaths, data: bytes, record: PlanRecord) -> None:
    """Replace whatever exists under this key. Raises JobError for a full or read-only disk."""
    rendered = json.dumps(to_jsonable(record), indent=1, ensure_ascii=False) + "\n"
    with disk_errors(paths.folder):
        # Never an old record beside a new plan, not even briefly.
        paths.record.unlink(missing_ok=True)
        write_trusted(paths.plan, data, paths.stem)
        write_trusted(paths.record, rendered.encode(), paths.stem)


def read_timing(path: Path, watch: BuildWatch) -> bytes:
    """Kernel times of earlier builds; empty if there are none that can be trusted.

    They may contain compiled kernels, so the rule for plans applies to them.
    """
    try:
        return read_trusted(path)
    except FileNotFoundError:
        return b""
    except (NotTrusted, OSError) as error:
        watch.note(f"the timing cache is not used: {error}")
        return b""


def write_timing(path: Path, data: bytes, watch: BuildWatch) -> None:
    """Keep the kernel times. The plan does not depend on it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_trusted(path, data, path.stem)
    except OSError as error:
        watch.note(f"the timing cache could not be written to {path}: {error.strerror}")


def _make_ours(folder: Path) -> None:
    status = folder.lstat()
    if status.st_uid != os.geteuid():
        raise JobError(f"{folder} belongs to user {status.st_uid}; remove it, or choose another --plan-cache")
    folder.chmod(0o755)


def _acquire(descriptor: int, watch: BuildWatch) -> None:
    is_first = True
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if is_first:
                watch.note("another builder is at work on this plan; waiting for it")
            is_first = False
            watch.pause()
        else:
            return
