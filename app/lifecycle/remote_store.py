"""A store behind a URL. Its content is listed; a version is downloaded only when it is loaded.

So the version policy decides what is downloaded. A bundle is checked against its manifest before its folder gets its
final name; for a bare model only sizes can be checked, and that it did not change meanwhile. Object names are not
trusted: none may lead out of its folder.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path

from convoy.app.lifecycle.remote_files import RemoteError, RemoteFiles, RemoteObject
from convoy.models.bundle import MANIFEST, SIGNATURE, Manifest, open_bundle, read_manifest
from convoy.models.errors import BundleError, NotFetched
from convoy.models.files import MOST_TEXT_BYTES, is_file_name, read_small, stays_inside, sync
from convoy.models.misplaced import Entries, misplaced_models, misplaced_versions
from convoy.models.store import (
    BARE_MODEL,
    CONFIG,
    StoredVersion,
    StoreLayout,
    check_name,
    disk_errors,
    find_layout,
    is_name,
    is_version,
    name_of_only,
    sync_tree,
)

_log = logging.getLogger("convoy")

_PARTIAL_PREFIX = ".fetching-"
_ENTRY = re.compile(r"([1-9][0-9]{0,8})-([0-9a-f]{32})")


class VersionCache:
    """The local versions of one remote store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def stored(self, name: str, version: int, digest: str, *, is_flat: bool) -> StoredVersion:
        """Where a version is, or will be."""
        model_folder = self.folder / name / f"{version}-{digest}"
        return StoredVersion(name, version, model_folder if is_flat else model_folder / str(version), is_flat)

    def bring(self, stored: StoredVersion, fill: Callable[[Path], None]) -> None:
        """Create a version's folder from what `fill` writes into an empty one; a failure leaves nothing.

        Raises JobError for a full or read-only disk, and whatever `fill` raises.
        """
        target = stored.model_folder
        with disk_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            filling = Path(tempfile.mkdtemp(prefix=_PARTIAL_PREFIX, dir=target.parent))
        try:
            with disk_errors(target):
                fill(filling)
                sync_tree(filling)
                filling.chmod(0o755)
                filling.rename(target)
        except OSError as error:
            # Otherwise another process that serves the same store was quicker.
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        finally:
            shutil.rmtree(filling, ignore_errors=True)

    def names(self) -> list[str]:
        """The models with a local version."""
        return sorted(path.name for path in self.folder.glob("*/"))

    def newest(self, name: str) -> dict[int, StoredVersion]:
        """The newest local copy of each version of a model; the folder's name contains its digest."""
        found = sorted(self._entries(name), key=lambda one: one[0].stat().st_mtime_ns)
        return {
            version: self.stored(name, version, digest, is_flat=not (folder / str(version)).is_dir())
            for folder, version, digest in found
        }

    def prune(self, name: str, digests: Container[str]) -> None:
        """Remove what the remote store does not have any more, and leftovers of dead processes."""
        gone = [folder for folder, _, digest in self._entries(name) if digest not in digests]
        yesterday_s = time.time() - 24 * 3600  # a day is longer than any download
        partial = (self.folder / name).glob(f"{_PARTIAL_PREFIX}*/")
        for folder in (*gone, *(one for one in partial if one.stat().st_mtime < yesterday_s)):
            shutil.rmtree(folder, ignore_errors=True)

    def _entries(self, name: str) -> Iterator[tuple[Path, int, str]]:
        for folder in (self.folder / name).glob("*/"):
            if found := _ENTRY.fullmatch(folder.name):
                yield folder, int(found[1]), found[2]


# An object may have a name that no file can have here, such as one below another file.
_NO_PLACE = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL)


@dataclass(frozen=True, slots=True)
class RemoteVersion:
    """One version as listed: its files, relative to the model's folder, and where it is or will be here."""

    stored: StoredVersion
    objects: tuple[RemoteObject, ...]

    @property
    def digest(self) -> str:
        """Changes when the files do."""
        return self.stored.model_folder.name.partition("-")[2]

    @property
    def inside(self) -> str:
        """The prefix of the version's own files."""
        return "" if self.stored.is_flat else f"{self.stored.version}/"


