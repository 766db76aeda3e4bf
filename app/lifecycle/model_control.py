"""Which models are loaded, and when: at the start, on request, or by watching the store.

Knows the store, the plan and the loader. `ModelLifecycle` puts versions into service and takes them out.
A load that fails changes nothing but the index, which then says why.

    none       everything at the start, nothing afterwards
    explicit   what is asked for, at the start or over the network
    poll       what the store holds, looked at regularly
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Literal

from convoy.app.engines.table import AUTO, rows_for
from convoy.app.lifecycle.catalog import WHOLE_MODEL, Catalog, Override
from convoy.app.lifecycle.loads import Loads, LoadVersion
from convoy.app.lifecycle.model_lifecycle import ModelLifecycle
from convoy.app.lifecycle.remote_store import RemoteStore
from convoy.app.lifecycle.store_watch import ModelLook, StoreLook, StoreWatch
from convoy.app.lifecycle.tasks import Tasks
from convoy.app.lifecycle.version_plan import Load, Unload, VersionFiles, VersionRecord, next_step, settle
from convoy.app.loading.load import LoadOptions
from convoy.app.telemetry.metrics import Metrics
from convoy.models.errors import BundleError, InvalidRequest, JobError, NotFetched, NotFound, Unavailable, UsageError
from convoy.models.store import CONFIG, Store, StoredVersion, check_name
from convoy.models.version_policy import LATEST, Policy

_log = logging.getLogger("convoy")
ControlMode = Literal["none", "explicit", "poll"]
EVERYTHING = "*"


@dataclass(frozen=True, slots=True)
class ControlOptions:
    """What the operator decided. `at_start` are names, or "*", for mode explicit."""

    mode: ControlMode = "none"
    versions: Policy = LATEST
    poll_interval_s: float = 2.0
    at_start: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Which versions of one model, and by whose word. `trouble`: why nothing can be loaded, whatever is wanted."""

    policy: Policy
    said_by: str
    trouble: str = ""

    def judged(self, found: dict[int, VersionFiles]) -> dict[int, VersionFiles]:
        """The versions, with the trouble of all where there is one."""
        if not self.trouble:
            return found
        stamp = ("unknown policy", self.trouble)
        return {version: replace(one, stamp=stamp, trouble=self.trouble) for version, one in found.items()}


_NO_OVERRIDE = Override()
_NOTHING = ModelLook()


