"""The state of scheduling: queues, lanes and batches in flight.

Knows the order of service and keeps the counts; `policy` decides.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from dataclasses import dataclass, field

from convoy.app.scheduling.latency import LatencyModel
from convoy.app.scheduling.request import MILLISECOND_NS, SECOND_NS, ModelKey, Request, Shape

NEVER_NS = 1 << 62
# Between models, a request without a deadline counts as due this long after its arrival. Otherwise requests with
# deadlines at one model could starve another model.
PATIENCE_NS = SECOND_NS
# Allowance for timers and threads that wake up late.
WAKING_NS = MILLISECOND_NS
# The level of requests that were moved to the front; the levels of models begin at 1.
RAISED_LEVEL = 0

# The sort key is the order of service: (level, deadline, arrival, id).
Entry = tuple[int, int, int, int, Request]
# Requests of one group can share a batch: equal shapes, or the first id of half of a failed batch.
Group = tuple[Shape, ...] | int


def _unknown_staging() -> LatencyModel:
    """One millisecond for every batch size: the first batches may start a little too early."""
    return LatencyModel({1: MILLISECOND_NS, 1024: MILLISECOND_NS})


@dataclass(slots=True, eq=False)
class Lane:
    """What scheduling knows about an engine.

    `batch_sizes` is ascending; a batch is padded to the next size. Up to `depth` batches may be in flight. With two,
    the staging of one (everything before computing) overlaps with the computation of the other. `staging` predicts its
    time.
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
        """The batch size that `samples` are padded to, at most the largest."""
        return self.batch_sizes[bisect_left(self.batch_sizes, samples, hi=len(self.batch_sizes) - 1)]

    def expect_ns(self, samples: int) -> int:
        """The expected time from start to answers on an idle device, without a margin."""
        return self.latency.expect_ns(self.padded(samples))

    def hidden_ns(self, samples: int) -> int:
        """The part of that time that overlaps with another batch; at most half, because batches take turns."""
        if self.depth == 1:
            return 0
        return min(self.staging.expect_ns(self.padded(samples)), self.expect_ns(samples) // 2)

    def behind_ns(self, samples: int) -> int:
        """The predicted time from the end of the previous batch to the end of this one, with a margin."""
        return self.latency.predict_ns(self.padded(samples)) - self.hidden_ns(samples)

    def lead_ns(self, samples: int) -> int:
        """How long before the device is free a batch must start so that the device does not wait."""
        return int(1.25 * self.staging.expect_ns(self.padded(samples))) + WAKING_NS


@dataclass(slots=True, eq=False)
class Dispatch:
    """Requests that run as one batch on a lane and have left the queue.

    The predictions are from its start: it can compute from `ready_ns` on, then takes `takes_ns`, at least `soonest_ns`,
    and ends `predicted_ns` after its start.
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
    """The batches in flight on a device, in the order in which they compute, and when the device will be free.

    Batches compute one after the other, on whichever lane; the copies of one overlap with the computation of the one
    before. `begun_ns` is the end of the last batch. After `batches_to_overdue` more batches, and not before
    `look_for_overdue_ns`, overdue requests may go first.
    """

    begun_ns: int = 0
    batches: list[Dispatch] = field(default_factory=list)
    batches_to_overdue: int = 0
    look_for_overdue_ns: int = 0

    def free_at_ns(self, now_ns: int) -> int:
        """When everything in flight is expected to have ended; now if nothing is in flight."""
        if not self.batches:
            return now_ns
        ends_ns = self.begun_ns
        for one in self.batches:
            ends_ns = max(ends_ns, one.ready_ns) + one.takes_ns
            if one is self.batches[0]:
                # A batch that is late by a minute will probably take another minute.
                ends_ns = max(ends_ns, 2 * now_ns - ends_ns)
        return max(now_ns, ends_ns)

    def may_be_free_ns(self, now_ns: int) -> int:
        """The earliest time at which everything in flight may have ended."""
        ends_ns = self.begun_ns
        for one in self.batches:
            ends_ns = max(ends_ns, one.ready_ns) + one.soonest_ns
        return max(now_ns, ends_ns)


@dataclass(slots=True, eq=False)
class LaneForecast:
    """Predicts the end of a batch that a lane starts now. The device is free at `free_ns`."""

    lane: Lane
    timeline: Timeline
    now_ns: int
    free_ns: int

    def ends_ns(self, samples: int) -> int:
        """The predicted end, with a margin."""
        can_compute_ns = max(self.free_ns, self.now_ns + self.lane.hidden_ns(samples))
        return can_compute_ns + self.lane.behind_ns(samples)

    def expected_end_ns(self, samples: int) -> int:
        """The expected end without a margin, to compare lanes."""
        hidden_ns = self.lane.hidden_ns(samples)
        return max(self.free_ns, self.now_ns + hidden_ns) + self.lane.expect_ns(samples) - hidden_ns


def level_of(priority: int, levels: int, default_level: int) -> int:
    """The level of a priority for a model with `levels` levels."""
    return priority if 1 <= priority <= levels else default_level


def urgency(entry: Entry) -> tuple[int, int, int]:
    """The order between requests that cannot share a batch."""
    level, due_ns, arrival_ns, number, _ = entry
    return (level, arrival_ns + PATIENCE_NS if due_ns == NEVER_NS else due_ns, number)


@dataclass(slots=True, eq=False)
class Queue:
    """The requests that wait for one version of one model. `max_waiting` and `waiting` are in samples.

    `levels` and `default_level` map priorities to levels. `raised` maps the ids of requests that were moved to the
    front to their groups. `dated` counts the waiting requests with a deadline. `given_up_alone` counts the requests
    that were late and alone in the queue while another model waited; some of them ran to check the latency model.
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
        """The request's position in the order of service."""
        level = RAISED_LEVEL
        if request.id not in self.raised:
            level = level_of(request.priority, self.levels, self.default_level)
        deadline_ns = NEVER_NS if request.deadline_ns is None else request.deadline_ns
        return (level, deadline_ns, request.arrival_ns, request.id, request)

    def put_in_order(self) -> None:
        """Sort again after the levels have changed."""
        for entries in self.groups.values():
            entries[:] = sorted([self.order_of(entry[-1]) for entry in entries])

    @property
    def requests(self) -> int:
        """How many requests wait."""
        return sum(map(len, self.groups.values()))

    @property
    def usable_lanes(self) -> list[Lane]:
        return [lane for lane in self.lanes if not lane.stopping]


@dataclass(slots=True)
class State:
    """All queues and lanes.

    `device_slots` bounds the batches in flight per device, which compute one after the other. A device that is not in
    it is unbounded, as if each of its lanes had its own device. `waiting` maps ids to requests in the order of arrival;
    `expiries` has their (time, id), sorted.
    """

    device_slots: dict[str, int] = field(default_factory=dict)
    queues: dict[ModelKey, Queue] = field(default_factory=dict)
    waiting: dict[int, Request] = field(default_factory=dict)
    timelines: defaultdict[str | int, Timeline] = field(default_factory=lambda: defaultdict(Timeline))
    expiries: list[tuple[int, int]] = field(default_factory=list)

    def timeline(self, lane: Lane) -> Timeline:
        """The timeline of the lane's device, or its own if the device is unbounded."""
        return self.timelines[lane.device if lane.device in self.device_slots else lane.id]

    def has_room(self, lane: Lane) -> bool:
        """Whether the lane can take a batch."""
        if lane.stopping or lane.in_flight >= lane.depth:
            return False
        slots = self.device_slots.get(lane.device)
        if slots is None:
            return True
        # Canaries count as well, although they are in no timeline.
        lanes = (one for queue in self.queues.values() for one in queue.lanes if one.device == lane.device)
        return sum(one.in_flight for one in lanes) < slots

    def is_idle(self, queue: Queue) -> bool:
        """Whether a request that arrives now would compute at once."""
        if queue.waiting:
            return False
        return any(self.has_room(lane) and not self.timeline(lane).batches for lane in queue.lanes)

    def forecast(self, lane: Lane, now_ns: int) -> LaneForecast:
        timeline = self.timeline(lane)
        return LaneForecast(lane, timeline, now_ns, timeline.free_at_ns(now_ns))

    def beside(self, queue: Queue, lane: Lane) -> list[tuple[Queue, Lane]]:
        """The other queues with requests for the lane's device, each with one of its lanes there."""
        timeline = self.timeline(lane)
        found: list[tuple[Queue, Lane]] = []
        for other in self.queues.values():
            theirs = [one for one in other.usable_lanes if self.timeline(one) is timeline]
            if theirs and other.waiting and other is not queue:
                found.append((other, theirs[0]))
        return found

    def drop_lane(self, queue: Queue, lane: Lane) -> None:
        """Remove the lane and its batches."""
        queue.lanes.remove(lane)
        timeline = self.timeline(lane)
        timeline.batches = [one for one in timeline.batches if one.lane is not lane]

    def enqueue(self, request: Request) -> None:
        """Add the request to its queue, in order."""
        queue = self.queues[request.key]
        group = queue.raised.get(request.id, request.shapes)
        insort(queue.groups.setdefault(group, []), queue.order_of(request))
        self.waiting[request.id] = request
        queue.waiting += request.samples
        queue.dated += request.deadline_ns is not None
        if request.expiry_ns is not None:
            insort(self.expiries, (request.expiry_ns, request.id))

    def enqueue_halves(self, requests: tuple[Request, ...]) -> None:
        """Queue both halves of a failed batch at the front; each runs as its own batch."""
        middle = len(requests) // 2
        for half in (requests[:middle], requests[middle:]):
            for request in half:
                self.queues[request.key].raised[request.id] = half[0].id
                self.enqueue(request)

    def remove(self, request: Request) -> None:
        """Remove a waiting request from its queue. Raises KeyError if it does not wait."""
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
        """Move waiting requests of equal shapes to the front of their queue."""
        for request in requests:
            self.remove(request)
            self.queues[request.key].raised[request.id] = request.shapes
            self.enqueue(request)

    def take_expired(self, now_ns: int) -> tuple[Request, ...]:
        """Remove and return the requests that have expired."""
        end = bisect_right(self.expiries, (now_ns, NEVER_NS))
        expired = tuple([self.waiting[number] for _, number in self.expiries[:end]])
        for request in expired:
            self.remove(request)
        return expired


def count_samples(requests: tuple[Request, ...]) -> int:
    return sum([request.samples for request in requests])
