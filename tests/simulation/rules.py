"""How batches are formed elsewhere, each reduced to its rule for one device, and the loop that plays a rule.

All know the device's true latencies and serve the model whose oldest request is most urgent, which is more than some
of their originals do. None refuses at arrival; what is given up is given up when the device is free.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable

from tests.simulation.virtual_policy import NEVER_NS, SimulationResult
from tests.simulation.workload import SINGLE_NS, VirtualDevice, Workload


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
    def due_ns(self) -> int:
        """When the oldest that waits wants its answer."""
        return self.times_ns[self.head] + self.within_ns

    @property
    def next_ns(self) -> int:
        """When the next one comes."""
        return self.times_ns[self.tail] if self.tail < len(self.times_ns) else NEVER_NS


# For a free device: whose oldest requests run as one batch now, and how many of them. None: nothing runs before the
# next request comes. A rule gives requests up by moving a queue's `head` on.
Rule = Callable[[list[ModelQueue], int], tuple[ModelQueue, int] | None]


def run_rule(choose: Rule, workload: Workload, device: VirtualDevice) -> SimulationResult:
    """Until everybody has been answered or given up."""
    queues = [ModelQueue(times_ns, workload.within_ns) for times_ns in workload.times_ns]
    result = SimulationResult(workload, tuple(queue.ended_ns for queue in queues))
    now_ns = 0
    while now_ns < NEVER_NS:
        for queue in queues:
            queue.see(now_ns)
        chosen = choose(queues, now_ns)
        if chosen is None:
            now_ns = min(queue.next_ns for queue in queues)
            continue
        queue, count = chosen
        now_ns += device.batch_ns(count)
        queue.ended_ns[queue.head : queue.head + count] = [now_ns] * count
        queue.head += count
        result.batches.append(count)
    return result


def serve_all(device: VirtualDevice) -> Rule:
    """Whatever waits, at once; nothing is ever given up."""

    def choose(queues: list[ModelQueue], now_ns: int) -> tuple[ModelQueue, int] | None:
        waiting = [queue for queue in queues if queue.waiting]
        first = min(waiting, key=lambda queue: queue.due_ns, default=None)
        return (first, min(first.waiting, device.max_batch)) if first else None

    return choose


def feasible(device: VirtualDevice) -> Rule:
    """The largest batch in which the oldest is in time; heads that cannot be are given up (Nexus; SOSP 2019)."""

    def largest(queue: ModelQueue, now_ns: int) -> int:
        fits = int((queue.due_ns - now_ns) / device.slope_ns - device.kappa)
        return max(1, min(queue.waiting, device.max_batch, fits))

    def choose(queues: list[ModelQueue], now_ns: int) -> tuple[ModelQueue, int] | None:
        for queue in queues:
            queue.head = bisect_left(queue.times_ns, now_ns + SINGLE_NS - queue.within_ns, queue.head, queue.tail)
        choices = [(queue, largest(queue, now_ns)) for queue in queues if queue.waiting]
        return max(choices, key=lambda one: device.batch_ns(one[1]) - one[0].due_ns, default=None)

    return choose
