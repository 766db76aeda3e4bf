"""What was seen in a campaign, as it comes in from many threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.campaign.checks import Readiness, Window
from tests.campaign.endings import Ending
from tests.campaign.field import Calls
from tests.campaign.plan import Period, Plan


@dataclass(frozen=True, slots=True)
class Sample:
    """The server at one moment: what its processes hold, and what it says that it holds."""

    at_s: float
    own_bytes: int
    processes: int
    descriptors: int
    threads: int
    held: tuple[int, int, int] | None  # samples that wait, requests unfinished, bytes


@dataclass(frozen=True, slots=True)
class PeriodRun:
    """A period as it went; `breaches` are lines for people."""

    period: Period
    began_s: float
    ended_s: float
    windows: tuple[Window, ...]
    seen: Calls
    counted: Calls
    breaches: tuple[str, ...]


@dataclass
class Records:
    """Everything. Only ever appended to, so that a reader in another thread sees a beginning of it."""

    plan: Plan
    replay: str
    began_ns: int = field(default_factory=time.monotonic_ns)
    endings: list[Ending] = field(default_factory=list)
    looks: list[Readiness] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    runs: list[PeriodRun] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)  # names of the invariants, once for each time
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def now_s(self) -> float:
        return (time.monotonic_ns() - self.began_ns) / 1e9

    def add(self, endings: Sequence[Ending]) -> None:
        with self._lock:
            self.endings.extend(endings)

    @property
    def breaches(self) -> list[str]:
        """All of them, each with its period."""
        return [
            f"period {run.period.number} ({run.period.edges} edges, {run.period.kind}): {line}"
            for run in self.runs
            for line in run.breaches
        ]
