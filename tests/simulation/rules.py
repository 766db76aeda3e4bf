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

    def ran(self, line: ModelQueue, count: int, ended_ns: int) -> None:
        """A batch of the oldest `count` has ended; they are still at the head."""


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


class _Rule(Rule):
    """A rule that learns nothing."""

    def ran(self, line: ModelQueue, count: int, ended_ns: int) -> None:
        pass


def _most_urgent(lines: list[ModelQueue]) -> ModelQueue | None:
    return min((line for line in lines if line.waiting), key=lambda line: line.due_ns, default=None)


def _drop_late(lines: list[ModelQueue], now_ns: int, takes_ns: int) -> None:
    """Give up what would be late if it took so long; with 0 what is late already, as a queue time-out does."""
    for line in lines:
        line.head = bisect_left(line.times_ns, now_ns + takes_ns - line.within_ns, line.head, line.tail)


class NoBatching(_Rule):
    """One request at a time, in order."""

    def choose(self, lines: list[ModelQueue], now_ns: int) -> Run | Sleep:
        line = _most_urgent(lines)
        return Run(line, 1) if line else Sleep()


@dataclass(slots=True)
class ServeAll(_Rule):
    """Whatever waits, at once; nothing is ever given up."""

    device: VirtualDevice

    def choose(self, lines: list[ModelQueue], now_ns: int) -> Run | Sleep:
        line = _most_urgent(lines)
        return Run(line, min(line.waiting, self.device.max_batch)) if line else Sleep()


@dataclass(slots=True)
class BatchWindow(_Rule):
    """A batch is full or its first request has waited for the window; expired requests are thrown away.

    Triton's dynamic batcher with a queue time-out, and with small differences Mosec, LitServe and BentoML.
    """

    device: VirtualDevice
    window_ns: int

    def choose(self, lines: list[ModelQueue], now_ns: int) -> Run | Sleep:
        _drop_late(lines, now_ns, 0)
        full = self.device.max_batch
        waiting = [line for line in lines if line.waiting]
        ready = [line for line in waiting if line.waiting >= full or line.first_ns + self.window_ns <= now_ns]
        line = _most_urgent(ready)
        if line:
            return Run(line, min(line.waiting, full))
        return Sleep(min((line.first_ns + self.window_ns for line in waiting), default=NEVER_NS))


class Aimd(_Rule):
    """Clipper's adaptive batching (Crankshaw et al., NSDI 2017): a limit that grows by one while batches take less
    than the objective, and shrinks by a tenth when one does not."""

    def __init__(self, device: VirtualDevice) -> None:
        self._device = device
        self._limits: dict[int, float] = {}

    def choose(self, lines: list[ModelQueue], now_ns: int) -> Run | Sleep:
        line = _most_urgent(lines)
        if line is None:
            return Sleep()
        return Run(line, min(line.waiting, int(self._limits.get(id(line), 1.0))))

    def ran(self, line: ModelQueue, count: int, ended_ns: int) -> None:
        limit = self._limits.get(id(line), 1.0)
        if ended_ns > line.due_ns:
            self._limits[id(line)] = max(1.0, 0.9 * limit)
        elif count == int(limit):
            self._limits[id(line)] = min(self._device.max_batch, limit + 1)


@dataclass(slots=True)
class EarlyDrop(_Rule):
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
class Feasible(_Rule):
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


@dataclass(slots=True)
class Deferral(_Rule):
    """Symphony (arXiv 2308.07470): a batch starts as late as one more request would still let its oldest be in time;
    an idle device stays idle until then."""

    device: VirtualDevice

    def choose(self, lines: list[ModelQueue], now_ns: int) -> Run | Sleep:
        _drop_late(lines, now_ns, SINGLE_NS)
        wake_ns = NEVER_NS
        best: tuple[int, ModelQueue, int] | None = None
        for line in lines:
            if not line.waiting:
                continue
            fits = int((line.due_ns - now_ns) / self.device.slope_ns - self.device.kappa)
            count = max(1, min(line.waiting, self.device.max_batch, fits))
            begin_ns = line.due_ns - self.device.batch_ns(count + 1)
            if count < self.device.max_batch and count == line.waiting and begin_ns > now_ns:
                wake_ns = min(wake_ns, begin_ns)
            elif best is None or line.due_ns - self.device.batch_ns(count) < best[0]:
                best = line.due_ns - self.device.batch_ns(count), line, count
        return Run(best[1], best[2]) if best else Sleep(wake_ns)


# Shares of the objective that a fixed window takes; each scenario is compared with the best of them.
WINDOWS = (0.02, 0.1, 0.25, 0.5)


def rules(scenario: Scenario) -> dict[str, Callable[[], Rule]]:
    """Makers of every baseline, by name. What follows a colon is a setting that was swept."""
    device = scenario.device
    windows: dict[str, Callable[[], Rule]] = {
        f"window:{share:g}": lambda share=share: BatchWindow(device, round(share * scenario.within_ns))  # type: ignore[misc]
        for share in (0.0, *WINDOWS)
    }
    targets: dict[str, Callable[[], Rule]] = {
        f"early drop:{batches}": lambda batches=batches: EarlyDrop(device, _target(scenario, batches))  # type: ignore[misc]
        for batches in sorted({2, len(scenario.shares) + 1})
    }
    return {
        "no batching": NoBatching,
        "serve all": lambda: ServeAll(device),
        **windows,
        "AIMD": lambda: Aimd(device),
        **targets,
        "feasible:any": lambda: Feasible(device, any_size),
        "feasible:powers": lambda: Feasible(device, powers_of_two),
        "deferral": lambda: Deferral(device),
    }


def _target(scenario: Scenario, batches: int) -> int:
    """The largest size of which so many batches fit into the objective."""
    device = scenario.device
    fits = int(scenario.within_ns / batches / device.slope_ns - device.kappa)
    return max(1, min(device.max_batch, fits))


CONVOY = "convoy"


def contenders(scenario: Scenario) -> dict[str, Callable[[float, int], SimulationResult]]:
    """What plays one load on one seed, by name: every rule, and the server's own policy."""

    def player(make: Callable[[], Rule]) -> Callable[[float, int], SimulationResult]:
        return lambda rho, seed: run_rule(make(), draw(scenario, rho, seed), scenario.device)

    others = {name: player(make) for name, make in rules(scenario).items()}
    return {**others, CONVOY: lambda rho, seed: run_policy(draw(scenario, rho, seed), scenario.device)}
