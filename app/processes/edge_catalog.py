"""What an edge knows of the models: what the core has told it. Knows no engine."""

from __future__ import annotations

from collections.abc import Callable

from convoy.app.processes.messages import CatalogUpdate, ServedVersion
from convoy.app.scheduling.request import ModelKey
from convoy.app.submission.listing import Listing, choose
from convoy.models.spec import ModelSpec


class EdgeServed:
    """One version that is served, and how many requests of this edge need it."""

    def __init__(self, version: ServedVersion, on_unused: Callable[[ModelKey], None]) -> None:
        self.key: ModelKey = version.key
        self.spec: ModelSpec = version.spec
        self.text_only = version.text_only
        self.engines = version.engines
        self._on_unused = on_unused
        self._users = 0
        self._is_withdrawn = False

    def enter(self) -> None:
        """A request has found this version, and holds it until `leave`."""
        self._users += 1

    @property
    def users(self) -> int:
        return self._users

    def leave(self) -> None:
        self._users -= 1
        self._settle()

    def withdraw(self) -> None:
        """No new request finds it; the last that has found it says so."""
        self._is_withdrawn = True
        self._settle()

    def _settle(self) -> None:
        if self._is_withdrawn and not self._users:
            self._on_unused(self.key)


class EdgeCatalog:
    """Versions by name. `on_unused` is told once of a version that was withdrawn and that no request needs."""

    def __init__(self, on_unused: Callable[[ModelKey], None]) -> None:
        self.edition = 0
        self._on_unused = on_unused
        self._served: dict[str, dict[int, EdgeServed]] = {}
        self._live: dict[ModelKey, EdgeServed] = {}
        self._others: tuple[Listing, ...] = ()
        self._is_complete = False

    def update(self, update: CatalogUpdate) -> None:
        """Let requests find what is on the update, and nothing else."""
        self.edition += 1
        versions = {version.key: version for version in update.served}
        withdrawn = [self._live.pop(key) for key in list(self._live) if key not in versions]
        new = [version for key, version in versions.items() if key not in self._live]
        for key, served in self._live.items():
            served.engines, served.spec = versions[key].engines, versions[key].spec
        self._live |= {version.key: EdgeServed(version, self._on_unused) for version in new}
        self._served = {}
        for key, served in self._live.items():
            self._served.setdefault(key.model, {})[key.version] = served
        self._others, self._is_complete = update.others, update.is_complete
        for served in withdrawn:
            served.withdraw()

    def open_calls(self) -> dict[ModelKey, int]:
        """How many requests hold each version; those that none holds are left out."""
        return {key: served.users for key, served in self._live.items() if served.users}

    def forget(self) -> None:
        """The core that spoke has gone: another one's versions are others, whatever their names."""
        self.edition += 1
        self._live, self._served = {}, {}

    def find(self, name: str, version: int | None) -> EdgeServed:
        """The version asked for, or the highest that is loaded. Raises NotFound or Unavailable."""
        return choose(self._served.get(name, {}), self._others, name, version, is_complete=self._is_complete)
