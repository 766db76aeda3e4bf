"""What was seen in a campaign, as it comes in from many threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.campaign.checks import Readiness, Window, recovery_s
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

    def recoveries_s(self) -> dict[str, list[float]]:
        """By kind of trouble that may be felt, how long after it everything was answered again, where that was seen."""
        found: dict[str, list[float]] = {}
        for run in self.runs:
            looks = [one for one in self.looks if run.began_s <= one.began_s <= run.ended_s]
            for window in run.windows:
                took_s = recovery_s(window, looks) if window.excuses else None
                if took_s is not None:
                    found.setdefault(window.kind, []).append(took_s)
        return found

    @property
    def breaches(self) -> list[str]:
        """All of them, each with its period."""
        return [
            f"period {run.period.number} ({run.period.edges} edges, {run.period.kind}): {line}"
            for run in self.runs
            for line in run.breaches
        ]