class RemoteStore:
    """Used by several threads at once. `root` is its URL.

    `model_name` is for a store that is a single model. If it has many, a warning says that the name is not used.
    """

    def __init__(self, url: str, model_name: str, cache_folder: Path, *, is_name_asked_for: bool = True) -> None:
        """Does not connect yet. Raises UsageError if the library for such URLs is not installed."""
        self._files = RemoteFiles(url)
        self.root = self._files.url
        # Two stores may have models of the same name.
        self._cache = VersionCache(cache_folder / hashlib.sha256(self.root.encode()).hexdigest()[:16])
        self._model_name = model_name
        self._is_name_asked_for = is_name_asked_for and bool(model_name)
        self._layout: StoreLayout | None = None
        self._was_reached = False
        self._listed: dict[str, dict[int, RemoteVersion]] = {}  # as seen by the last look at each model
        self._configs: dict[str, RemoteObject | None] = {}
        self._read_config = lru_cache(1024)(self._download_config)
        self._misplaced: dict[str, list[str]] = {}  # by model; "" is the store itself

    def names(self) -> list[str]:
        """The names of all models, sorted. Until the store was reached once, those that were fetched earlier.

        Raises RemoteError, and UsageError if the store is a single model without a name.
        """
        try:
            layout = self._found_layout()
            if layout is StoreLayout.MODELS:
                entries = self._files.entries()
                found = [name for name, is_folder in entries.items() if is_folder and is_name(name)]
                self._misplaced[""] = misplaced_models(self.root, entries)
            else:
                found = [name_of_only(self.root, self._model_name)]
        except RemoteError as error:
            here = [] if self._was_reached else self._cache.names()
            if not here:
                raise
            _log.error("%s; serving the models that are already downloaded", error)
            return here
        self._was_reached = True
        return sorted(found)

    def misplaced(self, name: str = "") -> list[str]:
        """A sentence for each misplaced entry that the last look saw in the store, or at a model."""
        return self._misplaced.get(name, [])

    def look(self, name: str) -> dict[int, RemoteVersion]:
        """Every version of a model, as listed now. Raises RemoteError, and UsageError for an invalid name."""
        check_name(name)
        try:
            found = self._list(name)
        except RemoteError:
            if self._was_reached:
                raise
            return {version: RemoteVersion(stored, ()) for version, stored in self._cache.newest(name).items()}
        if name not in self._listed:  # later, because what the store does not have any more may still serve
            self._cache.prune(name, {one.digest for one in found.values()})
        self._listed[name] = found
        return found

    def config(self, name: str) -> bytes | None:
        """A model's configuration, as listed by the last look; None if there is none. Raises RemoteError.

        Raises BundleError if it is too large.
        """
        if name not in self._configs:
            paths = [one.model_folder / CONFIG for one in self._cache.newest(name).values()]
            return next((read_small(path) for path in paths if path.is_file()), None)
        listed = self._configs[name]
        return None if listed is None else self._read_config(name, listed)

    def _download_config(self, name: str, listed: RemoteObject) -> bytes:
        if listed.bytes > MOST_TEXT_BYTES:
            raise BundleError(f"{self.root}/{self._prefix(name)}{CONFIG}: has {listed.bytes} bytes; replace it")
        with tempfile.TemporaryDirectory(prefix="convoy-config-") as folder:
            target = Path(folder) / CONFIG
            self._files.download(f"{self._prefix(name)}{CONFIG}", target)
            return target.read_bytes()

    def version(self, name: str, number: int) -> StoredVersion:
        """The place of a version that the last look has seen, fetched or not."""
        listed = self._listed.get(check_name(name), {}).get(number)
        if listed is not None:
            return listed.stored
        here = self._cache.newest(name).get(number)
        return here or self._cache.stored(name, number, "0" * 32, is_flat=False)

    def fetch(self, stored: StoredVersion) -> None:
        """Make sure that a version is here, complete and valid. Blocks as long as that takes.

        Raises NotFetched if a retry may help, BundleError if only other files do, JobError for this disk.
        """
        found = self._listed.get(stored.name, {}).get(stored.version)
        listed = found if found is not None and found.stored == stored else None
        if _is_here(stored, listed):
            return
        shutil.rmtree(stored.model_folder, ignore_errors=True)
        if listed is None:
            raise NotFetched(f"{self.root}: {stored.name} version {stored.version} no longer exists")
        try:
            self._bring(listed)
        except RemoteError as error:
            raise NotFetched(str(error)) from error

    def _bring(self, listed: RemoteVersion) -> None:
        try:
            self._cache.bring(listed.stored, partial(self._fill, listed))
        except BundleError as error:
            # Damaged in transit or in the store? Another download tells.
            _log.warning("%s; downloading it again", error)
            self._cache.bring(listed.stored, partial(self._fill, listed))
        nbytes = sum(one.bytes for one in listed.objects)
        stored = listed.stored
        how = "verified against its manifest" if stored.is_bundle else "bare model, only file sizes are verified"
        _log.info("downloaded %s version %d, %d bytes, %s", stored.name, stored.version, nbytes, how)

    def _fill(self, listed: RemoteVersion, folder: Path) -> None:
        """Raises BundleError about the files in the store, and RemoteError."""
        inside = listed.inside  # files beside the version are not its own
        own = {one.path.removeprefix(inside): one for one in listed.objects if one.path.startswith(inside)}
        try:
            if MANIFEST in own:
                self._fill_with_bundle(listed, own, folder)
            else:
                self._fill_with_bare_model(listed, folder)
        except BundleError as error:
            where = f"{self.root}/{self._prefix(listed.stored.name)}"
            raise BundleError(str(error).replace(f"{folder}/", where)) from error

    def _fill_with_bundle(self, listed: RemoteVersion, own: Mapping[str, RemoteObject], folder: Path) -> None:
        name, inner = listed.stored.name, folder / listed.inside
        self._download(name, own[MANIFEST], folder)
        for one in _named_by(read_manifest(inner), inner, own):
            self._download(name, one, folder)
        if SIGNATURE in own:
            self._download(name, own[SIGNATURE], folder)
        open_bundle(inner)

    def _fill_with_bare_model(self, listed: RemoteVersion, folder: Path) -> None:
        name = listed.stored.name
        for one in listed.objects:
            self._download(name, one, folder)
        now = self._list(name).get(listed.stored.version)
        if now is None or now.digest != listed.digest:
            raise RemoteError(f"{self.root}: {name} version {listed.stored.version} changed while it was downloaded")

    def _download(self, name: str, one: RemoteObject, folder: Path) -> None:
        if not stays_inside(one.path):
            raise BundleError(f"{folder}/{one.path!r} is outside its model's folder; do not use this store")
        target = folder / one.path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()  # errors of this disk must not count as the remote's
        except OSError as error:
            if error.errno not in _NO_PLACE:
                raise
            raise BundleError(
                f"{folder}/{one.path}: cannot be stored as a file ({error.strerror}); rename it"
            ) from error
        self._files.download(f"{self._prefix(name)}{one.path}", target)
        if (size := target.stat().st_size) != one.bytes:
            raise RemoteError(f"{self.root}: {one.path}: got {size} of {one.bytes} bytes")
        sync(target)

    def _found_layout(self) -> StoreLayout:
        """Determined once, as for a local store. Raises RemoteError."""
        if self._layout is None:
            entries = cache(self._files.entries)
            self._layout = find_layout(
                lambda path: [one for one, is_folder in entries(path).items() if is_folder],
                lambda path: path.rpartition("/")[2] in entries(path.rpartition("/")[0]),
            )
            if self._layout is StoreLayout.MODELS and self._is_name_asked_for:
                _log.warning("%s is a folder of models; --model-name is ignored", self.root)
        return self._layout

    def _prefix(self, name: str) -> str:
        """The prefix of a model's files."""
        return f"{name}/" if self._layout is StoreLayout.MODELS else ""

    def _list(self, name: str) -> dict[int, RemoteVersion]:
        layout = self._found_layout()
        if layout is not StoreLayout.MODELS and name != self._model_name:
            return {}
        objects = self._files.objects(self._prefix(name).rstrip("/"))
        self._configs[name] = next((one for one in objects if one.path == CONFIG), None)
        if layout is StoreLayout.ONE_VERSION:
            is_model = any(one.path in (MANIFEST, BARE_MODEL) for one in objects)
            return {1: self._version(name, 1, objects, is_flat=True)} if is_model else {}
        entries = _entries(objects, "")
        folder = f"{self.root}/{self._prefix(name)}".rstrip("/")
        self._misplaced[name] = misplaced_versions(folder, entries, lambda path: _entries(objects, f"{path}/"))
        numbers = [int(one) for one, is_folder in entries.items() if is_folder and is_version(one)]
        beside = [one for one in objects if not is_version(one.path.partition("/")[0])]
        found = {}
        for number in numbers:
            own = [one for one in objects if one.path.startswith(f"{number}/")]
            is_bundle = any(one.path == f"{number}/{MANIFEST}" for one in own)
            found[number] = self._version(name, number, own if is_bundle else [*own, *beside], is_flat=False)
        return found

    def _version(self, name: str, number: int, objects: Iterable[RemoteObject], *, is_flat: bool) -> RemoteVersion:
        listed = tuple(sorted(objects))
        digest = hashlib.sha256(repr([(one.path, one.bytes, one.tag) for one in listed]).encode()).hexdigest()[:32]
        return RemoteVersion(self._cache.stored(name, number, digest, is_flat=is_flat), listed)


