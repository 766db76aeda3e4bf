"""What the routes that do not infer know of a core. Only a core in this process is one.

Knows no engine and no store: what is served is told by its statistics and its listings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from convoy.app.scheduling.request import ModelKey
from convoy.app.scheduling.scheduler import Scheduler
from convoy.app.submission.inference import Finder, InferenceCore, ServedLike
from convoy.app.submission.listing import Listing, Override
from convoy.app.telemetry.gpu_metrics import GpuWatch
from convoy.app.telemetry.metrics import Metrics
from convoy.app.telemetry.observed import Observed, ObservedEngine
from convoy.models.plans import PlanBuild
from convoy.models.version_policy import Policy


class ManagedVersion(Observed, ServedLike, Protocol):
    """One version that is served, as it is described."""

    @property
    def ready(self) -> bool:
        """Whether it answers on every device that it is loaded for."""

    @property
    def first(self) -> ObservedEngine:
        """The engine that is spoken of where only one can be."""

    @property
    def plan_build(self) -> PlanBuild | None:
        """How far the plan is that will serve better; None where none is being built, or ever was."""


class ManagedCatalog(Finder[ManagedVersion], Protocol):
    """Versions by name: those that are served, and what is said of the others."""

    def served(self) -> Sequence[ManagedVersion]:
        """Everything that is loaded, by name and version."""

    def versions(self, name: str) -> Sequence[ManagedVersion]:
        """The loaded versions of a model, ascending."""

    def index(self) -> list[Listing]:
        """Every version that is known, loaded or not, by name and version."""

    def refused(self) -> list[Listing]:
        """The versions that could not be loaded, and why."""

    async def until_known(self) -> None:
        """Return when requests find what is here and nothing else, wherever they come in."""


class ManagedStore(Protocol):
    """Loads and unloads on request."""

    @property
    def mode(self) -> str:
        """When models are loaded: `none`, `explicit` or `poll`."""

    def check_explicit(self) -> None:
        """Raises Unavailable unless models are loaded on request."""

    def policy_of(self, name: str) -> Policy:
        """Which versions of a model were wanted when it was last looked at."""

    async def load(self, name: str, override: Override) -> None:
        """Return when it serves. Raises Unavailable, NotFound or InvalidRequest."""

    async def unload(self, name: str) -> None:
        """Return when its last request is answered. Raises Unavailable or InvalidRequest."""

    async def names_in_store(self) -> list[str]:
        """What could be loaded and is not listed anyway. Raises Unavailable."""

    async def versions_in_store(self) -> dict[str, list[int]]:
        """All that the store holds, served or not, by name; none of a folder that is unreadable. Raises Unavailable."""


class ManagedCore(InferenceCore, Protocol):
    """A core that is begun, described, told what to load, and ended."""

    scheduler: Scheduler
    metrics: Metrics
    gpus: GpuWatch
    started_s: float  # on the monotonic clock
    listeners_opening: int  # ports that will take requests, but do not yet

    @property
    def catalog(self) -> ManagedCatalog: ...

    @property
    def control(self) -> ManagedStore: ...

    @property
    def inflight_bytes(self) -> int:
        """Bytes of memory that requests hold."""

    @property
    def all_open_calls(self) -> int:
        """Calls that are owed an answer, in this process and in those at the edge."""

    def open_calls_of(self, key: ModelKey) -> int:
        """Those of them that are for a version that is served."""

    @property
    def all_waiting_to_decode(self) -> int:
        """What no decoder has begun, in all of them."""

    @property
    def ready(self) -> bool:
        """Whether requests are answered."""

    def max_waiting(self, key: ModelKey) -> int:
        """So many samples may wait for a version that is served."""

    def not_ready_reason(self) -> str: ...

    async def start(self) -> None:
        """Begin to load, and return at once."""

    async def stop(self) -> None:
        """Give the engines' memory back. What still runs is abandoned."""
