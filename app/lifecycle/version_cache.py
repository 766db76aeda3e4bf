"""Versions that have come from elsewhere, on this disk: whole or not at all, each under the digest of what was listed.

    FOLDER/<name>/<version>-<digest>/<version>/manifest.json ...       one that is all of a store lacks the inner folder

Knows names and renames; what a version needs, and whether it is sound, is for those who fill it.
"""

from __future__ import annotations

import errno
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Container, Iterator
from pathlib import Path

from convoy.models.store import StoredVersion, disk_errors, sync_tree

_PARTIAL_PREFIX = ".fetching-"
# Longer than any download that still goes on.
_ABANDONED_AFTER_S = 24 * 3600.0
_ENTRY = re.compile(r"([1-9][0-9]{0,8})-([0-9a-f]{32})")


class VersionCache:
    """The versions of one remote store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def stored(self, name: str, version: int, digest: str, *, is_flat: bool) -> StoredVersion:
        """Where a version lies, or will."""
        model_folder = self.folder / name / f"{version}-{digest}"
        return StoredVersion(name, version, model_folder if is_flat else model_folder / str(version), is_flat)

    def bring(self, stored: StoredVersion, fill: Callable[[Path], None]) -> None:
        """Make a version's folder of what `fill` writes into an empty one; what fails leaves nothing.

        Raises JobError for a full or read-only disk, and whatever `fill` raises.
        """
        target = stored.model_folder
        with disk_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(prefix=_PARTIAL_PREFIX, dir=target.parent))
        try:
            with disk_errors(target):
                fill(partial)
                sync_tree(partial)
                partial.chmod(0o755)
                _publish(partial, target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def drop(self, stored: StoredVersion) -> None:
        """Forget a version that is not sound."""
        shutil.rmtree(stored.model_folder, ignore_errors=True)

    def names(self) -> list[str]:
        """The models of which something is here."""
        return sorted(path.name for path in self._folders(self.folder))

    def newest(self, name: str) -> dict[int, StoredVersion]:
        """Of each version of a model what came last, and its digest is in its folder's name."""
        found = sorted(self._entries(name), key=lambda one: one[0].stat().st_mtime_ns)
        return {
            version: self.stored(name, version, digest, is_flat=not (folder / str(version)).is_dir())
            for folder, version, digest in found
        }

    def prune(self, name: str, digests: Container[str]) -> None:
        """Remove what the remote store has no more, and what a process that died has left."""
        for folder, _, digest in list(self._entries(name)):
            if digest not in digests:
                shutil.rmtree(folder, ignore_errors=True)
        for folder in self._folders(self.folder / name):
            old_s = time.time() - folder.stat().st_mtime
            if folder.name.startswith(_PARTIAL_PREFIX) and old_s > _ABANDONED_AFTER_S:
                shutil.rmtree(folder, ignore_errors=True)

    def _entries(self, name: str) -> Iterator[tuple[Path, int, str]]:
        for folder in self._folders(self.folder / name):
            if found := _ENTRY.fullmatch(folder.name):
                yield folder, int(found[1]), found[2]

    @staticmethod
    def _folders(folder: Path) -> list[Path]:
        try:
            return [path for path in folder.iterdir() if path.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            return []


def digest_in(stored: StoredVersion) -> str:
    """The digest under which a version is kept."""
    return stored.model_folder.name.partition("-")[2]


def _publish(partial: Path, target: Path) -> None:
    try:
        partial.rename(target)
    except OSError as error:
        # Another process that serves the same store was quicker.
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
