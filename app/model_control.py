"""Which models are loaded, and when: at the start, on request, or by watching the store.

Knows the store, the plan and the loader. How requests move from one engine to the next is the core's.
A load that fails changes nothing but the index, which then says why.

    none       everything at the start, nothing afterwards
    explicit   what is asked for, at the start or over the network
    poll       what the store holds, looked at again and again
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from app.loading import LoadedModel, LoadOptions
from app.store_scan import look_at_model, look_at_store
from app.version_plan import Found, Known, Load, Policy, Seen, Stamp, Unload, next_step, settle
from models.errors import InvalidRequest, JobError, NotFound, Unavailable
from models.store import Store, StoredVersion

if TYPE_CHECKING:
    from app.core import Core

_log = logging.getLogger("convoy")
ControlMode = Literal["none", "explicit", "poll"]
LoadVersion = Callable[[StoredVersion, LoadOptions], LoadedModel]
EVERYTHING = "*"


@dataclass(frozen=True, slots=True)
class ControlOptions:
    """What the operator decided. `at_start` are names, or "*", for mode explicit."""

    mode: ControlMode = "none"
    versions: Policy = "latest"
    poll_interval_s: float = 2.0
    at_start: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Override:
    """What a request to load says in the place of configuration; None: as it is without."""

    max_batch_size: int | None = None
    versions: Policy | None = None


_NO_OVERRIDE = Override()


class ModelControl:
    """Loads and unloads for one core."""

    def __init__(
        self, core: Core, store: Store, options: ControlOptions, load_options: LoadOptions, load_version: LoadVersion
    ) -> None:
        self._core, self._store, self._options = core, store, options
        self._load_options, self._load_version = load_options, load_version
        self._known: defaultdict[str, dict[int, Known]] = defaultdict(dict)
        self._overrides: dict[str, Override] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._last_look: dict[str, dict[int, Seen]] = {}
        self._loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="load")

    @property
    def may_be_empty(self) -> bool:
        """Whether a server without any model is as it should be: one may still come."""
        return self._options.mode != "none"

    async def load_initially(self) -> None:
        """Load what the store holds, or what was named. Raises OSError when the store cannot be read."""
        self._last_look = await asyncio.to_thread(look_at_store, self._store)
        names = sorted(self._last_look)
        if self._options.mode == "explicit" and EVERYTHING not in self._options.at_start:
            names = [name for name in names if name in self._options.at_start]
            for missing in sorted(set(self._options.at_start) - set(names)):
                _log.error("there is no model '%s' to load in %s", missing, self._store.root)
        for name in names:
            await self._converge(name, settle(None, self._last_look[name]))

    async def watch(self) -> None:
        """In mode poll: follow the store until cancelled."""
        if self._options.mode != "poll":
            return
        while True:
            await asyncio.sleep(self._options.poll_interval_s)
            try:
                now = await asyncio.to_thread(look_at_store, self._store)
            except OSError as error:  # a network file system that is away for a while is no order to unload
                _log.warning("the store cannot be read (%s); what is loaded goes on serving", error)
                continue
            before, self._last_look = self._last_look, now
            for name in sorted({*before, *now, *self._known}):
                await self._follow(name, settle(before.get(name, {}), now.get(name, {})))

    async def load(self, name: str, override: Override = _NO_OVERRIDE) -> None:
        """Load a model, or load it again if it changed; return when it serves.

        Raises Unavailable in another mode, NotFound, or InvalidRequest when a version was refused.
        """
        self.check_explicit()
        seen = await asyncio.to_thread(look_at_model, self._store, name)
        if not seen:
            raise NotFound(
                f"failed to load '{name}', failed to poll from model repository; there is no version of it in the store"
            )
        async with self._locks[name]:
            # Asked for by a person: what was refused before deserves another try.
            known = self._known[name]
            known |= {version: replace(own, refused=None) for version, own in known.items()}
            if override != self._overrides.get(name, _NO_OVERRIDE):
                known |= {version: replace(own, loaded=("before the override",)) for version, own in known.items()
                          if own.loaded is not None}  # fmt: skip
            self._overrides[name] = override
            await self._converge_locked(name, settle(None, seen))
            refused = {version: own for version, own in known.items() if own.refused is not None}
        if refused:
            raise InvalidRequest(self._refusal(name, max(refused)))

    async def unload(self, name: str) -> None:
        """Unload every version of a model; return when its last request is answered and its memory is free.

        A model that is not loaded is no error. Raises Unavailable in another mode.
        """
        self.check_explicit()
        async with self._locks[name]:
            versions = [version for version, own in self._known.pop(name, {}).items() if own.loaded is not None]
            self._overrides.pop(name, None)
            leaving = [self._core.take_out_of_service(name, version) for version in versions]
            for version in versions:
                self._core.catalog.set_refused(name, version, "unloaded")
        await asyncio.gather(*(task for task in leaving if task is not None))

    async def names_in_store(self) -> list[str]:
        """In mode explicit, every name that could be loaded; else nothing, since all of it is listed anyway."""
        return await asyncio.to_thread(self._store.names) if self._options.mode == "explicit" else []

    def check_explicit(self) -> None:
        """Raises Unavailable unless models are loaded on request; the words are Triton's."""
        if self._options.mode != "explicit":
            error = Unavailable(
                "explicit model load / unload is not allowed if polling is enabled; "
                "start the server with --model-control explicit"
            )
            error.retry_after_s = None
            raise error

    def load_options(self, name: str) -> LoadOptions:
        """How a version of this model is loaded."""
        override = self._overrides.get(name, _NO_OVERRIDE)
        return replace(self._load_options, configured_batch=override.max_batch_size)

    def close(self) -> None:
        self._loader.shutdown(wait=False, cancel_futures=True)

    async def _follow(self, name: str, found: tuple[Found, ...]) -> None:
        try:
            await self._converge(name, found)
        except Exception:  # a bug, which must not end the watch over the other models
            _log.exception("following %s failed; this is a bug", name)
        on_disk = {one.version for one in found}
        for version in [v for v, own in self._known[name].items() if v not in on_disk and own.loaded is None]:
            del self._known[name][version]
        self._core.catalog.drop_absent(name, on_disk)
        if not self._known[name]:
            del self._known[name]

    async def _converge(self, name: str, found: tuple[Found, ...]) -> None:
        async with self._locks[name]:
            await self._converge_locked(name, found)

    async def _converge_locked(self, name: str, found: tuple[Found, ...]) -> None:
        stamps = {one.version: one.stamp for one in found}
        policy = self._overrides.get(name, _NO_OVERRIDE).versions or self._options.versions
        while (step := next_step(found, self._known[name], policy)) is not None:
            match step:
                case Load(version):
                    await self._load(name, version, stamps[version])
                case Unload(version):
                    self._unload(name, version, is_on_disk=version in stamps)

    async def _load(self, name: str, version: int, stamp: Stamp) -> None:
        known = self._known[name].get(version, Known(version))
        if known.loaded is None:
            self._core.catalog.set_loading(name, version)
        stored = StoredVersion(name, version, self._store.root / name / str(version))
        loop = asyncio.get_running_loop()
        try:
            loaded = await loop.run_in_executor(self._loader, self._load_version, stored, self.load_options(name))
        except Exception as error:  # a file nobody thought of, or a bug: the other versions are not to blame
            is_foreseen = isinstance(error, JobError)
            reason = str(error) if is_foreseen else f"{type(error).__name__}: {error}"
            _log.error("refused %s version %d: %s", name, version, reason, exc_info=None if is_foreseen else error)
            self._core.catalog.set_refused(name, version, reason)
            self._known[name][version] = replace(known, refused=stamp)
            return
        self._core.put_into_service(loaded)
        self._known[name][version] = Known(version, loaded=stamp)
        for proved in loaded.engines:
            info = proved.engine.info
            _log.info(
                "loaded %s version %d on %s %s on %s in %.2f s (%s)",
                *(name, version, info.engine, info.precision, info.device, loaded.load_s, proved.reason),
            )
        for reason in loaded.skipped:
            _log.info("passed over for %s version %d: %s", name, version, reason)

    def _unload(self, name: str, version: int, *, is_on_disk: bool) -> None:
        self._core.take_out_of_service(name, version)
        del self._known[name][version]
        if is_on_disk:
            self._core.catalog.set_refused(name, version, "unloaded")

    def _refusal(self, name: str, version: int) -> str:
        catalog = self._core.catalog
        (reason,) = (one.reason for one in catalog.index() if (one.name, one.version) == (name, version))
        still = [str(served.key.version) for served in catalog.versions(name)]
        serving = f"; version {', '.join(still)} serves" if still else ""
        return f"load failed for model '{name}': version {version} is at UNAVAILABLE state: {reason}{serving}"