def _entries(objects: Iterable[RemoteObject], inside: str) -> Entries:
    """The direct entries of a folder, from the objects below it."""
    found: dict[str, bool] = {}
    for one in objects:
        if one.path.startswith(inside):
            first, slash, _ = one.path.removeprefix(inside).partition("/")
            found[first] = found.get(first, False) or bool(slash)
    return found


def _named_by(manifest: Manifest, folder: Path, own: Mapping[str, RemoteObject]) -> list[RemoteObject]:
    """The files of a bundle, checked against the listing before anything is downloaded. Raises BundleError."""
    found = []
    for name, record in manifest.files.items():
        if not is_file_name(name):
            raise BundleError(f"{folder}: the manifest names a file outside the bundle ({name!r}); do not use it")
        one = own.get(name)
        size = "no such file" if one is None else f"{one.bytes} bytes"
        if one is None or one.bytes != record.bytes:
            raise BundleError(
                f"{folder}/{name}: the store has {size}, but the manifest says {record.bytes} bytes; upload it again"
            )
        found.append(one)
    return found


def _is_here(stored: StoredVersion, listed: RemoteVersion | None) -> bool:
    """Whether a version was fetched before and is still valid. An invalid one is downloaded again."""
    if not stored.model_folder.is_dir():
        return False
    try:
        if stored.is_bundle:
            open_bundle(stored.folder)
            return True
        objects = () if listed is None else listed.objects
        return all((stored.model_folder / one.path).stat().st_size == one.bytes for one in objects)
    except (BundleError, OSError) as error:
        _log.warning("%s; downloading it again", error)
        return False
