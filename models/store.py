"""A store: a folder of models, each a folder of numbered versions; or a single model in place of that folder.

Finds versions, assigns the next number, and turns a finished folder into a version. Every name of a model, from a
request or a command line, is checked here before a path is made of it, so no name leads out of the store. Links in the
store are followed.

`convoy.models.bundle` reads bundles, and the server reads bare models.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from convoy.models.bundle import MANIFEST
from convoy.models.errors import JobError, UsageError
from convoy.models.files import sync

# The demo store that comes with Convoy.
DEMO_STORE = Path(__file__).parent / "demo"
BARE_MODEL = "model.onnx"
CONFIG = "config.pbtxt"
# A version being written; readers ignore names with a leading dot.
_PARTIAL_PREFIX = ".writing-"
_SHOWN_LETTERS = 100
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# As in Triton: a version is a number without leading zeros; other folders are not versions.
_VERSION = re.compile(r"[1-9][0-9]{0,8}")


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """One version of one model, as found; nothing of it has been read yet."""

    name: str
    version: int
    folder: Path
    is_flat: bool = False  # its parent folder is not the model's

    @property
    def model_folder(self) -> Path:
        """The folder of a bare model's configuration and labels."""
        return self.folder if self.is_flat else self.folder.parent

    @property
    def is_bundle(self) -> bool:
        """Whether it claims to be a bundle. Without a manifest it can only be a bare model, whose configuration may
        give its file another name.
        """
        bare = (self.folder / BARE_MODEL, self.model_folder / CONFIG)
        return os.path.lexists(self.folder / MANIFEST) or not any(map(os.path.lexists, bare))


@dataclass(frozen=True, slots=True)
class Store:
    """A store. `only` is the name of the single model that `root` is, or None for a folder of models.

    `is_flat` means that `root` is the folder of that model's only version, which counts as version 1.
    """

    root: Path
    only: str | None = None
    is_flat: bool = False

    @staticmethod
    def at(root: Path, model_name: str | None = None) -> Store:
        """The store at an existing folder. `model_name` names the model if the folder is a single one. Raises
        UsageError.
        """
        if not root.is_dir():
            raise UsageError(f"there is no store at {root}; create the folder, or choose another one with --store")
        try:
            layout = find_layout(lambda path: _folders(root / path), lambda path: os.path.lexists(root / path))
        except OSError:  # reading it will report the error
            layout = StoreLayout.MODELS
        return Store.of_layout(root, layout, model_name)

    @staticmethod
    def of_layout(root: Path, layout: StoreLayout, model_name: str | None) -> Store:
        """The same for a known layout. Raises UsageError."""
        if layout is StoreLayout.MODELS:
            return Store(root)
        return Store(root, name_of_only(root, model_name), layout is StoreLayout.ONE_VERSION)

    def names(self) -> list[str]:
        """The names of all models, sorted, including folders that cannot be read. Raises OSError."""
        if self.only is not None:
            self.root.stat()
            return [self.only]
        return sorted(name for name in _folders(self.root) if is_name(name))

    def versions(self, name: str) -> list[StoredVersion]:
        """All versions of a model, highest first, including those that cannot be read; empty if there are none.

        Raises OSError if the model's folder cannot be read, and UsageError for an invalid name.
        """
        check_name(name)
        if self.only not in (None, name):
            return []
        if self.is_flat:
            return [self.version(name, 1)] if _is_version(lambda path: os.path.lexists(self.root / path)) else []
        folder = self.root / name if self.only is None else self.root
        try:
            numbers = [int(one) for one in _folders(folder) if is_version(one)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [self.version(name, number) for number in sorted(numbers, reverse=True)]

    def version(self, name: str, number: int) -> StoredVersion:
        """The place of a version, whether it exists or not. Raises UsageError for an invalid name."""
        folder = self.root / check_name(name) if name != self.only else self.root
        return StoredVersion(name, number, folder if self.is_flat else folder / str(number), self.is_flat)

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """An empty folder beside the model's versions, which becomes version max+1 if the body succeeds.

        If the body raises or is interrupted, nothing remains. Raises JobError for a full or read-only disk.
        """
        parent = self.root / check_name(name)
        existed = parent.exists()
        with disk_errors(parent):
            parent.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(prefix=_PARTIAL_PREFIX, dir=parent))
        try:
            with disk_errors(parent):
                yield partial
                sync_tree(partial)
                self._publish(partial, name)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            if not existed:
                with suppress(OSError):
                    parent.rmdir()
            raise

    def _publish(self, partial: Path, name: str) -> None:
        partial.chmod(0o755)
        while True:
            versions = self.versions(name)
            target = partial.parent / str(versions[0].version + 1 if versions else 1)
            try:
                # rename() refuses a non-empty target, so two concurrent exports get two numbers.
                partial.rename(target)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
            else:
                sync(target.parent)
                return


