"""Read files of others safely, and replace our own atomically.

Only regular files are opened, and read up to a size: a pipe or device would block its reader for ever or fill the
memory.
"""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from io import BufferedReader
from pathlib import Path, PurePosixPath

from convoy.models.errors import BundleError

# Windows, where convoy-client runs, has the last flag and not the two before it.
_READING = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
# Far more than any manifest, configuration or list of labels needs.
MOST_TEXT_BYTES = 64 << 20


def check_regular(path: str | Path) -> None:
    """Check that it is a regular file, after links. Raises BundleError if it is not, OSError."""
    _check_mode(path, os.stat(path).st_mode)  # noqa: PTH116 - a Path of each of millions of images costs a tenth of them


def open_regular(path: str | Path) -> BufferedReader:
    """The file, open for reading; never waits for a writer. Raises BundleError where it is none, OSError."""
    check_regular(path)  # merely opening some devices does something
    handle = os.open(path, _READING)
    try:
        _check_mode(path, os.fstat(handle).st_mode)  # it may have been replaced since
    except BaseException:
        os.close(handle)
        raise
    return os.fdopen(handle, "rb")


def read_small(path: Path) -> bytes:
    """Read a small file completely. Raises BundleError if it is too large or not a regular file, OSError."""
    with open_regular(path) as file:
        data = file.read(MOST_TEXT_BYTES + 1)
    if len(data) > MOST_TEXT_BYTES:
        raise BundleError(f"{path}: has more than {MOST_TEXT_BYTES >> 20} MiB, which is too large; replace it")
    return data


def replace_file(path: Path, content: bytes, *, prefix: str, mode: int) -> None:
    """Write aside, sync, rename: readers see the old bytes or the new ones, and nothing remains after a failure.

    The temporary name begins with `prefix`, by which leftovers of killed writers are recognised. `mode` is the file's
    mode. Raises OSError.
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
    """Make a file's bytes, or a folder's renames, durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_only_files(folder: Path) -> None:
    """Check that a folder has only regular files and folders, after links, because libraries open what it names.

    Broken links are ignored. Raises BundleError, or OSError if something cannot be examined.
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
            if not stat.S_ISDIR(mode):  # a link to a folder leads elsewhere, which is not ours to judge
                _check_mode(folder / entry.name, mode)


def is_file_name(name: str) -> bool:
    """Whether this can be the name of a file in a given folder, and nothing outside of it."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def stays_inside(name: str) -> bool:
    """Whether a relative path stays below the folder that it starts from, judged by its text."""
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
