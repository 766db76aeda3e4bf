"""What is served, what is loading or leaving, and what was refused and why.

Knows models by name and version. Counts the requests that still need a version; loads nothing itself.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from convoy.app.lifecycle.version_plan import VersionRecord
from convoy.app.loading.load import LoadedModel, LoadOptions
from convoy.app.loading.proving import ProvedEngine
from convoy.app.scheduling.queues import Lane
from convoy.app.scheduling.request import ModelKey
from convoy.app.telemetry.outcomes import Refusal
from convoy.app.telemetry.statistics import ModelStatistics
from convoy.models.errors import NotFound, NotReady, Unavailable, UnknownModel, UnknownVersion
from convoy.models.plans import PlanBuild
from convoy.models.spec import ModelSpec
from convoy.models.version_policy import Policy


class ModelState(Enum):
    """The state of a version, in the protocol's terms."""

    LOADING = "LOADING"
    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"
    UNLOADING = "UNLOADING"


# In place of a version: the model itself, if its versions cannot be read or are not the wanted ones.
WHOLE_MODEL = 0

# How many names an error message lists.
_MOST_NAMED = 10


@dataclass(frozen=True, slots=True)
class Listing:
    """One line of the repository's index; `version` may be WHOLE_MODEL."""

    name: str
    version: int
    state: ModelState
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Override:
    """What a load request overrides in the configuration; None means nothing."""

    max_batch_size: int | None = None
    versions: Policy | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class ServedLane(Lane):
    """One engine that works for a version, and the times of its last success and failure.

    `canary_began_ns` is set while its canary runs. `closing` ends when it is closed.
    """

    proved: ProvedEngine
    last_success_ns: int
    last_failure_ns: int = 0
    canary_began_ns: int | None = None
    closing: asyncio.Task[None] | None = None


@dataclass(slots=True, eq=False)
class Served:
    """One version that has been loaded, with `options`.

    `lanes` are its live engines: one per device, a second one while another takes over, none while the only one is
    being replaced. `loaded.engines` are those that it has or will have again. `spec` is that of `loaded`, with the
    operator's priorities. `count_all` is called before its statistics are read, and counts everything that has
    happened. `recovers` means that a device was lost, and with it an engine that is being replaced. `withdrawn` means
    that new requests do not find it; those that have found it are still answered.
    """

    key: ModelKey
    loaded: LoadedModel
    spec: ModelSpec
    options: LoadOptions
    count_all: Callable[[], None]
    lanes: list[ServedLane] = field(default_factory=list)
    recovers: bool = False
    plan_build: PlanBuild | None = None
    withdrawn: bool = False
    users: int = 0
    _statistics: ModelStatistics = field(default_factory=ModelStatistics)
    _left: asyncio.Event = field(default_factory=asyncio.Event)

    def enter(self) -> None:
        """Hold this version for a request until `leave`."""
        self.users += 1

    def leave(self) -> None:
        self.users -= 1
        if not self.users:
            self._left.set()

    async def until_unused(self) -> None:
        """Return when no request needs it any more."""
        while self.users:
            self._left.clear()
            await self._left.wait()

    @property
    def statistics(self) -> ModelStatistics:
        """The statistics, with everything that has happened until now."""
        self.count_all()
        return self._statistics

    def go_on_from(self, before: Served) -> None:
        """Continue the counts of a predecessor: readers take differences, so statistics must never restart."""
        self._statistics = before.statistics

    @property
    def text_only(self) -> bool:
        """Whether strings must be UTF-8."""
        return self.first.engine.text_only

    @property
    def engines(self) -> int:
        """How many engines work for it or are leaving."""
        return len(self.lanes)

    @property
    def first(self) -> ProvedEngine:
        """The engine to name if only one can be named."""
        return self.loaded.engines[0]

    @property
    def at_work(self) -> list[ServedLane]:
        """The lanes that take work; one that hangs or failed its canary is not among them."""
        return [lane for lane in self.lanes if not lane.stopping]

    @property
    def takes_requests(self) -> bool:
        return bool(self.at_work)

    @property
    def ready(self) -> bool:
        """The same, unless a device was lost: the other lanes answer, but requests should go elsewhere."""
        return self.takes_requests and not self.recovers

    @property
    def state(self) -> ModelState:
        if self.withdrawn:
            return ModelState.UNLOADING
        return ModelState.READY if self.ready else ModelState.UNAVAILABLE

    @property
    def listed(self) -> list[ProvedEngine]:
        """The engines that new requests find."""
        return [] if self.withdrawn else [lane.proved for lane in self.at_work]


