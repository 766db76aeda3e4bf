"""Which models are loaded, and when: at the start, on request, or by watching the store.

Knows the store, the plan and the loader; `ModelLifecycle` puts versions into service and takes them out. A load that
fails changes only the index, which then says why.

    none       everything at the start, nothing afterwards
    explicit   what is requested, at the start or over the network
    poll       whatever the store has, checked regularly
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Literal, TypeVar

from convoy.app.engines.table import AUTO, rows_for
from convoy.app.lifecycle.catalog import WHOLE_MODEL, Catalog, Override
from convoy.app.lifecycle.loads import Loads, LoadVersion
from convoy.app.lifecycle.model_lifecycle import ModelLifecycle
from convoy.app.lifecycle.remote_store import RemoteStore
from convoy.app.lifecycle.store_watch import ModelLook, StoreLook, StoreWatch
from convoy.app.lifecycle.tasks import Tasks, ignore_error
from convoy.app.lifecycle.version_plan import VersionFiles, VersionRecord, next_step
from convoy.app.loading.load import LoadOptions
from convoy.app.telemetry.metrics import Metrics
from convoy.models.errors import (
    BundleError,
    InvalidRequest,
    JobError,
    NotFetched,
    Unavailable,
    UnknownModel,
    Unsupported,
    UsageError,
)
from convoy.models.store import CONFIG, Store, StoredVersion, check_name
from convoy.models.version_policy import LATEST, Policy

_log = logging.getLogger("convoy")
ControlMode = Literal["none", "explicit", "poll"]
Answer = TypeVar("Answer")
EVERYTHING = "*"


@dataclass(frozen=True, slots=True)
class ControlOptions:
    """The operator's choices. `at_start` are names, or "*", for mode explicit."""

    mode: ControlMode = "none"
    versions: Policy = LATEST
    poll_interval_s: float = 2.0
    at_start: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The versions that were found, which of them are wanted, and by whom."""

    policy: Policy
    said_by: str
    found: dict[int, VersionFiles]

    def unmet(self, *, needs_all: bool = False) -> str:
        """The wanted versions that do not exist, if none exists, or not all; "" if enough do."""
        numbers = self.policy if isinstance(self.policy, tuple) else ()
        absent = [number for number in numbers if number not in self.found]
        if not self.found or not absent or (len(absent) < len(numbers) and not needs_all):
            return ""
        named, has = (", ".join(map(str, versions)) for versions in (absent, sorted(self.found)))
        return f"{self.said_by} asks for version {named}, but the store has {has}; choose one of these, or add it"


_NO_OVERRIDE = Override()
_NOTHING = ModelLook()


@dataclass(slots=True, eq=False)
class _Model:
    """The last request for one model, and the work on it, which takes turns with `lock`."""

    override: Override = _NO_OVERRIDE
    policy: Policy | None = None
    following: asyncio.Task[None] | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class ModelControl:
    """Loads and unloads for one core."""

    def __init__(
        self,
        catalog: Catalog,
        lifecycle: ModelLifecycle,
        tasks: Tasks,
        store: Store | RemoteStore,
        options: ControlOptions,
        load_version: LoadVersion,
        metrics: Metrics,
        load_options: LoadOptions,
        load_by_model: Mapping[str, LoadOptions],
        is_leaving: Callable[[], bool],
    ) -> None:
        """`is_leaving` says whether nothing is worth loading any more."""
        self._catalog, self._lifecycle, self._tasks, self._store = catalog, lifecycle, tasks, store
        self._options, self._is_leaving, self._metrics = options, is_leaving, metrics
        self._load_options, self._load_by_model = load_options, load_by_model
        self._models: defaultdict[str, _Model] = defaultdict(_Model)
        self._records = catalog.records  # the result for each version, by model and number
        self._last_look: dict[str, ModelLook] = {}
        self._misplaced: dict[str, int] = {}  # in how many consecutive looks it was seen
        self._said_of_all: tuple[str, ...] = ()  # why an engine serves no model
        self._looking = asyncio.Lock()
        self._watch = StoreWatch(store, self._answers_again)
        self._loads = Loads(load_version, load_options.limit_s, self._load_came_late)

    @property
    def mode(self) -> ControlMode:
        return self._options.mode

    @property
    def may_be_empty(self) -> bool:
        """Whether a server without models is as intended, because one may still come."""
        return self._options.mode != "none"

    def policy_of(self, name: str) -> Policy:
        """The version policy of a model at the last look."""
        own = self._models.get(name)
        return self._options.versions if own is None or own.policy is None else own.policy

    async def load_initially(self) -> None:
        """Load what the store has, or what was named. Raises OSError if the store cannot be read.

        In mode poll the store is watched from now on, so a slow model does not delay the others.
        """
        self._say_what_cannot_serve()
        look = await self._watch.look()
        self._last_look = look.models
        self._misplaced = dict.fromkeys(look.all_misplaced(), 1)
        self._tell_misplaced(look)
        self._warn_of_unknown(self._load_by_model)
        names = sorted(self._last_look)
        if self._options.mode == "explicit" and EVERYTHING not in self._options.at_start:
            names = [name for name in names if name in self._options.at_start]
            for missing in sorted(set(self._options.at_start) - set(names)):
                _log.error("--load-model: model '%s' is not in %s", missing, self._store.root)
        for name in names:
            self._follow(name, None, self._last_look[name])
        first = [own.following for own in self._models.values() if own.following is not None]
        if self._options.mode == "poll":
            self._tasks.spawn(self._poll())
        await asyncio.gather(*first)

    def _say_what_cannot_serve(self) -> None:
        """Log what cannot serve on this machine, whatever the model; engines that lack the same thing in one line."""
        if self._load_options.engine != AUTO:
            return  # the operator chose one engine
        engines: defaultdict[str, list[str]] = defaultdict(list)
        self._said_of_all = rows_for(self._load_options.machine, AUTO)[1]
        for told in self._said_of_all:
            engine, _, reason = told.partition(": ")
            engines[reason].append(engine)
        for reason, names in engines.items():
            _log.info("not available here: %s: %s", ", ".join(names), reason)

    def change_loads(self, load_by_model: Mapping[str, LoadOptions]) -> None:
        """Change the load options of single models, from their next load on."""
        is_new = load_by_model.keys() - self._load_by_model.keys()
        self._load_by_model = load_by_model
        self._warn_of_unknown(is_new)

    def _warn_of_unknown(self, names: Iterable[str]) -> None:
        """Warn about unknown names, which may be misspelt. Before the first look they cannot be known."""
        if not self._last_look:
            return
        for name in sorted(set(names) - self._last_look.keys()):
            near = get_close_matches(name, self._last_look, 1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            _log.warning(
                "the configuration has options for model '%s', which is not in %s%s", name, self._store.root, hint
            )

    async def _poll(self) -> None:
        """Watch the store until cancelled."""
        while True:
            await asyncio.sleep(self._options.poll_interval_s)
            try:
                look = await self._watch.look()
            except OSError as error:  # a network file system that is briefly away must not unload models
                _log.warning("cannot read the store (%s); loaded models keep serving", error)
                continue
            self._tell_misplaced(look)
            before, now, self._last_look = self._last_look, look.models, look.models
            for name in sorted({*before, *now, *(name for name, records in self._records.items() if records)}):
                self._follow(name, before.get(name, _NOTHING), now.get(name, _NOTHING))

    def _tell_misplaced(self, look: StoreLook) -> None:
        """Report misplaced entries once, after two consecutive looks: they may be on their way to their place."""
        self._misplaced = {told: self._misplaced.get(told, 0) + 1 for told in look.all_misplaced()}
        for told, looks in self._misplaced.items():
            if looks == 2:
                _log.warning("%s", told)

    def _follow(self, name: str, before: ModelLook | None, now: ModelLook) -> None:
        """Begin to do what one model's folder asks for, unless the previous work on it still runs."""
        if now.trouble:
            self._set_trouble(name, now.trouble)
            return
        own = self._models[name]
        if own.following is None or own.following.done():
            own.following = self._tasks.spawn(self._obey(name, now.after(before)))

    def _set_trouble(self, name: str, trouble: str) -> None:
        """Note that its versions cannot be seen. What is loaded keeps serving."""
        if self._catalog.reason(name, WHOLE_MODEL) != trouble:
            _log.error("refused %s: %s", name, trouble)
            self._records[name][WHOLE_MODEL] = VersionRecord(reason=trouble)

    async def load(self, name: str, override: Override = _NO_OVERRIDE) -> None:
        """Load a model, or load it again if it changed; return when it serves. Continues if the caller leaves.

        Raises Unsupported in another mode, NotFound, or InvalidRequest for an invalid name or a refused version.
        """
        self._check_asked(name)
        await self._see_through(self._load_asked(name, override))

    async def _load_asked(self, name: str, override: Override) -> None:
        look = await self._watch.look_at(name)
        if look.trouble:
            self._set_trouble(name, look.trouble)
            raise InvalidRequest(f"load failed for model '{name}': {look.trouble}")
        if not look.versions:
            why = "; ".join(look.misplaced) or "the store has no version of it"
            raise UnknownModel(f"failed to load '{name}', failed to poll from model repository; {why}")
        wanted = self._wanted(name, look.after(None), override)
        # Before anything changes: running versions stay. A request for two versions is not satisfied by one.
        if unmet := wanted.unmet(needs_all=override.versions is not None):
            raise InvalidRequest(f"load failed for model '{name}': {unmet}{self._still(name)}")
        model, records = self._models[name], self._records[name]
        async with model.lock:
            records.pop(WHOLE_MODEL, None)
            # A person asked for it, so refused versions get another try.
            self._try_again(name, also_sound=True)
            if override != model.override:
                for version, own in records.items():
                    if own.loaded is not None:
                        records[version] = replace(own, loaded=("before the override",))
            model.override = override
            await self._converge(name, wanted)
            refused = [version for version, own in records.items() if own.refused is not None]
        if refused:
            reason = f"version {max(refused)} is at UNAVAILABLE state: {records[max(refused)].reason}"
            raise InvalidRequest(f"load failed for model '{name}': {reason}{self._still(name)}")

    def _try_again(self, name: str, *, also_sound: bool = False) -> None:
        """Forget earlier refusals of versions that could not be fetched, or of all."""
        for version, own in self._records[name].items():
            if own.may_come or also_sound:
                self._records[name][version] = own.forgiven()

    async def unload(self, name: str) -> None:
        """Unload every version of a model; return when its last request is answered and its memory is free.

        Unloading a model that is not loaded is not an error. Raises Unsupported in another mode, InvalidRequest for an
        invalid name.
        """
        self._check_asked(name)
        if name in self._models:  # otherwise it was never loaded
            await self._see_through(self._unload_asked(name, self._models[name]))

    async def _unload_asked(self, name: str, model: _Model) -> None:
        async with model.lock:
            versions = [version for version, own in self._records[name].items() if own.loaded is not None]
            self._try_again(name, also_sound=True)
            self._records[name].update(dict.fromkeys(versions, VersionRecord(reason="unloaded")))
            model.override = _NO_OVERRIDE
            leaving = [self._lifecycle.take_out_of_service(name, version) for version in versions]
        await asyncio.gather(*(task for task in leaving if task is not None))

    async def _see_through(self, work: Coroutine[object, object, None]) -> None:
        """Finish work that has begun, whether the client waits or leaves."""
        task = self._tasks.spawn(work)
        task.add_done_callback(ignore_error)
        await asyncio.shield(task)

    async def names_in_store(self) -> list[str]:
        """In mode explicit, every name that can be loaded; otherwise empty, since everything is listed anyway.

        Raises Unavailable if the store cannot be read.
        """
        return (await _answer_of_store(self._watch.names()))[0] if self._options.mode == "explicit" else []

    async def versions_in_store(self) -> dict[str, list[int]]:
        """Everything in the store now, served or not, by name and ascending. Raises Unavailable."""
        async with self._looking:  # one look at a time, for all callers
            found = await _answer_of_store(self._watch.look())
        return {name: sorted(look.versions) for name, look in sorted(found.models.items())}

    def check_explicit(self) -> None:
        """Raise Unsupported, in Triton's wording, unless models are loaded on request."""
        if self._options.mode != "explicit":
            raise Unsupported(
                "explicit model load / unload is not allowed if polling is enabled; "
                "start the server with --model-control explicit"
            )

    def _check_asked(self, name: str) -> None:
        """Raise Unsupported in another mode, and InvalidRequest for an invalid name."""
        self.check_explicit()
        try:
            check_name(name)
        except UsageError as error:
            raise InvalidRequest(str(error)) from error

    async def _obey(self, name: str, look: ModelLook) -> None:
        model, records = self._models[name], self._records[name]
        wanted = self._wanted(name, look, model.override)
        found, unmet = wanted.found, wanted.unmet()
        try:
            async with model.lock:
                self._try_again(name)
                await self._converge(name, wanted)
                if unmet:
                    self._set_trouble(name, unmet)
        except Exception:  # a bug, which must not end the watch over the other models
            _log.exception("following %s failed; this is a bug", name)
        if self._options.mode == "none" and any(own.may_come for own in records.values()):
            self._tasks.spawn(self._look_again(name, after_s=15.0))  # without polling, nothing else fetches it
        if self._options.mode != "poll":
            return
        keep = {*found, WHOLE_MODEL} if unmet else found
        for version in [v for v, own in records.items() if v not in keep and own.loaded is None]:
            del records[version]
        if not records:
            model.policy = None

    def _wanted(self, name: str, look: ModelLook, override: Override) -> _Wanted:
        """The wanted versions, and who wants them: the load request, the model's configuration, or the operator."""
        found = look.versions
        if override.versions is not None:
            return _Wanted(override.versions, "the request", found)
        # A configuration is not signed, so it decides nothing if signatures are required.
        is_signed = self._load_options.signed is not None
        if look.unknown_policy and not is_signed:
            # Nothing can be loaded, and running versions stay.
            trouble = look.unknown_policy
            serving = tuple(served.key.version for served in self._catalog.versions(name))
            stamp = ("unknown policy", trouble)
            found = {version: replace(one, stamp=stamp, trouble=trouble) for version, one in found.items()}
            return _Wanted(serving or self._options.versions, CONFIG, found)
        if look.policy is not None and not is_signed:
            return _Wanted(look.policy, f"version_policy in {CONFIG}", found)
        return _Wanted(self._options.versions, "--version-policy", found)

    async def _converge(self, name: str, wanted: _Wanted) -> None:
        """Runs while the model's lock is held."""
        found, records = wanted.found, self._records[name]
        self._models[name].policy = wanted.policy
        for version, one in found.items():
            known = records.get(version)
            # If the files are those that serve again, they are valid.
            if known is not None and known.loaded == one.stamp:
                records[version] = VersionRecord(known.loaded)
        while (step := next_step(found, records, wanted.policy)) is not None:
            match step:
                case "load", version:
                    await self._load(name, version, found[version])
                case "unload", version:
                    self._lifecycle.take_out_of_service(name, version)
                    del records[version]
                    if version in found:
                        records[version] = VersionRecord(reason="unloaded")

    async def _load(self, name: str, version: int, found: VersionFiles) -> None:
        records = self._records[name]
        known = records.get(version, VersionRecord())
        records[version] = replace(known, is_loading=known.loaded is None)
        own_options = self._load_by_model.get(name, self._load_options)
        options = replace(own_options, configured_batch=self._models[name].override.max_batch_size)
        try:
            if found.trouble:
                raise BundleError(found.trouble)
            loaded = await self._loads.load(self._store.version(name, version), options)
        except Exception as error:  # an unexpected file or a bug: the other versions are not affected
            is_foreseen = isinstance(error, JobError)
            reason = str(error) if is_foreseen else f"{type(error).__name__}: {error}"
            # Versions that could not be fetched are tried again at every look, and files may change while they are
            # copied.
            is_unfetched = isinstance(error, NotFetched)
            if reason != known.reason or not (is_unfetched or known.loaded is not None):
                _log.error("refused %s version %d: %s", name, version, reason, exc_info=None if is_foreseen else error)
            self._metrics.load_ended("refused")
            records[version] = VersionRecord(known.loaded, found.stamp, is_unfetched, reason)
            return
        self._metrics.load_ended("loaded")
        self._lifecycle.put_into_service(loaded, options)
        records[version] = VersionRecord(loaded=found.stamp)
        for proved in loaded.engines:
            info = proved.engine.info
            _log.info(
                "loaded %s version %d on %s %s on %s in %.2f s (%s)",
                *(name, version, info.engine, info.precision, info.device, loaded.load_s, proved.reason),
            )
        for objection in loaded.objections:
            _log.warning("%s version %d was published with --force despite: %s", name, version, objection)
        for reason in loaded.skipped:
            if reason not in self._said_of_all:
                _log.debug("not chosen for %s version %d: %s", name, version, reason)

    def _load_came_late(self, stored: StoredVersion) -> None:
        """Its disk answers again, so a version that was refused for that gets another try."""
        records = self._records[stored.name]
        if stored.version in records:
            records[stored.version] = records[stored.version].forgiven()
        self._answers_again(stored.name)

    def _answers_again(self, name: str) -> None:
        """Load now what was to be loaded at the start. Polling does that by itself; explicit mode loads on request."""
        if self._options.mode == "none":
            self._tasks.spawn(self._look_again(name))

    async def _look_again(self, name: str, after_s: float = 0.0) -> None:
        await asyncio.sleep(after_s)
        if self._is_leaving():
            return
        look = await self._watch.look_at(name)
        if not look.trouble:
            self._records[name].pop(WHOLE_MODEL, None)
            await self._obey(name, look.after(None))

    def _still(self, name: str) -> str:
        still = [str(served.key.version) for served in self._catalog.versions(name)]
        return f"; version {', '.join(still)} serves" if still else ""


async def _answer_of_store(look: Awaitable[Answer]) -> Answer:
    """Raises Unavailable if the store cannot be read."""
    try:
        return await look
    except OSError as error:
        raise Unavailable(f"cannot read the store ({error}); check whether its disk is mounted") from error
