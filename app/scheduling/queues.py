"""What waits, and for which lanes: the state that decisions are made from.

Knows the order of service and keeps the books. Decides nothing; that is `policy`.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import defaultdict, deque
from dataclasses import dataclass, field

from convoy.app.scheduling.latency import LatencyModel, Staging
from convoy.app.scheduling.request import SECOND_NS, ModelKey, Request, Shape

NEVER_NS = 1 << 62
# Between models, a request without a deadline counts as one due this long after it came. Else a stream
# of deadlines at one model could starve another for ever.
PATIENCE_NS = SECOND_NS


@dataclass(slots=True, eq=False)
class InFlightBatch:
    """One batch on the device: it can compute from `ready_ns` on and is then expected to take `takes_ns`.

    `batch` tells it from the others, `lane` says where it runs; `soonest_ns` is what it takes at the least.
    """

    batch: int
    lane: int
    ready_ns: int
    takes_ns: int
    soonest_ns: int


@dataclass(slots=True, eq=False)
class Timeline:
    """When a device will be free: its batches in flight, in the order in which they compute.

    They compute one after the other, whatever their lanes; the copies of one hide behind the computation of the one
    before. `begun_ns` is when the last one left. `turns` counts all that ever began.
    """

    begun_ns: int = 0
    batches: list[InFlightBatch] = field(default_factory=list)
    turns: int = 0
    next_overdue_turn: int = 0  # overdue requests may be raised from this turn on

    def begin(self, batch: InFlightBatch) -> None:
        """The device has one more batch before it."""
        self.batches.append(batch)
        self.turns += 1

    def free_at_ns(self, now_ns: int) -> int:
        """When everything in flight is expected to have ended; now, where nothing is."""
        if not self.batches:
            return now_ns
        ends_ns = self.begun_ns
        for one in self.batches:
            ends_ns = max(ends_ns, one.ready_ns) + one.takes_ns
            if one is self.batches[0]:
                # A batch that is late by a minute will hardly end in this moment: rather in another minute.
                ends_ns = max(ends_ns, 2 * now_ns - ends_ns)
        return max(now_ns, ends_ns)

    def may_be_free_ns(self, now_ns: int) -> int:
        """The earliest time at which everything in flight could have ended."""
        ends_ns = self.begun_ns
        for one in self.batches:
            ends_ns = max(ends_ns, one.ready_ns) + one.soonest_ns
        return max(now_ns, ends_ns)

    def leave(self, batch: int, now_ns: int) -> None:
        """The batch is done; what is behind it computes from now on."""
        self.batches = [one for one in self.batches if one.batch != batch]
        self.begun_ns = now_ns

    def drop_lane(self, lane: int) -> None:
        """Expect nothing more of what runs in a lane that was given up."""
        self.batches = [one for one in self.batches if one.lane != lane]


@dataclass(slots=True, eq=False)
class Lane:
    """All that scheduling knows of an engine.

    `batch_sizes` ascend; a batch is padded to the next one. `depth` batches may be in flight at once: with two,
    what comes before computing is hidden behind the batch before. `staging` is what that was measured to take.
    """

    id: int
    device: str
    batch_sizes: tuple[int, ...]
    latency: LatencyModel
    depth: int = 1
    in_flight: int = 0
    stopping: bool = False
    staging: Staging = field(default_factory=Staging)

    def padded(self, samples: int) -> int:
        """The batch size that `samples` run as. Never more than the largest."""
        return self.batch_sizes[bisect_left(self.batch_sizes, samples, hi=len(self.batch_sizes) - 1)]

    def expect_ns(self, samples: int) -> int:
        """From its start to its answers, for a batch that has the device for itself; without margin."""
        return self.latency.expect_ns(self.padded(samples))

    def predict_ns(self, samples: int) -> int:
        """The same with margin: what promises are made from."""
        return self.latency.predict_ns(self.padded(samples))

    def hidden_ns(self, samples: int) -> int:
        """How much of that does not count where another batch computes meanwhile."""
        if self.depth == 1:
            return 0
        return min(self.staging.hidden_ns(self.padded(samples)), self.expect_ns(samples))

    def behind_ns(self, samples: int) -> int:
        """What it is predicted to take then: from the end of the one before to its own."""
        return self.predict_ns(samples) - self.hidden_ns(samples)

    def lead_ns(self, samples: int) -> int:
        """So long before the device is free must a batch be started to lose none of its time."""
        return self.staging.lead_ns(self.padded(samples))

    def in_flight_batch(self, batch: int, samples: int, now_ns: int) -> InFlightBatch:
        """What the device has before it when the batch is started now."""
        padded, hidden_ns = self.padded(samples), self.hidden_ns(samples)
        soonest_ns = max(0, self.latency.soonest_ns(padded) - hidden_ns)
        takes_ns = self.latency.predict_ns(padded) - hidden_ns
        return InFlightBatch(batch, self.id, now_ns + hidden_ns, takes_ns, soonest_ns)


@dataclass(slots=True, eq=False)
class LaneForecast:
    """What would become of a batch that a lane is given now: it computes when its device is free, `free_ns`."""

    lane: Lane
    timeline: Timeline
    now_ns: int
    free_ns: int

    def ends_ns(self, samples: int) -> int:
        """When its answers are there, as can be promised."""
        can_compute_ns = max(self.free_ns, self.now_ns + self.lane.hidden_ns(samples))
        return can_compute_ns + self.lane.behind_ns(samples)

    def expected_end_ns(self, samples: int) -> int:
        """The same without margin, for comparing lanes."""
        hidden_ns = self.lane.hidden_ns(samples)
        return max(self.free_ns, self.now_ns + hidden_ns) + self.lane.expect_ns(samples) - hidden_ns


# Sorted by what the order of service is: (level, deadline, arrival, id).
Entry = tuple[int, int, int, int, Request]
# The level of those whose turn has come although others are more urgent; every model's own begin at 1.
RAISED_LEVEL = 0


def level_of(priority: int, levels: int, default_level: int) -> int:
    """The level of a priority at a model with `levels` levels."""
    return priority if 1 <= priority <= levels else default_level


def deadline_of(request: Request) -> int:
    """The request's deadline, as a number that can be compared where it has none."""
    return NEVER_NS if request.deadline_ns is None else request.deadline_ns


