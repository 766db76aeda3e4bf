"""List and download files of an object store, or of any other file system of fsspec, and explain its errors.

The library is imported only for remote stores. Timeouts, retries and credentials are its own. Every call blocks.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convoy.models.checkout import pip_install
from convoy.models.errors import UsageError

# Properties that change with the content; the first that exists counts.
_TAGS = ("ETag", "etag", "md5Hash", "LastModified", "last_modified", "updated", "mtime", "created")
_THIS_DISK = (errno.ENOSPC, errno.EROFS, errno.EDQUOT)
_INSTALL = {"s3": pip_install("s3")}


class RemoteError(OSError):
    """The remote store failed; a retry may succeed."""


@dataclass(frozen=True, slots=True, order=True)
class RemoteObject:
    """One file. `path` is relative to the listed folder; `tag` changes with the content."""

    path: str
    bytes: int
    tag: str


def is_url(store: str) -> bool:
    """Whether this is a URL and not a folder."""
    return "://" in store


class RemoteFiles:
    """The files below one URL."""

    def __init__(self, url: str) -> None:
        """Does not connect yet. Raises UsageError if the library for such URLs is not installed."""
        self.url = url.rstrip("/") if not url.endswith("://") else url
        self._files, self._root = _open(self.url)

    def entries(self, path: str = "") -> Mapping[str, bool]:
        """The names in a folder, and whether each is a folder. Raises RemoteError, also if it does not exist."""
        where = self._place(path)
        try:
            self._files.invalidate_cache()
            found = self._files.ls(where, detail=True)
        except Exception as error:
            raise _told(self._shown(path), error) from error
        names = {self._relative(where, one["name"]): one["type"] == "directory" for one in found}
        return {name: is_folder for name, is_folder in names.items() if name}

    def objects(self, path: str = "") -> tuple[RemoteObject, ...]:
        """Every file below a folder, sorted; empty if it does not exist. Raises RemoteError."""
        where = self._place(path)
        try:
            self._files.invalidate_cache()
            found = self._files.find(where, detail=True)
        except FileNotFoundError:
            return ()
        except Exception as error:
            raise _told(self._shown(path), error) from error
        if len(found) > 10_000:
            raise RemoteError(f"{self._shown(path)} has {len(found)} files, more than a model needs; clean it up")
        objects = [
            RemoteObject(relative, int(about.get("size") or 0), _tag(about))
            for full, about in found.items()
            # Some tools mark folders with a trailing slash.
            if (relative := self._relative(where, full)) and not relative.endswith("/")
        ]
        return tuple(sorted(objects))

    def download(self, path: str, target: Path) -> None:
        """Download one file. Raises RemoteError, and OSError for errors on this machine."""
        try:
            self._files.get_file(self._place(path), str(target))
        except Exception as error:
            if isinstance(error, OSError) and error.errno in _THIS_DISK:
                raise
            raise _told(self._shown(path), error) from error

    def _place(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _shown(self, path: str) -> str:
        return f"{self.url}/{path}" if path else self.url

    @staticmethod
    def _relative(where: str, full: str) -> str:
        """The rest of a path; empty if it is elsewhere."""
        prefix = where.rstrip("/") + "/"
        return full[len(prefix) :] if full.startswith(prefix) else ""


def _open(url: str) -> tuple[Any, str]:
    scheme = url.partition("://")[0]
    install = _INSTALL.get(scheme, f"the fsspec library for {scheme}://")
    if "::" in url:
        raise UsageError(f"--store {url}: chained file systems are not supported; use one URL")
    try:
        import fsspec

        files, root = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    except ImportError as error:
        raise UsageError(
            f"--store {url} needs a library that is not installed ({error}); install it: {install}"
        ) from error
    except ValueError as error:
        raise UsageError(f"--store {url}: {error}; use a folder, or a URL such as s3://bucket/prefix") from error
    if not root.strip("/"):
        raise UsageError(f"--store {url} has no bucket; use a URL such as s3://bucket/prefix")
    return files, root.rstrip("/")


def _tag(about: Mapping[str, Any]) -> str:
    return next((str(about[name]) for name in _TAGS if about.get(name)), "")


def _told(where: str, error: Exception) -> RemoteError:
    """Explain an error. The libraries' errors have no common base, so some are known by their names."""
    said = str(error) or type(error).__name__
    if isinstance(error, FileNotFoundError):
        return RemoteError(f"{where}: the bucket or the prefix does not exist ({said})")
    if isinstance(error, PermissionError):
        return RemoteError(f"{where}: access denied ({said}); check the permissions of the credentials")
    if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"):
        return RemoteError(f"{where}: no credentials found ({said}); set them as the library documents it")
    if isinstance(error, TimeoutError) or "Connect" in type(error).__name__ or "Timeout" in type(error).__name__:
        return RemoteError(f"{where}: cannot be reached ({said}); check the network and the address")
    return RemoteError(f"{where}: {type(error).__name__}: {said}")
