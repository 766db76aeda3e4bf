"""Looks at the store: which versions exist, and a stamp of each that changes when its files do.

A look reads names, sizes, times and inodes, and each `config.pbtxt` that changed. Symbolic links are followed, because
Kubernetes and many deployment tools swap a link. A look ends whatever the store does: a model whose folder cannot be
read or does not answer is reported, and the others are not affected.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from weakref import WeakValueDictionary

from convoy.app.lifecycle.remote_files import RemoteError
from convoy.app.lifecycle.remote_store import RemoteStore
from convoy.app.lifecycle.tasks import ignore_error
from convoy.app.lifecycle.version_plan import VersionFiles, settle
from convoy.app.loading.triton_config import version_policy
from convoy.app.server.runtime import begin
from convoy.models.bundle import MANIFEST
from convoy.models.errors import BundleError
from convoy.models.files import read_small
from convoy.models.misplaced import misplaced_in, misplaced_of
from convoy.models.store import CONFIG, Store, StoredVersion
from convoy.models.version_policy import Policy


@dataclass(frozen=True, slots=True)
class ModelLook:
    """The versions of one model as one look found them, or why its folder could not be read.

    `policy` is the version policy of the model's configuration, None if it has none; `unknown_policy` says why it
    cannot be read. `misplaced` has a sentence for each entry that is meant as a version and is not one.
    """

    versions: dict[int, VersionFiles] = field(default_factory=dict)
    trouble: str = ""
    policy: Policy | None = None
    unknown_policy: str = ""
    misplaced: tuple[str, ...] = ()

    def after(self, before: ModelLook | None) -> ModelLook:
        """Combine two looks with `settle`; None means that there was no look before.

        The policy is that of the earlier look, because the configuration may be changing right now.
        """
        versions = settle(None if before is None else before.versions, self.versions)
        policies = before if before is not None and before.versions else self
        return replace(self, versions=versions, policy=policies.policy, unknown_policy=policies.unknown_policy)


@dataclass(frozen=True, slots=True)
class StoreLook:
    """Every model as one look found it, and a sentence for each entry of the store that cannot be a model."""

    models: dict[str, ModelLook] = field(default_factory=dict)
    misplaced: tuple[str, ...] = ()

    def all_misplaced(self) -> tuple[str, ...]:
        """In the store and in its models."""
        return (*self.misplaced, *(told for look in self.models.values() for told in look.misplaced))


def names_in(store: Store | RemoteStore) -> tuple[list[str], tuple[str, ...]]:
    """The models' names, and a sentence for each misplaced entry. Raises OSError."""
    names = store.names()
    return names, tuple(store.misplaced() if isinstance(store, RemoteStore) else misplaced_in(store))


def look_at_model(store: Store | RemoteStore, name: str) -> ModelLook:
    """Every version of one model; empty if there is none. Raises UsageError for an invalid name."""
    try:
        if isinstance(store, RemoteStore):
            # Objects are uploaded in any order, so no object proves that the others exist.
            seen = {number: VersionFiles((one.digest,), is_complete=False) for number, one in store.look(name).items()}
            misplaced = store.misplaced(name)
        else:
            seen = {stored.version: _look(stored) for stored in store.versions(name)}
            misplaced = misplaced_of(store, name)
        look = ModelLook(seen, misplaced=tuple(misplaced))
        try:
            return replace(look, policy=_policy(store, name, next(iter(seen))) if seen else None)
        except BundleError as error:
            return replace(look, unknown_policy=str(error))
    except OSError as error:
        return ModelLook(trouble=_told(f"{store.root}/{name}", error))


def _policy(store: Store | RemoteStore, name: str, version: int) -> Policy | None:
    """The version policy of a model's configuration. Raises BundleError, and RemoteError."""
    if isinstance(store, RemoteStore):
        data = store.config(name)
        return None if data is None else version_policy(data, f"{store.root}/{name}/{CONFIG}")
    path = store.version(name, version).model_folder / CONFIG
    try:
        status = path.stat()
        return _policy_of_file(path, status.st_size, status.st_mtime_ns, status.st_ino)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BundleError(_told(path, error)) from error


@lru_cache(maxsize=1024)
def _policy_of_file(path: Path, size: int, mtime_ns: int, inode: int) -> Policy | None:
    """The file's content when it had this size, time and inode. Errors are not cached."""
    return version_policy(read_small(path), str(path))


