"""One run of the server's own policy: `convoy.app.scheduling.policy` as it stands, fed as its shell feeds it."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from convoy.app.scheduling.request import ModelKey, Outcome, Request
from convoy.loadtest.simulation.simulator import Simulation
from tests.simulation.workload import VirtualDevice, Workload

NEVER_NS = 1 << 62
_DEVICE = "device"


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


def run_policy(workload: Workload, device: VirtualDevice) -> SimulationResult:
    """Until everybody has been answered or given up. Lanes were profiled as the device is, and it runs one batch at a
    time."""
    simulation = Simulation()
    simulation.state.device_slots[_DEVICE] = 1
    for number in range(len(workload.times_ns)):
        key = simulation.add_model(str(number), max_batch=device.max_batch, max_waiting=NEVER_NS)
        simulation.add_lane(key, lambda samples, _: device.batch_ns(samples), device=_DEVICE)
    models = [_requests(number, times_ns, workload.within_ns) for number, times_ns in enumerate(workload.times_ns)]
    simulation.feed(heapq.merge(*models, key=lambda request: request.arrival_ns))
    simulation.run()
    result = SimulationResult(workload, tuple([0] * len(times_ns) for times_ns in workload.times_ns))
    for end in simulation.ends.values():
        if end.outcome is Outcome.ANSWERED:
            result.ended_ns[end.request.id >> 32][end.request.id & 0xFFFFFFFF] = end.at_ns
    result.batches.extend(batch.dispatch.samples for batch in simulation.batches)
    return result


def _requests(number: int, times_ns: list[int], within_ns: int) -> Iterator[Request]:
    key = ModelKey(str(number), 1)
    for index, arrival_ns in enumerate(times_ns):
        deadline_ns = arrival_ns + within_ns
        yield Request((number << 32) + index, key, 1, ((1,),), (), (), (), (), arrival_ns, deadline_ns=deadline_ns)
