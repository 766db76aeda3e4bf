"""One run of one rule on one device: the loop that moves virtual time, and what became of every request."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Protocol

from convoy.loadtest.simulation.workload import VirtualDevice, Workload

NEVER_NS = 1 << 62


class ModelQueue:
    """The requests of one model: those up to `head` have left, those from there to `tail` wait.

    All want their answer equally soon after they came, so the oldest is also the most urgent.
    """

    __slots__ = ("ended_ns", "head", "tail", "times_ns", "within_ns")

    def __init__(self, times_ns: list[int], within_ns: int) -> None:
        self.times_ns, self.within_ns = times_ns, within_ns
        self.head = self.tail = 0
        self.ended_ns = [0] * len(times_ns)

    def see(self, now_ns: int) -> None:
        """Let everything that has come by now wait."""
        self.tail = bisect_right(self.times_ns, now_ns, self.tail)

    @property
    def waiting(self) -> int:
        return self.tail - self.head

    @property
    def first_ns(self) -> int:
        """When the oldest that waits came."""
        return self.times_ns[self.head]

    @property
    def due_ns(self) -> int:
        """When the oldest that waits wants its answer."""
        return self.times_ns[self.head] + self.within_ns

    @property
    def next_ns(self) -> int:
        """When the next one comes."""
        return self.times_ns[self.tail] if self.tail < len(self.times_ns) else NEVER_NS


@dataclass(frozen=True, slots=True)
class Run:
    """The oldest `count` of the line run as one batch, now."""

    line: ModelQueue
    count: int


@dataclass(frozen=True, slots=True)
class Sleep:
    """Nothing runs before this time, unless somebody comes."""

    until_ns: int = NEVER_NS


class Rule(Protocol):
    """Decides for a free device. May give heads up by moving `head` on."""

    def choose(self, lines: list[ModelQueue], now_ns: int) -> Run | Sleep: ...

    def ran(self, line: ModelQueue, count: int, ended_ns: int) -> None:
        """A batch of the oldest `count` has ended; they are still at the head."""


@dataclass(slots=True)
class SimulationResult:
    """When each request was answered, by model; 0 for never."""

    workload: Workload
    ended_ns: tuple[list[int], ...]
    batches: list[int] = field(default_factory=list)

    @property
    def good(self) -> int:
        within_ns = self.workload.within_ns
        pairs = zip(self.workload.times_ns, self.ended_ns, strict=True)
        return sum(
            0 < end_ns <= time_ns + within_ns
            for times_ns, ended_ns in pairs
            for time_ns, end_ns in zip(times_ns, ended_ns, strict=True)
        )

    @property
    def good_share(self) -> float:
        """Of what was offered; a refusal is a miss like any other."""
        return self.good / max(1, self.workload.offered)


def run_rule(rule: Rule, workload: Workload, device: VirtualDevice) -> SimulationResult:
    """Until everybody has been answered or given up."""
    lines = [ModelQueue(times_ns, workload.within_ns) for times_ns in workload.times_ns]
    result = SimulationResult(workload, tuple(line.ended_ns for line in lines))
    now_ns = 0
    while now_ns < NEVER_NS:
        for line in lines:
            line.see(now_ns)
        match rule.choose(lines, now_ns):
            case Run(line, count):
                now_ns += device.batch_ns(count)
                rule.ran(line, count, now_ns)
                line.ended_ns[line.head : line.head + count] = [now_ns] * count
                line.head += count
                result.batches.append(count)
            case Sleep(until_ns):
                now_ns = min([until_ns, *(line.next_ns for line in lines)])
    return result
