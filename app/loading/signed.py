"""Loads only what is signed: OpenSSF's model signing (https://github.com/sigstore/model-transparency).

A version is copied to a folder that only this process writes, the copy is verified against its signature, and the copy
is loaded, so nothing can change between check and use. Files outside the signature are removed. A signature proves who
made the files, not that they are the newest.
"""

from __future__ import annotations

import atexit
import base64
import fcntl
import json
import os
import shutil
import stat
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from convoy.models.bundle import SIGNATURE, read_manifest
from convoy.models.checkout import pip_install
from convoy.models.errors import BundleError, UsageError
from convoy.models.files import check_only_files, open_regular, read_small
from convoy.models.store import StoredVersion, disk_errors

_OWN_PREFIX = "signed-"
# Files that the library leaves out of a signature by default; no model needs them.
_OF_GIT = frozenset({".git", ".gitattributes", ".github", ".gitignore"})


class SignedCopy:
    """A version whose signature was verified, in a folder that is removed by `close` or with the last reference."""

    def __init__(self, original: StoredVersion, folder: Path) -> None:
        """`folder` is empty and becomes this copy's."""
        self.stored = replace(original, folder=folder if original.is_flat else folder / str(original.version))
        self.close = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class SignedOnly:
    """`keys` are files with a public key each, one of which must have signed; they are read for each version.

    `folder` is where copies are kept while they are served.
    """

    keys: tuple[Path, ...]
    folder: Path

    @staticmethod
    def by(keys: tuple[Path, ...], folder: Path) -> SignedOnly:
        """Raises UsageError for invalid or unreadable keys, and if the library is not installed."""
        for key in keys:
            try:
                key.read_bytes()
                _verifier(key)
            except OSError as error:
                is_missing = isinstance(error, FileNotFoundError)
                what = "no such file" if is_missing else f"cannot be read ({_brief(error)})"
                raise UsageError(f"--require-signature {key}: {what}; pass a public key file in PEM format") from error
            except ImportError as error:
                raise UsageError(f"--require-signature needs {error.name}; {pip_install('signing')}") from error
            except Exception as error:  # whatever the libraries raise for an invalid file
                raise UsageError(
                    f"--require-signature {key} is not an elliptic-curve public key in PEM format ({_brief(error)}); "
                    "create it from the private key with `openssl ec -in KEY -pubout`"
                ) from error
        return SignedOnly(keys, folder)

    @contextmanager
    def copied(self, stored: StoredVersion) -> Iterator[SignedCopy]:
        """A verified copy, which is removed if the body fails; its errors name the files in the store.

        Raises BundleError if it cannot be read, is not signed or the copy would not be safe, and JobError for a full
        disk.
        """
        with disk_errors(self.folder):
            place = tempfile.mkdtemp(prefix=f"{stored.name}-", dir=_own_folder(self.folder))
        copy = SignedCopy(stored, Path(place))
        try:
            self._fill(copy.stored, stored.folder)
            yield copy
        except BaseException as error:
            copy.close()
            if isinstance(error, BundleError):
                raise BundleError(str(error).replace(str(copy.stored.folder), str(stored.folder))) from error
            raise

    def _fill(self, copy: StoredVersion, original: Path) -> None:
        try:
            with disk_errors(self.folder):
                _copy(original, copy.folder)
            self._check(copy)
        except OSError as error:
            raise BundleError(f"{original}: cannot be read ({error}); fix or remove it") from error

    def _check(self, stored: StoredVersion) -> None:
        folder = stored.folder
        signature = folder / SIGNATURE
        if not signature.exists():
            raise BundleError(
                f"{folder}: not signed: {SIGNATURE} is missing, and --require-signature is set; export "
                "it with --sign KEY"
            )
        refused = []
        for key in self.keys:
            try:
                _verifier(key).verify(folder, signature)
                break
            except Exception as error:  # whatever the libraries raise for untrusted bytes
                refused.append(f"{key}: {_brief(error)}")
        else:
            raise BundleError(f"{folder}: the signature is not valid ({'; '.join(refused)}); do not use this bundle")
        _remove_all_but(_signed_names(signature), folder)
        if stored.is_bundle and (name := read_manifest(folder).spec.name) != stored.name:
            raise BundleError(
                f"{folder}: it was signed as model {name!r}, but its folder is named {stored.name!r}; serve it under "
                "its own name"
            )


def _verifier(key: Path) -> Any:
    """A new one each time: the library's remembers what the previous signature left out."""
    library: Any = import_module("model_signing.verifying")
    return library.Config().use_elliptic_key_verifier(public_key=key)


def _signed_names(signature: Path) -> set[str]:
    """The files of a signature that was verified. Raises BundleError."""
    statement = json.loads(base64.b64decode(json.loads(read_small(signature))["dsseEnvelope"]["payload"]))
    predicate = statement["predicate"]
    if predicate["serialization"]["method"] != "files":
        raise BundleError(f"{signature}: signs parts of files; sign whole files")
    return {resource["name"] for resource in predicate["resources"]}


def _remove_all_but(names: set[str], folder: Path) -> None:
    for path in [one for one in folder.rglob("*") if not one.is_dir()]:
        if path.relative_to(folder).as_posix() not in names:
            path.unlink()


def _copy(source: Path, target: Path) -> None:
    """Copy the files of a folder, following links. Raises OSError, and BundleError for entries that are not files."""
    check_only_files(source)

    def copy_file(one: str, to: str) -> None:
        with open_regular(one) as original, Path(to).open("wb") as copied:
            shutil.copyfileobj(original, copied, 1 << 20)

    def of_git(folder: str, names: list[str]) -> set[str]:
        return {*names} & _OF_GIT if Path(folder) == source else set()

    try:
        shutil.copytree(source, target, copy_function=copy_file, ignore=of_git, dirs_exist_ok=True)
    except shutil.Error as error:
        # For each file that could not be copied: its source, its target, the reason.
        origin, _, why = error.args[0][0]
        raise BundleError(f"{origin}: cannot be read ({why}); fix or remove it") from error


@cache
def _own_folder(parent: Path) -> Path:
    """This process's folder, locked for as long as the process lives; those of dead processes are removed.

    Raises BundleError if others could replace it.
    """
    parent.parent.mkdir(parents=True, exist_ok=True)
    parent.mkdir(exist_ok=True, mode=0o700)
    status = parent.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise BundleError(
            f"{parent}: other users can write to it, so it cannot be trusted; remove it, or set --store-cache"
        )
    own = Path(tempfile.mkdtemp(prefix=_OWN_PREFIX, dir=parent))
    _lock(own)  # never closed: the end of the process does that
    for other in parent.glob(f"{_OWN_PREFIX}*"):
        with suppress(OSError):
            # A process that has just made its folder has not locked it yet.
            if other == own or time.time() - other.stat().st_mtime < 60:
                continue
            descriptor = _lock(other)
            shutil.rmtree(other, ignore_errors=True)
            os.close(descriptor)
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return own


def _lock(folder: Path) -> int:
    """Raises OSError if another process has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _brief(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror  # without its number and the path, which is printed beside it
    # Without the digests of both sides, which help no reader.
    words = str(error).partition(": Expected")[0].replace("[", "").replace("\\'", "'") or type(error).__name__
    return words if len(words) <= 200 else f"{words[:200]}..."