class StoreLayout(Enum):
    """The layout of a folder that is to be a store."""

    MODELS = auto()  # NAME/1/manifest.json
    VERSIONS = auto()  # 1/manifest.json
    ONE_VERSION = auto()  # manifest.json


def find_layout(folders: Callable[[str], Iterable[str]], exists: Callable[[str], bool]) -> StoreLayout:
    """Determine the layout of a store through two functions that look at paths in it.

    `folders` returns the names of folders in a folder, "" being the store itself; `exists` says whether something is
    there. A misplaced entry in a folder of models does not make it a single model. Raises OSError.
    """
    if _is_version(exists):
        return StoreLayout.ONE_VERSION
    inside = list(folders(""))
    numbers = [name for name in inside if is_version(name)]
    files = [f"{number}/{file}" for number in numbers for file in (MANIFEST, BARE_MODEL)]
    # A configuration may give the file another name.
    if not numbers or not any(map(exists, (CONFIG, *files))):
        return StoreLayout.MODELS
    has_models = any(is_version(version) for name in inside if is_name(name) for version in folders(name))
    return StoreLayout.MODELS if has_models else StoreLayout.VERSIONS


def _is_version(exists: Callable[[str], bool]) -> bool:
    return exists(MANIFEST) or exists(BARE_MODEL)


def is_version(name: str) -> bool:
    """Whether a folder of this name is a version."""
    return _VERSION.fullmatch(name) is not None


def is_name(name: str) -> bool:
    """Whether a folder of this name is a model."""
    return _NAME.fullmatch(name) is not None


def name_of_only(root: Path | str, model_name: str | None) -> str:
    """Check the name for a store that is a single model. Raises UsageError if there is none."""
    if not model_name:
        raise UsageError(
            f"{root} is one model, not a folder of models, and has no name; set one with --model-name NAME"
        )
    return check_name(model_name)


def check_name(name: str) -> str:
    """Return the name. Raises UsageError if it cannot be a folder and a part of a URL."""
    if not is_name(name):
        raise UsageError(
            f"{shown_name(name)} cannot be a model's name; use up to 128 letters, digits, '.', '_' and '-', "
            "starting with a letter or digit"
        )
    return name


def shown_name(name: str) -> str:
    """An arbitrary name in quotes, shortened for a message."""
    return repr(name if len(name) <= _SHOWN_LETTERS else f"{name[:_SHOWN_LETTERS]}...")


def _folders(folder: Path) -> Iterator[str]:
    """The names of folders, and of entries whose kind cannot be determined. Raises OSError."""
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                is_folder = entry.is_dir()
            except OSError:  # a circular link or a missing disk: opening it reports the error
                is_folder = True
            if is_folder:
                yield entry.name


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn errors of a full, read-only or forbidden disk into a JobError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise JobError(f"the disk of {folder} is full; free some space and run the command again") from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise JobError(f"cannot write to {folder} ({error.strerror}); choose another folder") from error
        raise


def sync_tree(folder: Path) -> None:
    """Make everything in a folder readable by all, and durable. Raises OSError."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o644)
        sync(path)
    sync(folder)
