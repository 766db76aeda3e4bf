"""A store: a folder of models, each a folder of numbered versions.

Knows which versions are there, which number comes next, and how a finished folder becomes a version.
Knows nothing of what is inside a version; `models.bundle` reads bundles and the server reads bare models.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from models.bundle import MANIFEST
from models.errors import JobError, UsageError

BARE_MODEL = "model.onnx"
CONFIG = "config.pbtxt"
# A version being written; the leading dot keeps every reader away from it.
_PARTIAL_PREFIX = ".writing-"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# As in Triton: a version is a number without leading zeros; every other folder is not a version.
_VERSION = re.compile(r"[1-9][0-9]{0,8}")


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """One version of one model, as found; nothing of it has been read yet."""

    name: str
    version: int
    folder: Path

    @property
    def is_bundle(self) -> bool:
        """Whether it claims to be a bundle; without a manifest it can only be a bare model."""
        return (self.folder / MANIFEST).exists() or not (self.folder / BARE_MODEL).exists()


@dataclass(frozen=True, slots=True)
class Store:
    root: Path

    @staticmethod
    def at(root: Path) -> Store:
        """The store at an existing folder. Raises UsageError."""
        if not root.is_dir():
            raise UsageError(f"there is no store at {root}; create the folder, or name another one with --store")
        return Store(root)

    def names(self) -> list[str]:
        """The names of all models, sorted."""
        return sorted(p.name for p in self.root.iterdir() if p.is_dir() and _NAME.fullmatch(p.name))

    def versions(self, name: str) -> list[StoredVersion]:
        """All versions of a model, highest first; empty where there are none."""
        folder = self.root / name
        if not folder.is_dir():
            return []
        numbers = (int(p.name) for p in folder.iterdir() if p.is_dir() and _VERSION.fullmatch(p.name))
        return [StoredVersion(name, number, folder / str(number)) for number in sorted(numbers, reverse=True)]

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """An empty folder beside the model's versions; a body that ends well makes it version max+1.

        A body that raises, or is interrupted, leaves nothing behind. Raises JobError for a full or
        read-only disk.
        """
        parent = self.root / check_name(name)
        existed = parent.exists()
        with disk_errors(parent):
            parent.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(prefix=_PARTIAL_PREFIX, dir=parent))
        try:
            with disk_errors(parent):
                yield partial
                _sync_tree(partial)
                self._publish(partial, name)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            if not existed:
                _remove_if_empty(parent)
            raise

    def _publish(self, partial: Path, name: str) -> None:
        partial.chmod(0o755)
        while True:
            versions = self.versions(name)
            target = partial.parent / str(versions[0].version + 1 if versions else 1)
            try:
                # rename() refuses a non-empty target, so two exports at once get two numbers.
                partial.rename(target)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
            else:
                _sync(target.parent)
                return


def check_name(name: str) -> str:
    """The name itself. Raises UsageError if it cannot be a folder and a part of a URL."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be a model's name; use letters, digits, '.', '_' and '-', starting with a letter or digit"
        )
    return name


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn a full, read-only or forbidden disk into a JobError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise JobError(f"the disk of {folder} is full; free some space and run the command again") from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise JobError(f"cannot write to {folder} ({error.strerror}); choose another folder") from error
        raise


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o644)
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
