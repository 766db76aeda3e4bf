"""A look at the store: which versions are there, and a stamp of each that changes when its files do.

Names, sizes, times and inodes only, so that a look is cheap; symbolic links are followed, because Kubernetes
and many deployment tools swap a link. Reads no file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from app.version_plan import Seen, Stamp
from models.bundle import MANIFEST
from models.store import Store, StoredVersion


def look_at_store(store: Store) -> dict[str, dict[int, Seen]]:
    """Every version of every model. Raises OSError when the store cannot be read."""
    return {name: look_at_model(store, name) for name in store.names()}


def look_at_model(store: Store, name: str) -> dict[int, Seen]:
    """Every version of one model; empty where there is none. Raises OSError."""
    return {stored.version: _look(stored) for stored in store.versions(name)}


def _look(stored: StoredVersion) -> Seen:
    is_bundle = (stored.folder / MANIFEST).exists()
    beside = () if is_bundle else _files(stored.folder.parent)  # a bare model's config.pbtxt and labels
    return Seen((*_files(stored.folder), *beside), is_bundle)


def _files(folder: Path) -> Stamp:
    return tuple(sorted(_stamps(folder)))


def _stamps(folder: Path) -> Iterator[tuple[str, int, int, int]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                if entry.is_file():
                    status = entry.stat()
                    yield entry.name, status.st_size, status.st_mtime_ns, status.st_ino
            except FileNotFoundError:
                continue  # removed between the two calls; the next look will show it
