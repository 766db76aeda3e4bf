"""What waits, and for which lanes: the state that decisions are made from.

Knows the order of service and keeps the books. Decides nothing; that is `policy`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from dataclasses import dataclass, field

from convoy.app.scheduling.latency import LatencyModel
from convoy.app.scheduling.request import MILLISECOND_NS, SECOND_NS, ModelKey, Request, Shape

NEVER_NS = 1 << 62
# Between models, a request without a deadline counts as one due this long after it came. Else a stream
# of deadlines at one model could starve another for ever.
PATIENCE_NS = SECOND_NS
# How late timers and threads may wake up.
WAKING_NS = MILLISECOND_NS
# The level of requests that go before all others; every model's own levels begin at 1.
RAISED_LEVEL = 0

# Sorted by what the order of service is: (level, deadline, arrival, id).
Entry = tuple[int, int, int, int, Request]
# What names requests that can share a batch: their shapes; or for half of a batch that failed the id of its first.
Group = tuple[Shape, ...] | int


def _unknown_staging() -> LatencyModel:
    """A millisecond, whatever the batch: then the first ones are started rather too early."""
    return LatencyModel({1: MILLISECOND_NS, 1024: MILLISECOND_NS})


@dataclass(slots=True, eq=False)
class Lane:
    """All that scheduling knows of an engine.

    `batch_sizes` ascend; a batch is padded to the next one. `depth` batches may be in flight at once: with two,
    what comes before computing is hidden behind the batch before. `staging` learns what that takes.
    """

    id: int
    device: str
    batch_sizes: tuple[int, ...]
    latency: LatencyModel
    depth: int = 1
    in_flight: int = 0
    stopping: bool = False
    staging: LatencyModel = field(default_factory=_unknown_staging)

    def padded(self, samples: int) -> int:
        """The batch size that `samples` run as. Never more than the largest."""
        return self.batch_sizes[bisect_left(self.batch_sizes, samples, hi=len(self.batch_sizes) - 1)]

    def expect_ns(self, samples: int) -> int:
        """From its start to its answers, for a batch that has the device for itself; without margin."""
        return self.latency.expect_ns(self.padded(samples))

    def hidden_ns(self, samples: int) -> int:
        """How much of that does not count where another batch computes meanwhile; at most half, as they take turns."""
        if self.depth == 1:
            return 0
        return min(self.staging.expect_ns(self.padded(samples)), self.expect_ns(samples) // 2)

    def behind_ns(self, samples: int) -> int:
        """What it is predicted to take then, with margin: from the end of the batch before to its own."""
        return self.latency.predict_ns(self.padded(samples)) - self.hidden_ns(samples)

    def lead_ns(self, samples: int) -> int:
        """How long before the device is free a batch must be started to lose none of its time."""
        return int(1.25 * self.staging.expect_ns(self.padded(samples))) + WAKING_NS


@dataclass(slots=True, eq=False)
class Dispatch:
    """Requests that run as one batch on a lane. They have left the queue.

    As predicted when it was started, it can compute from `ready_ns` on, then takes `takes_ns`, or `soonest_ns` at the
    least, and has ended `predicted_ns` after its start.
    """

    key: ModelKey
    lane: Lane
    requests: tuple[Request, ...]
    samples: int
    predicted_ns: int
    ready_ns: int
    takes_ns: int
    soonest_ns: int


@dataclass(slots=True, eq=False)
class Timeline:
    """When a device will be free: its batches in flight, in the order in which they compute.

    They compute one after the other, whatever their lanes; the copies of one hide behind the computation of the one
    before. `begun_ns` is when the last one left. Overdue requests may go first when `batches_to_overdue` more batches
    have begun and it is `look_for_overdue_ns`.
    """

    begun_ns: int = 0
    batches: list[Dispatch] = field(default_factory=list)
    batches_to_overdue: int = 0
    look_for_overdue_ns: int = 0

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


def level_of(priority: int, levels: int, default_level: int) -> int:
    """The level of a priority at a model with `levels` levels."""
    return priority if 1 <= priority <= levels else default_level


def urgency(entry: Entry) -> tuple[int, int, int]:
    """Where the request stands among those with which it can share no batch."""
    level, due_ns, arrival_ns, number, _ = entry
    return (level, arrival_ns + PATIENCE_NS if due_ns == NEVER_NS else due_ns, number)


@dataclass(slots=True, eq=False)
class Queue:
    """What waits for one version of one model. `max_waiting` and `waiting` are in samples.

    `levels` and `default_level` are what the model makes of priorities; `raised` are the ids of the requests that go
    before every level, each with its group. `dated` is how many of the requests that wait have a deadline,
    `given_up_alone` how many were given up, or run to learn from them, when they were late, alone in the queue and in
    the way of another.
    """

    key: ModelKey
    max_batch: int
    max_waiting: int
    levels: int = 1
    default_level: int = 1
    lanes: list[Lane] = field(default_factory=list)
    groups: dict[Group, list[Entry]] = field(default_factory=dict)
    raised: dict[int, Group] = field(default_factory=dict)
    waiting: int = 0
    dated: int = 0
    given_up_alone: int = 0

    def order_of(self, request: Request) -> Entry:
        """Where the request stands in the queue."""
        level = RAISED_LEVEL
        if request.id not in self.raised:
            level = level_of(request.priority, self.levels, self.default_level)
        deadline_ns = NEVER_NS if request.deadline_ns is None else request.deadline_ns
        return (level, deadline_ns, request.arrival_ns, request.id, request)

    def put_in_order(self) -> None:
        """After its levels have changed."""
        for entries in self.groups.values():
            entries[:] = sorted([self.order_of(entry[-1]) for entry in entries])

    @property
    def requests(self) -> int:
        """How many wait."""
        return sum(map(len, self.groups.values()))

    @property
    def usable_lanes(self) -> list[Lane]:
        return [lane for lane in self.lanes if not lane.stopping]


@dataclass(slots=True)
class State:
    """Every queue and lane.

    `device_slots` bounds the batches in flight per device, which compute one after the other. A device that is
    absent is unbounded, as if each of its lanes had one for itself. `waiting` has the requests by their ids, as they
    came; `expiries` are theirs, (time, id), in order.
    """

    device_slots: dict[str, int] = field(default_factory=dict)
    queues: dict[ModelKey, Queue] = field(default_factory=dict)
    waiting: dict[int, Request] = field(default_factory=dict)
    timelines: defaultdict[str | int, Timeline] = field(default_factory=lambda: defaultdict(Timeline))
    expiries: list[tuple[int, int]] = field(default_factory=list)

    def timeline(self, lane: Lane) -> Timeline:
        """What computes before a batch that the lane is given: its device's, or its own where that is unbounded."""
        return self.timelines[lane.device if lane.device in self.device_slots else lane.id]

    def has_room(self, lane: Lane) -> bool:
        """Whether the lane may be given a batch."""
        if lane.stopping or lane.in_flight >= lane.depth:
            return False
        slots = self.device_slots.get(lane.device)
        if slots is None:
            return True
        # Canaries count, too, which are in no timeline.
        lanes = (one for queue in self.queues.values() for one in queue.lanes if one.device == lane.device)
        return sum(one.in_flight for one in lanes) < slots

    def is_idle(self, queue: Queue) -> bool:
        """Whether a request that comes now would compute at once."""
        if queue.waiting:
            return False
        return any(self.has_room(lane) and not self.timeline(lane).batches for lane in queue.lanes)

    def forecast(self, lane: Lane, now_ns: int) -> LaneForecast:
        timeline = self.timeline(lane)
        return LaneForecast(lane, timeline, now_ns, timeline.free_at_ns(now_ns))

    def beside(self, queue: Queue, lane: Lane) -> list[tuple[Queue, Lane]]:
        """The other queues that wait for the same device as the lane, each with a lane of its own there."""
        timeline = self.timeline(lane)
        found: list[tuple[Queue, Lane]] = []
        for other in self.queues.values():
            theirs = [one for one in other.usable_lanes if self.timeline(one) is timeline]
            if theirs and other.waiting and other is not queue:
                found.append((other, theirs[0]))
        return found

    def drop_lane(self, queue: Queue, lane: Lane) -> None:
        """The lane is gone, with whatever it was given."""
        queue.lanes.remove(lane)
        timeline = self.timeline(lane)
        timeline.batches = [one for one in timeline.batches if one.lane is not lane]

    def enqueue(self, request: Request) -> None:
        """Let the request wait in its place."""
        queue = self.queues[request.key]
        group = queue.raised.get(request.id, request.shapes)
        insort(queue.groups.setdefault(group, []), queue.order_of(request))
        self.waiting[request.id] = request
        queue.waiting += request.samples
        queue.dated += request.deadline_ns is not None
        if request.expiry_ns is not None:
            insort(self.expiries, (request.expiry_ns, request.id))

    def enqueue_halves(self, requests: tuple[Request, ...]) -> None:
        """Let both halves of a batch that failed wait before everything else; each runs as a batch of its own."""
        middle = len(requests) // 2
        for half in (requests[:middle], requests[middle:]):
            for request in half:
                self.queues[request.key].raised[request.id] = half[0].id
                self.enqueue(request)

    def remove(self, request: Request) -> None:
        """Take a waiting request out of its queue. Raises KeyError if it does not wait."""
        del self.waiting[request.id]
        queue = self.queues[request.key]
        group = queue.raised.get(request.id, request.shapes)
        entries = queue.groups[group]
        del entries[bisect_left(entries, queue.order_of(request))]
        if not entries:
            del queue.groups[group]
        queue.raised.pop(request.id, None)
        queue.waiting -= request.samples
        queue.dated -= request.deadline_ns is not None
        if request.expiry_ns is not None:
            del self.expiries[bisect_left(self.expiries, (request.expiry_ns, request.id))]

    def raise_up(self, requests: tuple[Request, ...]) -> None:
        """Put these requests, which wait and have equal shapes, before every level."""
        for request in requests:
            self.remove(request)
            self.queues[request.key].raised[request.id] = request.shapes
            self.enqueue(request)

    def take_expired(self, now_ns: int) -> tuple[Request, ...]:
        """The requests for which waiting any longer is pointless; they wait no more."""
        end = bisect_right(self.expiries, (now_ns, NEVER_NS))
        expired = tuple([self.waiting[number] for _, number in self.expiries[:end]])
        for request in expired:
            self.remove(request)
        return expired


def count_samples(requests: tuple[Request, ...]) -> int:
    return sum([request.samples for request in requests])
