"""What is served, what is loading or leaving, and what was refused and why.

Knows models by name and version. Knows of requests only how many still need a version, and loads nothing
itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container
from dataclasses import dataclass, field
from enum import Enum

from app.loading import LoadedModel
from app.scheduling.queues import Lane
from app.scheduling.request import ModelKey
from app.statistics import ModelStatistics
from models.errors import NotFound, Unavailable
from models.spec import ModelSpec


class ModelState(Enum):
    """The protocol's words for how far a version is."""

    LOADING = "LOADING"
    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"
    UNLOADING = "UNLOADING"


@dataclass(slots=True, eq=False)
class Served:
    """One version that has been loaded. `lane` is None while its engine is being replaced.

    `withdrawn`: new requests do not find it any more; those that have found it are still answered.
    """

    key: ModelKey
    loaded: LoadedModel
    lane: Lane | None = None
    canary_passed: bool = True
    last_success_ns: int = 0
    last_failure_ns: int = 0
    statistics: ModelStatistics = field(default_factory=ModelStatistics)
    withdrawn: bool = False
    users: int = 0
    _left: asyncio.Event = field(default_factory=asyncio.Event)

    def enter(self) -> None:
        """A request has found this version, and holds it until `leave`."""
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
    def spec(self) -> ModelSpec:
        return self.loaded.spec

    @property
    def ready(self) -> bool:
        return self.lane is not None and not self.lane.stopping and self.canary_passed


@dataclass(frozen=True, slots=True)
class Listing:
    """One line of the repository's index."""

    name: str
    version: int
    state: ModelState
    reason: str = ""


class Catalog:
    """Versions by name."""

    def __init__(self) -> None:
        self._served: dict[str, dict[int, Served]] = {}
        self._live: dict[ModelKey, Served] = {}
        self._others: dict[tuple[str, int], Listing] = {}

    def set_loading(self, name: str, version: int) -> None:
        self._others[name, version] = Listing(name, version, ModelState.LOADING)

    def set_refused(self, name: str, version: int, reason: str) -> None:
        self._others[name, version] = Listing(name, version, ModelState.UNAVAILABLE, reason)

    def drop_absent(self, name: str, on_disk: Container[int]) -> None:
        """Say nothing more of versions that have left the store."""
        for place in [(one, version) for one, version in self._others if one == name and version not in on_disk]:
            del self._others[place]

    def add(self, served: Served) -> Served | None:
        """Let new requests find it. What was served under its name and version is withdrawn and returned."""
        name, version = served.key.model, served.key.version
        before = self.withdraw(name, version)
        self._others.pop((name, version), None)
        self._live[served.key] = served
        self._served.setdefault(name, {})[version] = served
        return before

    def withdraw(self, name: str, version: int) -> Served | None:
        """Let no new request find it; None where it is not served."""
        served = self._served.get(name, {}).pop(version, None)
        if served is not None:
            served.withdrawn = True
            if not self._served[name]:
                del self._served[name]
        return served

    def forget(self, served: Served) -> None:
        """It was withdrawn and has answered its last request."""
        del self._live[served.key]

    def live(self, key: ModelKey) -> Served:
        """The owner of a queue, withdrawn or not. Raises KeyError."""
        return self._live[key]

    def served(self) -> list[Served]:
        """Everything that is loaded, by name and version."""
        return [versions[v] for _, versions in sorted(self._served.items()) for v in sorted(versions)]

    def versions(self, name: str) -> list[Served]:
        """The loaded versions of a model, ascending."""
        versions = self._served.get(name, {})
        return [versions[v] for v in sorted(versions)]

    def all_live(self) -> list[Served]:
        """Everything that has an engine, withdrawn or not."""
        return list(self._live.values())

    def index(self) -> list[Listing]:
        """Every version that is known, loaded or not, by name and version."""
        listings = dict(self._others)
        listings |= {(s.key.model, s.key.version): _leaving(s) for s in self._live.values() if s.withdrawn}
        for served in self.served():
            place = served.key.model, served.key.version
            # What is served may have been refused when it was loaded again.
            reason = self._others[place].reason if place in self._others else ""
            state = ModelState.READY if served.ready else ModelState.UNAVAILABLE
            listings[place] = Listing(*place, state, reason)
        return [listings[place] for place in sorted(listings)]

    def refused(self) -> list[Listing]:
        """The versions that could not be loaded, and why."""
        return [one for one in self._others.values() if one.state is ModelState.UNAVAILABLE]

    def find(self, name: str, version: int | None) -> Served:
        """The version asked for, or the highest that is loaded. Raises NotFound or Unavailable."""
        versions = self._served.get(name)
        if versions:
            found = versions.get(version) if version is not None else versions[max(versions)]
            if found is not None:
                return found
        # The beginnings of these sentences are Triton's: clients compare them.
        known = [listing for listing in self._others.values() if listing.name == name]
        asked = f"'{name}'" if version is None else f"'{name}' version {version}"
        for listing in known:
            if listing.state is ModelState.LOADING and version in (None, listing.version):
                raise Unavailable(f"Request for unknown model: {asked} is not at ready state; it is loading")
        if known and not versions and version is None:
            raise NotFound(f"Request for unknown model: '{name}' has no available versions ({known[-1].reason})")
        raise NotFound(
            f"Request for unknown model: {asked} is not found; POST /v2/repository/index lists what is served"
        )


def _leaving(served: Served) -> Listing:
    return Listing(served.key.model, served.key.version, ModelState.UNLOADING)