def urgency(entry: Entry) -> tuple[int, int, int]:
    """Where the request stands among those with which it can share no batch."""
    level, due_ns, arrival_ns, number, _ = entry
    return (level, arrival_ns + PATIENCE_NS if due_ns == NEVER_NS else due_ns, number)


@dataclass(slots=True, eq=False)
class Queue:
    """What waits for one version of one model, by shape. `max_waiting` and `waiting` are in samples.

    `dated` is how many of the requests that wait have a deadline, `given_up_alone` how many were given up, or run to
    learn from them, when they were late, alone in the queue and in the way of another. `levels` and `default_level` are
    what the model makes of priorities; `raised` are the ids of those that go before every level.
    """

    key: ModelKey
    max_batch: int
    max_waiting: int
    levels: int = 1
    default_level: int = 1
    lanes: list[Lane] = field(default_factory=list)
    by_shape: dict[tuple[Shape, ...], list[Entry]] = field(default_factory=dict)
    retries: deque[tuple[Request, ...]] = field(default_factory=deque)
    waiting: int = 0
    dated: int = 0
    given_up_alone: int = 0
    raised: set[int] = field(default_factory=set)

    def order_of(self, request: Request) -> Entry:
        """Where the request stands in the queue."""
        if request.id in self.raised:
            level = RAISED_LEVEL
        else:
            level = level_of(request.priority, self.levels, self.default_level)
        return (level, deadline_of(request), request.arrival_ns, request.id, request)

    def put_in_order(self) -> None:
        """After its levels have changed."""
        for shapes, entries in self.by_shape.items():
            self.by_shape[shapes] = sorted([self.order_of(entry[-1]) for entry in entries])

    @property
    def requests(self) -> int:
        """How many wait to be tried for the first time."""
        return sum(map(len, self.by_shape.values()))

    @property
    def usable_lanes(self) -> list[Lane]:
        return [lane for lane in self.lanes if not lane.stopping]


