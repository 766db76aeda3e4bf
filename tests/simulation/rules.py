"""How batches are formed elsewhere, each reduced to its rule for one device, and the loop that plays a rule.

All know the device's true latencies and serve the model whose oldest request is most urgent, which is more than some
of their originals do. None refuses at arrival; what is given up is given up when the device is free.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from tests.simulation.virtual_policy import NEVER_NS, SimulationResult, run_policy
from tests.simulation.workload import SINGLE_NS, Scenario, VirtualDevice, Workload, draw


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
                line.ended_ns[line.head : line.head + count] = [now_ns] * count
                line.head += count
                result.batches.append(count)
            case Sleep(until_ns):
                now_ns = min([until_ns, *(line.next_ns for line in lines)])
    return result


def _most_urgent(lines: list[ModelQueue]) -> ModelQueue | None:
    return min((line for line in lines if line.waiting), key=lambda line: line.due_ns, default=None)


def _drop_late(lines: list[ModelQueue], now_ns: int, takes_ns: int) -> None:
    """Give up what would be late if it took so long; with 0 what is late already, as a queue time-out does."""
    for line in lines:
        line.head = bisect_left(line.times_ns, now_ns + takes_ns - line.within_ns, line.head, line.tail)


@dataclass(slots=True)
class ServeAll(Rule):
    """Whatever waits, at once; nothing is ever given up."""

    device: VirtualDevice

    def choose(self, lines: list[ModelQueue], now_ns: int) -> Run | Sleep:
        line = _most_urgent(lines)
        return Run(line, min(line.waiting, self.device.max_batch)) if line else Sleep()


@dataclass(slots=True)
class EarlyDrop(Rule):
    """Nexus (Shen et al., SOSP 2019): a target batch, and heads that would miss with a batch of that size are given
    up, so that those behind them are served in full batches."""

    device: VirtualDevice
    target: int

    def choose(self, lines: list[ModelQueue], now_ns: int) -> Run | Sleep:
        for line in lines:
            while line.waiting and line.due_ns < now_ns + self.device.batch_ns(min(line.waiting, self.target)):
                line.head += 1
        first = _most_urgent(lines)
        return Run(first, min(first.waiting, self.target)) if first else Sleep()


@dataclass(slots=True)
class Feasible(Rule):
    """The largest batch of `sizes` in which the oldest is in time; heads that cannot be are given up.

    With powers of two Clockwork's (Gujarati et al., OSDI 2020), with any size Nexus' other variant.
    """

    device: VirtualDevice
    sizes: Callable[[int], Iterator[int]]

    def choose(self, lines: list[ModelQueue], now_ns: int) -> Run | Sleep:
        _drop_late(lines, now_ns, SINGLE_NS)
        best = max(
            ((line, self._largest(line, now_ns)) for line in lines if line.waiting),
            key=lambda choice: now_ns + self.device.batch_ns(choice[1]) - choice[0].due_ns,
            default=None,
        )
        return Run(*best) if best else Sleep()

    def _largest(self, line: ModelQueue, now_ns: int) -> int:
        room_ns = line.due_ns - now_ns
        fits = int(room_ns / self.device.slope_ns - self.device.kappa)
        return max(1, *self.sizes(min(line.waiting, self.device.max_batch, fits)))


def any_size(limit: int) -> Iterator[int]:
    yield from (1, limit)


def powers_of_two(limit: int) -> Iterator[int]:
    yield from (1, 1 << max(1, limit).bit_length() - 1)


CONVOY = "convoy"


def contenders(scenario: Scenario) -> dict[str, Callable[[float, int], SimulationResult]]:
    """What plays one load on one seed, by name: the strongest other rules, and the server's own policy."""
    device = scenario.device
    # The largest batch of which two fit into the objective.
    target = max(1, min(device.max_batch, int(scenario.within_ns / 2 / device.slope_ns - device.kappa)))
    rules = {
        "serve all": ServeAll(device),
        "early drop": EarlyDrop(device, target),
        "feasible:any": Feasible(device, any_size),
        "feasible:powers": Feasible(device, powers_of_two),
    }

    def player(rule: Rule) -> Callable[[float, int], SimulationResult]:
        return lambda rho, seed: run_rule(rule, draw(scenario, rho, seed), device)

    others = {name: player(rule) for name, rule in rules.items()}
    return {**others, CONVOY: lambda rho, seed: run_policy(draw(scenario, rho, seed), device)}