class Catalog:
    """Versions by name."""

    def __init__(self) -> None:
        self.is_complete = False  # set after the initial load: unknown models are then not found
        self.records: defaultdict[str, dict[int, VersionRecord]] = defaultdict(dict)  # kept by model control
        self._served: defaultdict[str, dict[int, Served]] = defaultdict(dict)
        self._live: dict[ModelKey, Served] = {}

    def reason(self, name: str, version: int) -> str:
        """Why it was refused on the last try; empty if it was not."""
        return self.records.get(name, {}).get(version, VersionRecord()).reason

    def add(self, served: Served) -> Served | None:
        """Let new requests find it. Withdraws and returns what was served under its name and version."""
        name, version = served.key.model, served.key.version
        before = self.withdraw(name, version)
        self._live[served.key] = served
        self._served[name][version] = served
        return before

    def withdraw(self, name: str, version: int) -> Served | None:
        """Hide it from new requests; None if it is not served."""
        served = self._served[name].pop(version, None)
        if served is not None:
            served.withdrawn = True
        return served

    def forget(self, served: Served) -> None:
        """Forget a withdrawn version after its last request."""
        del self._live[served.key]

    def live(self, key: ModelKey) -> Served:
        """The owner of a queue, withdrawn or not. Raises KeyError."""
        return self._live[key]

    def served(self) -> list[Served]:
        """Everything that is loaded, by name and version."""
        return [served for name in sorted(self._served) for served in self.versions(name)]

    def versions(self, name: str) -> list[Served]:
        """The loaded versions of a model, ascending."""
        return [served for _, served in sorted(self._served.get(name, {}).items())]

    def all_live(self) -> list[Served]:
        """Everything that has an engine, withdrawn or not."""
        return list(self._live.values())

    def index(self) -> list[Listing]:
        """Every known version, loaded or not, by name and version."""
        listings = {(one.name, one.version): one for one in self._unserved(self.records)}
        # A serving version comes last, so that it is listed rather than a leaving one of the same number.
        for served in sorted(self._live.values(), key=lambda one: not one.withdrawn):
            place = served.key.model, served.key.version
            # What is served may have been refused when it was loaded again.
            listings[place] = Listing(*place, served.state, "" if served.withdrawn else self.reason(*place))
        return [listings[place] for place in sorted(listings)]

    def refused(self) -> list[Listing]:
        """The versions that could not be loaded, and why."""
        return [one for one in self._unserved(self.records) if one.state is ModelState.UNAVAILABLE]

    def _unserved(self, names: Iterable[str]) -> Iterator[Listing]:
        """The versions that are loading for the first time, or were refused on the last try."""
        for name in names:
            for version, record in self.records.get(name, {}).items():
                if record.is_loading:
                    yield Listing(name, version, ModelState.LOADING)
                elif record.reason:
                    yield Listing(name, version, ModelState.UNAVAILABLE, record.reason)

    def find(self, name: str, version: int | None) -> Served:
        """The requested version, or the highest loaded one. Raises NotFound or Unavailable."""
        versions = self._served.get(name, {})
        served = versions.get(max(versions) if version is None else version) if versions else None
        if served is None:
            raise self._not_found(name, version, versions)
        return served

    def _not_found(self, name: str, version: int | None, served: Container[int]) -> NotFound | Unavailable:
        # These messages begin with Triton's wording, which clients compare.
        known = list(self._unserved([name]))
        asked = f"'{name}'" if version is None else f"'{name}' version {version}"
        for listing in known:
            if listing.state is ModelState.LOADING and version in (None, listing.version):
                sentence = f"Request for unknown model: {asked} is not at ready state; it is loading"
                return NotReady(f"{sentence}; send the request again later", reason=Refusal.NOT_READY)
        if known and not served and version is None:
            return UnknownModel(f"Request for unknown model: '{name}' has no available versions ({known[-1].reason})")
        unknown = f"Request for unknown model: {asked} is not found"
        if not self.is_complete:
            return NotReady(f"{unknown} yet: models are being loaded; retry later", reason=Refusal.NOT_READY)
        kind = UnknownVersion if served else UnknownModel
        return kind(f"{unknown}; {self._available(name)}")

    def _available(self, name: str) -> str:
        """The loaded versions of a model, or the loaded models, as text."""
        own = [f"{name}/{version}" for version in sorted(self._served.get(name, {}))]
        found = own or sorted(model for model, versions in self._served.items() if versions)
        more = [f"and {len(found) - _MOST_NAMED} more"] if len(found) > _MOST_NAMED else []
        return f"available: {', '.join([*found[:_MOST_NAMED], *more])}" if found else "no model is loaded"
