"""Files: those of others are opened only if they are files, and read only up to a size; ours are replaced in one step.

A pipe or a device in the place of a file would hold up whoever opens it, for ever or until it has filled the memory.
Knows nothing of what is in them.
"""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from io import BufferedReader
from pathlib import Path, PurePosixPath

from convoy.models.errors import BundleError

# Far more than any manifest, configuration or list of labels needs.
MOST_TEXT_BYTES = 64 << 20


def check_regular(path: str | Path) -> None:
    """Whether this is a file, links followed. Raises BundleError where it is something else, OSError."""
    _check_mode(path, os.stat(path).st_mode)  # noqa: PTH116 - a Path of each of millions of images costs a tenth of them


def open_regular(path: str | Path) -> BufferedReader:
    """The file, open for reading; never waits for a writer. Raises BundleError where it is none, OSError."""
    check_regular(path)  # merely opening some devices does something
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_mode(path, os.fstat(handle).st_mode)  # it may have been replaced since
    except BaseException:
        os.close(handle)
        raise
    return os.fdopen(handle, "rb")


def read_small(path: Path) -> bytes:
    """All of a file that a person might have written. Raises BundleError where it is too large or none, OSError."""
    with open_regular(path) as file:
        data = file.read(MOST_TEXT_BYTES + 1)
    if len(data) > MOST_TEXT_BYTES:
        raise BundleError(f"{path}: has more than {MOST_TEXT_BYTES >> 20} MiB, which is too large; replace it")
    return data


def replace_file(path: Path, content: bytes, *, prefix: str, mode: int) -> None:
    """Write aside, sync, rename: readers see the old bytes or the new ones, and nothing stays behind on failure.

    What is written aside has a name that begins with `prefix`, by which the leftovers of a writer that was killed are
    known. `mode` is the file's. Raises OSError.
    """
    descriptor, name = tempfile.mkstemp(prefix=prefix, dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(descriptor, mode)
            file.flush()
            os.fsync(descriptor)
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file's bytes, or a folder's renames, survive a power cut. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_only_files(folder: Path) -> None:
    """Whether a folder holds nothing but files and folders, links followed; what it names is opened by libraries.

    A link that leads nowhere is nothing. Raises BundleError, or OSError where something cannot be looked at.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                check_only_files(folder / entry.name)
                continue
            try:
                mode = entry.stat().st_mode
            except FileNotFoundError:
                continue
            if not stat.S_ISDIR(mode):  # a link to a folder leads elsewhere, and nothing there is ours to judge
                _check_mode(folder / entry.name, mode)


def is_file_name(name: str) -> bool:
    """Whether this can be the name of a file in a given folder, and of nothing elsewhere."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def stays_inside(name: str) -> bool:
    """Whether a relative path leads to something below the folder that it starts from, by its words alone."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def _check_mode(path: str | Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "not a file")
        raise BundleError(f"{path}: is {kind}; replace it with a regular file")


_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
