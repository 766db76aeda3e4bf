"""What telemetry knows of a version that is served. Knows nothing of how it came into service."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import add
from typing import Protocol

from convoy.app.engines.base import EngineInfo, WarmShapes
from convoy.app.scheduling.request import ModelKey
from convoy.app.telemetry.statistics import ModelStatistics


class ObservedEngine(Protocol):
    """An engine of a version. `reason` says why it serves, `platform` what it is in the protocol's words."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def shapes(self) -> WarmShapes | None: ...

    @property
    def reason(self) -> str: ...

    @property
    def platform(self) -> str: ...


class ObservedLoad(Protocol):
    """What loading a version brought; the fields are those of `LoadedModel`."""

    @property
    def engines(self) -> Sequence[ObservedEngine]: ...

    @property
    def skipped(self) -> tuple[str, ...]: ...

    @property
    def objections(self) -> tuple[str, ...]: ...

    @property
    def load_s(self) -> float: ...


class Observed(Protocol):
    """One version, from its first request to its last."""

    key: ModelKey

    @property
    def statistics(self) -> ModelStatistics:
        """With all that has happened until now."""

    @property
    def loaded(self) -> ObservedLoad: ...

    @property
    def listed(self) -> Iterable[ObservedEngine]:
        """The engines that new requests find."""


def shapes_of(engines: Iterable[ObservedEngine]) -> WarmShapes | None:
    """What these hold for free sizes together; None where the sizes are fixed."""
    held = [shapes for engine in engines if (shapes := engine.shapes) is not None]
    return reduce(add, held) if held else None