@dataclass(slots=True, eq=False)
class _Model:
    """One model: its versions by number, what was asked for last, and the work on it, which takes turns by `lock`."""

    versions: dict[int, VersionRecord] = field(default_factory=dict)
    override: Override = _NO_OVERRIDE
    policy: Policy | None = None
    following: asyncio.Task[None] | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def try_again(self, *, also_sound: bool = False) -> None:
        """Nothing is known any more against the files of versions that did not come, or of any."""
        for version, own in self.versions.items():
            if own.may_come or also_sound:
                self.versions[version] = own.forgiven()


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
        """`is_leaving`: whether nothing is worth loading any more."""
        self._catalog, self._lifecycle, self._tasks, self._store = catalog, lifecycle, tasks, store
        self._options, self._is_leaving, self._metrics = options, is_leaving, metrics
        self._load_options, self._load_by_model = load_options, load_by_model
        self._models: defaultdict[str, _Model] = defaultdict(_Model)
        self._last_look: dict[str, ModelLook] = {}
        self._misplaced: dict[str, int] = {}  # in how many looks up to the last one
        self._said_of_all: tuple[str, ...] = ()  # why an engine serves no model
        self._looking = asyncio.Lock()
        self._watch = StoreWatch(store, self._answers_again)
        self._loads = Loads(load_version, load_options.limit_s, self._load_came_late)

    @property
    def mode(self) -> ControlMode:
        return self._options.mode

    @property
    def may_be_empty(self) -> bool:
        """Whether a server without any model is as it should be: one may still come."""
        return self._options.mode != "none"

    def policy_of(self, name: str) -> Policy:
        """Which versions of a model were wanted when it was last looked at."""
        own = self._models.get(name)
        return self._options.versions if own is None or own.policy is None else own.policy

    async def load_initially(self) -> None:
        """Load what the store holds, or what was named. Raises OSError when the store cannot be read.

        In mode poll the store is followed from here on, so that one model that takes long holds up no other.
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
                _log.error("there is no model '%s' to load in %s", missing, self._store.root)
        for name in names:
            self._follow(name, None, self._last_look[name])
        first = [own.following for own in self._models.values() if own.following is not None]
        if self._options.mode == "poll":
            self._tasks.spawn(self._poll())
        await asyncio.gather(*first)

    def _say_what_cannot_serve(self) -> None:
        """On this machine, whatever the model; engines that lack the same thing in one line."""
        if self._load_options.engine != AUTO:
            return  # the operator chose one engine
        engines: defaultdict[str, list[str]] = defaultdict(list)
        self._said_of_all = rows_for(self._load_options.machine, AUTO)[1]
        for told in self._said_of_all:
            engine, _, reason = told.partition(": ")
            engines[reason].append(engine)
        for reason, names in engines.items():
            _log.info("not used here: %s: %s", ", ".join(names), reason)

    def change_loads(self, load_by_model: Mapping[str, LoadOptions]) -> None:
        """For single models, from their next load on."""
        is_new = load_by_model.keys() - self._load_by_model.keys()
        self._load_by_model = load_by_model
        self._warn_of_unknown(is_new)

    def _warn_of_unknown(self, names: Iterable[str]) -> None:
        """It may still come, or be misspelt. Before the first look this is unknown."""
        if not self._last_look:
            return
        for name in sorted(set(names) - self._last_look.keys()):
            near = get_close_matches(name, self._last_look, 1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            _log.warning("there are options for model '%s', which is not in %s%s", name, self._store.root, hint)

    async def _poll(self) -> None:
        """Follow the store until cancelled."""
        while True:
            await asyncio.sleep(self._options.poll_interval_s)
            try:
                look = await self._watch.look()
            except OSError as error:  # a network file system that is away for a while is no order to unload
                _log.warning("the store cannot be read (%s); what is loaded goes on serving", error)
                continue
            self._tell_misplaced(look)
            before, now, self._last_look = self._last_look, look.models, look.models
            for name in sorted({*before, *now, *(name for name, own in self._models.items() if own.versions)}):
                self._follow(name, before.get(name, _NOTHING), now.get(name, _NOTHING))

    def _tell_misplaced(self, look: StoreLook) -> None:
        """Once, when two looks in a row have seen it: it may be on its way to its place."""
        self._misplaced = {told: self._misplaced.get(told, 0) + 1 for told in look.all_misplaced()}
        for told, looks in self._misplaced.items():
            if looks == 2:
                _log.warning("%s", told)

    def _follow(self, name: str, before: ModelLook | None, now: ModelLook) -> None:
        """Begin to do what one model's folder asks for, unless what it asked for before is still being done."""
        if now.trouble:
            self._set_trouble(name, now.trouble)
            return
        own = self._models[name]
        if own.following is None or own.following.done():
            found = settle(None if before is None else before.versions, now.versions)
            own.following = self._tasks.spawn(self._obey(name, found, now.behind(before)))

    def _set_trouble(self, name: str, trouble: str) -> None:
        """Its versions cannot be seen. What is loaded goes on serving."""
        if self._catalog.reason(name, WHOLE_MODEL) != trouble:
            _log.error("refused %s: %s", name, trouble)
            self._catalog.set_refused(name, WHOLE_MODEL, trouble)

    async def load(self, name: str, override: Override = _NO_OVERRIDE) -> None:
        """Load a model, or load it again if it changed; return when it serves. Goes on if the caller leaves.

        Raises Unavailable in another mode, NotFound, or InvalidRequest when the name is none or a version was refused.
        """
        self.check_explicit()
        _check_asked(name)
        await self._see_through(self._load_asked(name, override))

    async def _load_asked(self, name: str, override: Override) -> None:
        look = await self._watch.look_at(name)
        if look.trouble:
            self._set_trouble(name, look.trouble)
            raise InvalidRequest(f"load failed for model '{name}': {look.trouble}")
        seen = look.versions
        if not seen:
            why = "; ".join(look.misplaced) or "there is no version of it in the store"
            raise NotFound(f"failed to load '{name}', failed to poll from model repository; {why}")
        found = settle(None, seen)
        policy = self._policy(name, look, override)
        # Before anything changes: what serves goes on. A request for two versions is not met by one.
        if unmet := _unmet(policy, found, needs_all=override.versions is not None):
            raise InvalidRequest(f"load failed for model '{name}': {unmet}{self._still(name)}")
        model = self._models[name]
        async with model.lock:
            self._catalog.forget_refusal(name, WHOLE_MODEL)
            # Asked for by a person: what was refused before deserves another try.
            model.try_again(also_sound=True)
            if override != model.override:
                for version, own in model.versions.items():
                    if own.loaded is not None:
                        model.versions[version] = VersionRecord(loaded=("before the override",))
            model.override = override
            await self._converge(name, policy.judged(found), policy)
            refused = [version for version, own in model.versions.items() if own.refused is not None]
        if refused:
            reason = f"version {max(refused)} is at UNAVAILABLE state: {self._catalog.reason(name, max(refused))}"
            raise InvalidRequest(f"load failed for model '{name}': {reason}{self._still(name)}")

    async def unload(self, name: str) -> None:
        """Unload every version of a model; return when its last request is answered and its memory is free.

        A model that is not loaded is no error. Raises Unavailable in another mode, InvalidRequest for what is no name.
        """
        self.check_explicit()
        _check_asked(name)
        if name in self._models:  # else it was never loaded
            await self._see_through(self._unload_asked(name, self._models[name]))

    async def _unload_asked(self, name: str, model: _Model) -> None:
        async with model.lock:
            versions = [version for version, own in model.versions.items() if own.loaded is not None]
            model.versions.clear()
            model.override = _NO_OVERRIDE
            leaving = [self._lifecycle.take_out_of_service(name, version) for version in versions]
            for version in versions:
                self._catalog.set_refused(name, version, "unloaded")
        await asyncio.gather(*(task for task in leaving if task is not None))

    async def _see_through(self, work: Coroutine[object, object, None]) -> None:
        """Work that has begun is finished, whether the client waits or leaves."""
        task = self._tasks.spawn(work)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(task)

    async def names_in_store(self) -> list[str]:
        """In mode explicit, every name that could be loaded; else nothing, since all of it is listed anyway.

        Raises Unavailable where the store cannot be read.
        """
        if self._options.mode != "explicit":
            return []
        try:
            return await self._watch.names()
        except OSError as error:
            raise _unreadable(error) from error

    async def versions_in_store(self) -> dict[str, list[int]]:
        """All that the store holds now, served or not, by name and ascending. Raises Unavailable."""
        try:
            async with self._looking:  # one look at a time, however many ask
                found = await self._watch.look()
        except OSError as error:
            raise _unreadable(error) from error
        return {name: sorted(look.versions) for name, look in sorted(found.models.items())}

    def check_explicit(self) -> None:
        """Raises Unavailable unless models are loaded on request; the words are Triton's."""
        if self._options.mode != "explicit":
            error = Unavailable(
                "explicit model load / unload is not allowed if polling is enabled; "
                "start the server with --model-control explicit"
            )
            error.retry_after_s = None
            raise error

    async def _obey(self, name: str, found: dict[int, VersionFiles], look: ModelLook) -> None:
        model = self._models[name]
        policy = self._policy(name, look, model.override)
        unmet = _unmet(policy, found)
        try:
            async with model.lock:
                model.try_again()
                await self._converge(name, policy.judged(found), policy)
                if unmet:
                    self._set_trouble(name, unmet)
        except Exception:  # a bug, which must not end the watch over the other models
            _log.exception("following %s failed; this is a bug", name)
        if self._options.mode == "none" and any(own.may_come for own in model.versions.values()):
            self._tasks.spawn(self._look_later(name))
        if self._options.mode != "poll":
            return
        for version in [v for v, own in model.versions.items() if v not in found and own.loaded is None]:
            del model.versions[version]
        self._catalog.drop_absent(name, {*found, WHOLE_MODEL} if unmet else found)
        if not model.versions:
            model.policy = None

    async def _look_later(self, name: str) -> None:
        """Without polling, a version that could not be fetched is tried again."""
        await asyncio.sleep(15.0)
        if not self._is_leaving():
            await self._look_again(name)

    def _policy(self, name: str, look: ModelLook, override: Override) -> _Wanted:
        """Which versions are wanted, and who says so: the request to load, the model's configuration, the operator."""
        if override.versions is not None:
            return _Wanted(override.versions, "the request")
        # A configuration is not signed, so it decides nothing where signatures are required.
        if self._load_options.signed is not None:
            return _Wanted(self._options.versions, "--version-policy")
        if look.unknown_policy:
            serving = tuple(served.key.version for served in self._catalog.versions(name))
            return _Wanted(serving or self._options.versions, CONFIG, look.unknown_policy)
        if look.policy is not None:
            return _Wanted(look.policy, f"version_policy in {CONFIG}")
        return _Wanted(self._options.versions, "--version-policy")

    async def _converge(self, name: str, found: dict[int, VersionFiles], wanted: _Wanted) -> None:
        """While the model's lock is held."""
        model = self._models[name]
        model.policy = wanted.policy
        for version, one in found.items():
            known = model.versions.get(version)
            # Where the files are again those that serve, nothing is wrong with them any more.
            if known is not None and known.refused is not None and known.loaded == one.stamp:
                model.versions[version] = known.forgiven()
                self._catalog.forget_refusal(name, version)
        while (step := next_step(found, model.versions, wanted.policy)) is not None:
            match step:
                case Load(version):
                    await self._load(name, version, found[version])
                case Unload(version):
                    self._lifecycle.take_out_of_service(name, version)
                    del model.versions[version]
                    if version in found:
                        self._catalog.set_refused(name, version, "unloaded")

    async def _load(self, name: str, version: int, found: VersionFiles) -> None:
        model = self._models[name]
        known = model.versions.get(version, VersionRecord())
        told = self._catalog.reason(name, version)
        if known.loaded is None:
            self._catalog.set_loading(name, version)
        options = self._load_by_model.get(name, self._load_options)
        options = replace(options, configured_batch=model.override.max_batch_size)
        try:
            if found.trouble:
                raise BundleError(found.trouble)
            loaded = await self._loads.load(self._store.version(name, version), options)
        except Exception as error:  # an unforeseen file, or a bug: the other versions are not to blame
            is_foreseen = isinstance(error, JobError)
            reason = str(error) if is_foreseen else f"{type(error).__name__}: {error}"
            # What a store does not give is tried again at every look, and files may change while they are copied.
            is_unfetched = isinstance(error, NotFetched)
            if reason != told or not (is_unfetched or known.loaded is not None):
                _log.error("refused %s version %d: %s", name, version, reason, exc_info=None if is_foreseen else error)
            self._metrics.load_ended("refused")
            self._catalog.set_refused(name, version, reason)
            model.versions[version] = VersionRecord(known.loaded, found.stamp, is_unfetched)
            return
        self._metrics.load_ended("loaded")
        self._lifecycle.put_into_service(loaded, options)
        model.versions[version] = VersionRecord(loaded=found.stamp)
        for proved in loaded.engines:
            info = proved.engine.info
            _log.info(
                "loaded %s version %d on %s %s on %s in %.2f s (%s)",
                *(name, version, info.engine, info.precision, info.device, loaded.load_s, proved.reason),
            )
        for objection in loaded.objections:
            _log.warning("%s version %d was published although: %s", name, version, objection)
        for reason in loaded.skipped:
            if reason not in self._said_of_all:
                _log.debug("passed over for %s version %d: %s", name, version, reason)

    def _load_came_late(self, stored: StoredVersion) -> None:
        """Its disk answers again, so a version that was refused for that deserves another look."""
        versions = self._models[stored.name].versions
        if stored.version in versions:
            versions[stored.version] = versions[stored.version].forgiven()
        self._answers_again(stored.name)

    def _answers_again(self, name: str) -> None:
        """What was to be loaded at the start is loaded now. Polling looks by itself; explicit mode loads on request."""
        if self._options.mode == "none" and not self._is_leaving():
            self._tasks.spawn(self._look_again(name))

    async def _look_again(self, name: str) -> None:
        look = await self._watch.look_at(name)
        if not look.trouble:
            self._catalog.forget_refusal(name, WHOLE_MODEL)
            await self._obey(name, settle(None, look.versions), look)

    def _still(self, name: str) -> str:
        still = [str(served.key.version) for served in self._catalog.versions(name)]
        return f"; version {', '.join(still)} serves" if still else ""


def _unmet(wanted: _Wanted, found: dict[int, VersionFiles], *, needs_all: bool = False) -> str:
    """Which versions are wanted and not there, where none of them is, or not all; "" where enough are."""
    numbers = wanted.policy if isinstance(wanted.policy, tuple) else ()
    absent = [number for number in numbers if number not in found]
    if not found or not absent or (len(absent) < len(numbers) and not needs_all):
        return ""
    named, has = (", ".join(map(str, versions)) for versions in (absent, sorted(found)))
    return f"{wanted.said_by} wants version {named}, and the store has {has}; name one of these, or put it there"


def _unreadable(error: OSError) -> Unavailable:
    return Unavailable(f"the store cannot be read ({error}); see whether its disk is there")


def _check_asked(name: str) -> None:
    """Raises InvalidRequest for what cannot be a model's name."""
    try:
        check_name(name)
    except UsageError as error:
        raise InvalidRequest(str(error)) from error
