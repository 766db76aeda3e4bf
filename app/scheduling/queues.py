"""What waits, and for which lanes: the state that decisions are made from.

Knows the order of service and keeps the books. Decides nothing; that is `policy`.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from app.scheduling.latency import LatencyModel
from app.scheduling.request import SECOND_NS, ModelKey, Request, Shape

NEVER_NS = 1 << 62
# Between models, a request without a deadline counts as one due this long after it came. Else a stream
# of deadlines at one model could starve another for ever.
PATIENCE_NS = SECOND_NS


@dataclass(slots=True, eq=False)
class Lane:
    """All that scheduling knows of an engine.

    `batch_sizes` ascend; a batch is padded to the next one. `depth` batches may be in flight at once.
    `free_at_ns` is when the last of them is expected to end.
    """

    id: int
    generation: int
    device: str
    batch_sizes: tuple[int, ...]
    latency: LatencyModel
    depth: int = 1
    in_flight: int = 0
    free_at_ns: int = 0
    stopping: bool = False

    def padded(self, samples: int) -> int:
        """The batch size that `samples` run as. Never more than the largest."""
        return self.batch_sizes[min(bisect_left(self.batch_sizes, samples), len(self.batch_sizes) - 1)]

    def predict_ns(self, samples: int) -> int:
        return self.latency.predict_ns(self.padded(samples))


# Sorted by what the order of service is: (priority, deadline, arrival, id).
Entry = tuple[int, int, int, int, Request]


def deadline_of(request: Request) -> int:
    """The request's deadline, as a number that can be compared where it has none."""
    return NEVER_NS if request.deadline_ns is None else request.deadline_ns


def order_of(request: Request) -> Entry:
    """Where the request stands in its queue."""
    return (request.priority, deadline_of(request), request.arrival_ns, request.id, request)


def urgency(request: Request) -> tuple[int, int, int]:
    """Where the request stands among those with which it can share no batch."""
    due_ns = request.arrival_ns + PATIENCE_NS if request.deadline_ns is None else request.deadline_ns
    return (request.priority, due_ns, request.id)


@dataclass(slots=True, eq=False)
class Queue:
    """What waits for one version of one model, by shape. `max_waiting` and all counts are in samples."""

    key: ModelKey
    max_batch: int
    max_waiting: int
    lanes: list[Lane] = field(default_factory=list)
    by_shape: dict[tuple[Shape, ...], list[Entry]] = field(default_factory=dict)
    retries: deque[tuple[Request, ...]] = field(default_factory=deque)
    waiting: int = 0

    @property
    def usable_lanes(self) -> list[Lane]:
        return [lane for lane in self.lanes if not lane.stopping]


@dataclass(slots=True)
class State:
    """Every queue and lane. `device_slots` bounds the batches in flight per device; absent means unbounded."""

    device_slots: dict[str, int] = field(default_factory=dict)
    queues: dict[ModelKey, Queue] = field(default_factory=dict)
    waiting: dict[int, Request] = field(default_factory=dict)
    # A heap of (expiry, request id); entries of requests that left are thrown away when they surface.
    expiries: list[tuple[int, int]] = field(default_factory=list)

    def lanes(self) -> Iterator[Lane]:
        return (lane for queue in self.queues.values() for lane in queue.lanes)

    def device_is_full(self, device: str) -> bool:
        busy = sum(lane.in_flight for lane in self.lanes() if lane.device == device)
        return busy >= self.device_slots.get(device, NEVER_NS)

    def free_lane(self, queue: Queue) -> Lane | None:
        """The lane that would end a batch first if it started now; None when no lane may start one."""
        free = [
            lane for lane in queue.usable_lanes if lane.in_flight < lane.depth and not self.device_is_full(lane.device)
        ]
        return min(free, key=lambda lane: (lane.free_at_ns, lane.in_flight, lane.id), default=None)

    def is_idle(self, queue: Queue) -> bool:
        """Whether a request that comes now would run at once."""
        return not queue.waiting and self.free_lane(queue) is not None

    @property
    def next_expiry_ns(self) -> int | None:
        return self.expiries[0][0] if self.expiries else None

    def enqueue(self, request: Request) -> None:
        """Let the request wait in its place."""
        queue = self.queues[request.key]
        insort(queue.by_shape.setdefault(request.shapes, []), order_of(request))
        self._count_in(queue, request)

    def enqueue_halves(self, requests: tuple[Request, ...]) -> None:
        """Put both halves of a batch that failed before everything else; each runs as a batch of its own."""
        queue = self.queues[requests[0].key]
        middle = len(requests) // 2
        queue.retries.extendleft(half for half in (requests[middle:], requests[:middle]) if half)
        for request in requests:
            self._count_in(queue, request)

    def remove(self, request: Request) -> None:
        """Take a waiting request out of wherever it waits. Raises KeyError if it does not wait."""
        queue = self.queues[request.key]
        del self.waiting[request.id]
        queue.waiting -= request.samples
        entries = queue.by_shape.get(request.shapes, [])
        position = bisect_left(entries, order_of(request))
        if position < len(entries) and entries[position][-1] is request:
            del entries[position]
            if not entries:
                del queue.by_shape[request.shapes]
        else:
            _remove_from_retries(queue, request)

    def take_expired(self, now_ns: int) -> tuple[Request, ...]:
        """The requests for which waiting any longer is pointless; they wait no more.

        Afterwards `next_expiry_ns` is that of a request that waits.
        """
        expired: list[Request] = []
        while self.expiries:
            expiry_ns, request_id = self.expiries[0]
            request = self.waiting.get(request_id)
            if request is not None and expiry_ns > now_ns:
                break
            heapq.heappop(self.expiries)
            if request is not None:
                self.remove(request)
                expired.append(request)
        # Entries of requests that left long ago would pile up behind one far deadline.
        if len(self.expiries) > 64 and len(self.expiries) > 2 * len(self.waiting):
            self.expiries = [entry for entry in self.expiries if entry[1] in self.waiting]
            heapq.heapify(self.expiries)
        return tuple(expired)

    def _count_in(self, queue: Queue, request: Request) -> None:
        queue.waiting += request.samples
        self.waiting[request.id] = request
        if request.expiry_ns is not None:
            heapq.heappush(self.expiries, (request.expiry_ns, request.id))


def count_samples(requests: tuple[Request, ...]) -> int:
    return sum(request.samples for request in requests)


def _remove_from_retries(queue: Queue, request: Request) -> None:
    for position, group in enumerate(queue.retries):
        rest = tuple(other for other in group if other.id != request.id)
        if len(rest) == len(group):
            continue
        if rest:
            queue.retries[position] = rest
        else:
            del queue.retries[position]
        return
