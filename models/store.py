"""A store: a folder of models, each a folder of numbered versions; or one model alone, in the place of that folder.

Knows which versions are there, which number comes next, and how a finished folder becomes a version. No name
leads out of it: whatever names a model, on a wire or on a command line, is checked here before a path is made of it.
A link that lies in the store leads where its owner wants it to.
Knows nothing of what is inside a version; `convoy.models.bundle` reads bundles and the server reads bare models.
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

# What comes with Convoy, to try it on.
DEMO_STORE = Path(__file__).parent / "demo"
BARE_MODEL = "model.onnx"
CONFIG = "config.pbtxt"
# A version being written; the leading dot keeps every reader away from it.
_PARTIAL_PREFIX = ".writing-"
_SHOWN_LETTERS = 100
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# As in Triton: a version is a number without leading zeros; every other folder is not a version.
_VERSION = re.compile(r"[1-9][0-9]{0,8}")


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """One version of one model, as found; nothing of it has been read yet."""

    name: str
    version: int
    folder: Path
    is_flat: bool = False  # nothing is around its folder that were the model's

    @property
    def model_folder(self) -> Path:
        """Where a bare model's configuration and labels are."""
        return self.folder if self.is_flat else self.folder.parent

    @property
    def is_bundle(self) -> bool:
        """Whether it claims to be a bundle; without a manifest it can only be a bare model, whose configuration may
        give its file another name."""
        bare = (self.folder / BARE_MODEL, self.model_folder / CONFIG)
        return os.path.lexists(self.folder / MANIFEST) or not any(map(os.path.lexists, bare))


@dataclass(frozen=True, slots=True)
class Store:
    """`only` is the name of the one model that `root` is; None where it is a folder of models.

    `is_flat`: of that one, `root` is a version's folder, and that counts as version 1.
    """

    root: Path
    only: str | None = None
    is_flat: bool = False

    @staticmethod
    def at(root: Path, model_name: str | None = None) -> Store:
        """The store at an existing folder. `model_name` is the one's that the folder may be. Raises UsageError."""
        if not root.is_dir():
            raise UsageError(f"there is no store at {root}; create the folder, or choose another one with --store")
        try:
            layout = find_layout(lambda path: _folders(root / path), lambda path: os.path.lexists(root / path))
        except OSError:  # whoever looks into it is told
            layout = StoreLayout.MODELS
        return Store.of_layout(root, layout, model_name)

    @staticmethod
    def of_layout(root: Path, layout: StoreLayout, model_name: str | None) -> Store:
        """The same where it is known what the folder holds. Raises UsageError."""
        if layout is StoreLayout.MODELS:
            return Store(root)
        return Store(root, name_of_only(root, model_name), layout is StoreLayout.ONE_VERSION)

    def names(self) -> list[str]:
        """The names of all models, sorted; also of those whose folder cannot be looked into. Raises OSError."""
        if self.only is not None:
            self.root.stat()
            return [self.only]
        return sorted(name for name in _folders(self.root) if is_name(name))

    def versions(self, name: str) -> list[StoredVersion]:
        """All versions of a model, highest first; empty where there are none. One that cannot be read is among them.

        Raises OSError where the model's folder cannot be read, UsageError where the name is none.
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
        """Where a version lies, whether it is there or not. Raises UsageError where the name is none."""
        folder = self.root / check_name(name) if name != self.only else self.root
        return StoredVersion(name, number, folder if self.is_flat else folder / str(number), self.is_flat)

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
                # rename() refuses a non-empty target, so two exports at once get two numbers.
                partial.rename(target)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
            else:
                sync(target.parent)
                return


class StoreLayout(Enum):
    """What a folder holds that is to be a store."""

    MODELS = auto()  # NAME/1/manifest.json
    VERSIONS = auto()  # 1/manifest.json
    ONE_VERSION = auto()  # manifest.json


def find_layout(folders: Callable[[str], Iterable[str]], exists: Callable[[str], bool]) -> StoreLayout:
    """What lies in a store tells; both are asked about paths in it.

    `folders` gives the names of those in a folder, "" the store itself; `exists` whether something is there. Something
    that is out of place in a folder of models does not make it one model. Raises OSError.
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
    """The name that was given to the one model that a store is. Raises UsageError where there is none."""
    if not model_name:
        raise UsageError(
            f"{root} is one model, not a folder of models, and has no name; set one with --model-name NAME"
        )
    return check_name(model_name)


def check_name(name: str) -> str:
    """The name itself. Raises UsageError if it cannot be a folder and a part of a URL."""
    if not is_name(name):
        raise UsageError(
            f"{shown_name(name)} cannot be a model's name; use up to 128 letters, digits, '.', '_' and '-', "
            "starting with a letter or digit"
        )
    return name


def shown_name(name: str) -> str:
    """A name of anybody's in quotes, as it fits into a message."""
    return repr(name if len(name) <= _SHOWN_LETTERS else f"{name[:_SHOWN_LETTERS]}...")


def _folders(folder: Path) -> Iterator[str]:
    """The names of the folders in a folder, and of what might be one if only it could be told. Raises OSError."""
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                is_folder = entry.is_dir()
            except OSError:  # a link that goes round in a circle, a disk that is away: whoever opens it is told why
                is_folder = True
            if is_folder:
                yield entry.name


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


def sync_tree(folder: Path) -> None:
    """Make everything in a folder readable by all, and its bytes and names survive a power cut. Raises OSError."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o644)
        sync(path)
    sync(folder)
