"""What is served, what is loading, and what was refused and why.

Knows models by name and version. Knows nothing of requests, and loads nothing itself.
"""

from __future__ import annotations

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


@dataclass(slots=True, eq=False)
class Served:
    """One version that has been loaded. `lane` is None while its engine is being replaced."""

    key: ModelKey
    loaded: LoadedModel
    lane: Lane | None = None
    canary_passed: bool = True
    last_success_ns: int = 0
    statistics: ModelStatistics = field(default_factory=ModelStatistics)

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
    reason: str


class Catalog:
    """Versions by name."""

    def __init__(self) -> None:
        self._served: dict[str, dict[int, Served]] = {}
        self._others: dict[ModelKey, Listing] = {}

    def set_loading(self, key: ModelKey) -> None:
        self._others[key] = Listing(*key, ModelState.LOADING, "")

    def set_refused(self, key: ModelKey, reason: str) -> None:
        self._others[key] = Listing(*key, ModelState.UNAVAILABLE, reason)

    def add(self, served: Served) -> None:
        self._others.pop(served.key, None)
        self._served.setdefault(served.key.model, {})[served.key.version] = served

    def served(self) -> list[Served]:
        """Everything that is loaded, by name and version."""
        return [versions[v] for _, versions in sorted(self._served.items()) for v in sorted(versions)]

    def versions(self, name: str) -> list[Served]:
        """The loaded versions of a model, ascending."""
        versions = self._served.get(name, {})
        return [versions[v] for v in sorted(versions)]

    def index(self) -> list[Listing]:
        """Every version that is known, loaded or not."""
        loaded = [
            Listing(*served.key, ModelState.READY if served.ready else ModelState.UNAVAILABLE, "")
            for served in self.served()
        ]
        return sorted([*loaded, *self._others.values()], key=lambda listing: (listing.name, listing.version))

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