@dataclass(slots=True)
class State:
    """Every queue and lane.

    `device_slots` bounds the batches in flight per device, which compute one after the other. A device that is
    absent is unbounded, as if each of its lanes had one for itself.
    """

    device_slots: dict[str, int] = field(default_factory=dict)
    queues: dict[ModelKey, Queue] = field(default_factory=dict)
    waiting: dict[int, Request] = field(default_factory=dict)
    timelines: defaultdict[str | int, Timeline] = field(default_factory=lambda: defaultdict(Timeline))
    # A heap of (expiry, request id); entries of requests that left are thrown away when they surface.
    expiries: list[tuple[int, int]] = field(default_factory=list)
    look_for_overdue_ns: int = 0

    def device_is_full(self, device: str) -> bool:
        slots = self.device_slots.get(device)
        if slots is None:
            return False
        lanes = [lane for queue in self.queues.values() for lane in queue.lanes if lane.device == device]
        return sum([lane.in_flight for lane in lanes]) >= slots

    def has_room(self, lane: Lane) -> bool:
        """Whether the lane may be given a batch."""
        return not lane.stopping and lane.in_flight < lane.depth and not self.device_is_full(lane.device)

    def timeline(self, lane: Lane) -> Timeline:
        """What computes before a batch that the lane is given: its device's, or its own where that is unbounded."""
        return self.timelines[lane.device if lane.device in self.device_slots else lane.id]

    def forecast(self, lane: Lane, now_ns: int) -> LaneForecast:
        timeline = self.timeline(lane)
        return LaneForecast(lane, timeline, now_ns, timeline.free_at_ns(now_ns))

    def having_room(self, queue: Queue) -> list[Lane]:
        """The queue's lanes that may be given a batch."""
        return [lane for lane in queue.lanes if self.has_room(lane)]

    def beside(self, queue: Queue, lane: Lane) -> list[tuple[Queue, Lane]]:
        """The other queues that wait for the same device as the lane, each with a lane of its own there."""
        timeline = self.timeline(lane)
        others = (other for other in self.queues.values() if other is not queue and other.waiting)
        lanes = ((other, theirs) for other in others for theirs in other.usable_lanes[:1])
        return [(other, theirs) for other, theirs in lanes if self.timeline(theirs) is timeline]

    def is_idle(self, queue: Queue) -> bool:
        """Whether a request that comes now would compute at once."""
        return not queue.waiting and any(
            self.has_room(lane) and not self.timeline(lane).batches for lane in queue.lanes
        )

    def drop_lane(self, queue: Queue, lane: Lane) -> None:
        """The lane is gone, with whatever it was given."""
        queue.lanes.remove(lane)
        self.timeline(lane).drop_lane(lane.id)

    @property
    def next_expiry_ns(self) -> int | None:
        return self.expiries[0][0] if self.expiries else None

    def enqueue(self, request: Request) -> None:
        """Let the request wait in its place."""
        queue = self.queues[request.key]
        insort(queue.by_shape.setdefault(request.shapes, []), queue.order_of(request))
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
        entries = queue.by_shape.get(request.shapes, [])
        position = bisect_left(entries, queue.order_of(request))
        self._count_out(queue, request)
        if position < len(entries) and entries[position][-1] is request:
            del entries[position]
            if not entries:
                del queue.by_shape[request.shapes]
        else:
            _remove_from_retries(queue, request)

    def remove_heads(self, queue: Queue, entries: list[Entry], count: int) -> None:
        """Take the first requests of one shape out of their queue."""
        for entry in entries[:count]:
            self._count_out(queue, entry[-1])
        if count == len(entries):
            del queue.by_shape[entries[0][-1].shapes]
        else:
            del entries[:count]

    def raise_up(self, queue: Queue, entries: list[Entry], first: int, end: int) -> None:
        """Put these requests, all of one shape, before every level."""
        requests = [entry[-1] for entry in entries[first:end]]
        del entries[first:end]
        queue.raised.update([request.id for request in requests])
        for request in requests:
            insort(entries, queue.order_of(request))

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
        queue.dated += request.deadline_ns is not None
        self.waiting[request.id] = request
        if request.expiry_ns is not None:
            heapq.heappush(self.expiries, (request.expiry_ns, request.id))

    def _count_out(self, queue: Queue, request: Request) -> None:
        del self.waiting[request.id]
        queue.waiting -= request.samples
        queue.dated -= request.deadline_ns is not None
        queue.raised.discard(request.id)


def count_samples(requests: tuple[Request, ...]) -> int:
    return sum([request.samples for request in requests])


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