def _look(stored: StoredVersion) -> VersionFiles:
    try:
        is_bundle = os.path.lexists(stored.folder / MANIFEST)
        beside = () if is_bundle else sorted(_stamps(stored.model_folder))  # a bare model's config.pbtxt and labels
        return VersionFiles((*sorted(_stamps(stored.folder)), *beside), is_bundle)
    except OSError as error:
        trouble = _told(stored.folder, error)
        return VersionFiles(("unreadable", trouble), is_complete=False, trouble=trouble)


def _told(folder: Path | str, error: OSError) -> str:
    if isinstance(error, RemoteError):
        return str(error)
    return f"{error.filename or folder}: cannot be read ({error.strerror or error}); fix or remove it"


def _stamps(folder: Path) -> Iterator[tuple[str, int, int, int]]:
    """Names, sizes, times and inodes of everything but folders. Loading reports entries that are neither file nor
    folder.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                if not entry.is_dir():
                    status = entry.stat()
                    yield entry.name, status.st_size, status.st_mtime_ns, status.st_ino
            except FileNotFoundError:
                continue  # removed between the two calls; the next look will show it
            except OSError as error:  # loading the version reports why, if it needs the file
                yield entry.name, -1, error.errno or 0, 0


def _sweep(
    store: Store | RemoteStore, names: list[str], found: dict[str, ModelLook], given_up: threading.Event
) -> None:
    """Look at several models, one after the other, until it is given up. `found` shows its progress."""
    for name in names:
        if given_up.is_set():
            return
        found[name] = look_at_model(store, name)


# The time for one model, a few file system calls of milliseconds at most. A store that takes a thousand times as long
# does not answer.
_PATIENCE_S = 5.0


class StoreWatch:
    """Looks at one store."""

    def __init__(
        self,
        store: Store | RemoteStore,
        on_answer: Callable[[str], None] = lambda name: None,
        patience_s: float | None = None,
    ) -> None:
        """`on_answer` gets the name of a model whose folder did not answer before and now does."""
        # The library for a remote store has its own timeouts and retries, which end within two minutes.
        default_s = 120.0 if isinstance(store, RemoteStore) else _PATIENCE_S
        self._store, self._on_answer, self._patience_s = store, on_answer, patience_s or default_s
        self._hanging: set[str] = set()
        self._naming: asyncio.Future[tuple[list[str], tuple[str, ...]]] | None = None
        self._asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def names(self) -> tuple[list[str], tuple[str, ...]]:
        """The models' names, and a sentence for each misplaced entry.

        Raises OSError if the store cannot be read or does not answer.
        """
        # All callers share one thread meanwhile, which may never end.
        if self._naming is None or self._naming.done():
            self._naming = begin(partial(names_in, self._store), "look-at-store")
            self._naming.add_done_callback(ignore_error)
        work = self._naming
        await asyncio.wait([work], timeout=self._patience_s)
        if not work.done():
            raise OSError(f"{self._store.root} did not respond within {self._patience_s:g} s")
        return work.result()

    async def look(self) -> StoreLook:
        """Look at every model. Raises OSError if the store cannot be read or does not answer."""
        names, misplaced = await self.names()
        return StoreLook(await self._look_at(names), misplaced)

    async def look_at(self, name: str) -> ModelLook:
        """Look at one model. Raises UsageError for an invalid name."""
        lock = self._asking.setdefault(name, asyncio.Lock())
        async with lock:  # while it hangs, later callers start no further threads
            return (await self._look_at([name]))[name]

    async def _look_at(self, names: list[str]) -> dict[str, ModelLook]:
        found = {name: ModelLook(trouble=self._told(name)) for name in names if name in self._hanging}
        left = [name for name in names if name not in found]
        while left:
            swept: dict[str, ModelLook] = {}
            given_up = threading.Event()
            work = begin(partial(_sweep, self._store, left, swept, given_up), "look-at-models")
            seen = -1
            while not work.done() and len(swept) > seen:  # it makes progress
                seen = len(swept)
                await asyncio.wait({work}, timeout=self._patience_s)
            ended = dict(swept)
            if work.done() or len(ended) == len(left):
                await work
                return found | swept
            given_up.set()
            found |= ended
            hanging, *left = left[len(ended) :]
            found[hanging] = ModelLook(trouble=self._told(hanging))
            self._hanging.add(hanging)
            work.add_done_callback(partial(self._answers_again, hanging))
        return found

    def _answers_again(self, name: str, work: asyncio.Future[None]) -> None:
        ignore_error(work)
        self._hanging.discard(name)
        self._on_answer(name)

    def _told(self, name: str) -> str:
        return f"{self._store.root}/{name}: did not respond within {self._patience_s:g} s; check its disk"
