"""One run of the server's own policy: `convoy.app.scheduling.policy` as it stands, fed as its shell feeds it."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from convoy.app.scheduling.latency import LatencyModel
from convoy.app.scheduling.policy import Dispatch, Drop, Wait, admit, complete, decide
from convoy.app.scheduling.queues import Lane, Queue, State
from convoy.app.scheduling.request import ModelKey, Request
from convoy.loadtest.simulation.run import NEVER_NS, Result
from convoy.loadtest.simulation.workload import Device, Workload

_DEVICE = "device"
# A batch of so many samples that starts at this time (ns) takes so long (ns).
Truth = Callable[[int, int], int]


def run_policy(workload: Workload, device: Device, *, depth: int = 1, truth: Truth | None = None) -> Result:
    """Until everybody has been answered or given up. Lanes were profiled as the device says; they do the `truth`."""
    return _Convoy(workload, device, depth, truth or (lambda samples, _: device.batch_ns(samples))).run()


@dataclass(slots=True)
class _Convoy:
    workload: Workload
    device: Device
    depth: int
    truth: Truth
    state: State = field(default_factory=State)
    now_ns: int = 0
    given: deque[Dispatch] = field(default_factory=deque)
    began_ns: int = 0
    ends_ns: int = NEVER_NS

    def __post_init__(self) -> None:
        self.state.device_slots[_DEVICE] = self.depth
        sizes = tuple(range(1, self.device.max_batch + 1))
        profile = {1 << bit: self.device.batch_ns(1 << bit) for bit in range(self.device.max_batch.bit_length())}
        for number in range(len(self.workload.times_ns)):
            key = ModelKey(str(number), 1)
            queue = Queue(key, self.device.max_batch, NEVER_NS)
            queue.lanes.append(Lane(number, number, _DEVICE, sizes, LatencyModel(profile), self.depth))
            self.state.queues[key] = queue

    def run(self) -> Result:
        result = Result(self.workload, tuple([0] * len(times) for times in self.workload.times_ns))
        requests = self._requests()
        coming = next(requests, None)
        timer_ns = NEVER_NS
        while True:
            arrival_ns = coming.arrival_ns if coming else NEVER_NS
            self.now_ns = min(arrival_ns, self.ends_ns, timer_ns)
            if self.now_ns == NEVER_NS:
                return result
            if self.now_ns == self.ends_ns:
                self._finish(result)
            while coming and coming.arrival_ns == self.now_ns:
                admit(self.state, coming, self.now_ns)
                coming = next(requests, None)
            timer_ns = self._pump()

    def _requests(self) -> Iterator[Request]:
        """In the order in which they come."""
        models = [self._requests_of(number, times) for number, times in enumerate(self.workload.times_ns)]
        return heapq.merge(*models, key=lambda request: request.arrival_ns)

    def _requests_of(self, number: int, times_ns: list[int]) -> Iterator[Request]:
        key = ModelKey(str(number), 1)
        for index, arrival_ns in enumerate(times_ns):
            deadline_ns = arrival_ns + self.workload.within_ns
            yield Request((number << 32) + index, key, 1, ((1,),), (), (), (), (), arrival_ns, deadline_ns=deadline_ns)

    def _pump(self) -> int:
        """Everything there is to decide now; when to ask again at the latest."""
        while True:
            match decide(self.state, self.now_ns):
                case Dispatch() as dispatch:
                    self.given.append(dispatch)
                    if len(self.given) == 1:
                        self._begin()
                case Drop():
                    pass
                case Wait(until_ns):
                    return NEVER_NS if until_ns is None else until_ns

    def _begin(self) -> None:
        lane = self.given[0].lane
        self.began_ns = self.now_ns
        self.ends_ns = self.now_ns + self.truth(lane.padded(self.given[0].samples), self.now_ns)

    def _finish(self, result: Result) -> None:
        dispatch = self.given.popleft()
        complete(self.state, dispatch, self.now_ns, self.now_ns - self.began_ns)
        for request in dispatch.requests:
            result.ended_ns[request.id >> 32][request.id & 0xFFFFFFFF] = self.now_ns
        result.batches.append(dispatch.samples)
        self.ends_ns = NEVER_NS
        if self.given:
            self._begin()
