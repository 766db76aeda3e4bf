"""Simulates the policy of the server in virtual time, with engines of known latency.

It calls `admit`, `decide`, `complete` and `blame` as the scheduler does. All events of one time happen before the next
decisions, and a batch ends after the true latency of its lane. Lanes on a bounded device compute one after the other,
and copy while another one computes. The simulation records the end of every request and batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from convoy.app.scheduling.latency import LatencyModel
from convoy.app.scheduling.policy import Drop, Refuse, Wait, admit, blame, complete, decide, learn
from convoy.app.scheduling.queues import Dispatch, Lane, Queue, State
from convoy.app.scheduling.request import ModelKey, Outcome, Request

# The time of a batch of that many samples on a lane, if it starts at this time.
TrueLatency = Callable[[int, int], float]


@dataclass(frozen=True, slots=True)
class End:
    """The end of a request. `outcome` is None if the client left, and a Refuse if it was refused."""

    request: Request
    outcome: Outcome | Refuse | None
    at_ns: int

    @property
    def good(self) -> bool:
        """Whether it was answered in time."""
        deadline_ns = self.request.deadline_ns
        return self.outcome is Outcome.ANSWERED and (deadline_ns is None or self.at_ns <= deadline_ns)

    @property
    def latency_ns(self) -> int:
        return self.at_ns - self.request.arrival_ns


@dataclass(frozen=True, slots=True)
class Batch:
    """One run of a lane, successful or not, which computed from `began_ns` on."""

    dispatch: Dispatch
    started_ns: int
    ended_ns: int
    began_ns: int = 0


@dataclass(slots=True)
class Simulation:
    """Add models, lanes and arrivals, then call `run`.

    `poisonous` has the ids of requests that make their batch fail. `on_dispatch` is called with each batch before it
    runs, `on_rest` after all decisions of one time.
    """

    state: State = field(default_factory=State)
    now_ns: int = 0
    ends: dict[int, End] = field(default_factory=dict)
    batches: list[Batch] = field(default_factory=list)
    poisonous: set[int] = field(default_factory=set)
    on_dispatch: Callable[[Dispatch], None] = lambda dispatch: None
    on_rest: Callable[[], None] = lambda: None
    _left: set[int] = field(default_factory=set)
    _true_ns: dict[int, TrueLatency] = field(default_factory=dict)
    _staging_ns: dict[int, int] = field(default_factory=dict)
    _free_ns: dict[str | int, int] = field(default_factory=dict)
    _events: list[tuple[int, int, Callable[[], None]]] = field(default_factory=list)
    _sequence: int = 0
    _timer_ns: int | None = None

    def add_model(
        self, name: str, *, max_batch: int, max_waiting: int = 1 << 30, levels: int = 1, default_level: int = 1
    ) -> ModelKey:
        key = ModelKey(name, 1)
        self.state.queues[key] = Queue(key, max_batch, max_waiting, levels, default_level)
        return key

    def add_lane(
        self,
        key: ModelKey,
        true_ns: TrueLatency,
        *,
        batch_sizes: tuple[int, ...] | None = None,
        latency: LatencyModel | None = None,
        device: str = "device",
        depth: int = 1,
        staging_ns: int = 0,
    ) -> Lane:
        """Add a lane that takes `true_ns`; `staging_ns` of it can overlap with another batch.

        By default its profile has the true latencies at the powers of two.
        """
        queue = self.state.queues[key]
        sizes = batch_sizes or tuple(range(1, queue.max_batch + 1))
        if latency is None:
            powers = (1 << bit for bit in range(sizes[-1].bit_length()))
            latency = LatencyModel({size: true_ns(size, 0) for size in powers})
        lane_id = len(self._true_ns)
        lane = Lane(lane_id, device, sizes, latency, depth)
        self._true_ns[lane_id] = true_ns
        self._staging_ns[lane_id] = staging_ns
        queue.lanes.append(lane)
        return lane

    def at(self, when_ns: int, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_ns, self._sequence, event))
        self._sequence += 1

    def arrive(self, request: Request) -> None:
        """Let the request arrive at its arrival time."""
        self.at(request.arrival_ns, lambda: self._admit(request))

    def leave(self, request: Request, when_ns: int) -> None:
        """Let the client of the request leave at a time."""
        self.at(when_ns, lambda: self._cancel(request))

    def feed(self, requests: Iterable[Request]) -> None:
        """Let requests arrive from an iterable, which is read one at a time, in order of arrival."""
        stream = iter(requests)

        def next_one() -> None:
            request = next(stream, None)
            if request is not None:
                self.at(request.arrival_ns, lambda: come(request))

        def come(request: Request) -> None:
            self._admit(request)
            next_one()

        next_one()

    def run(self, until_ns: int | None = None) -> None:
        """Run until there are no more events, or until a time."""
        while self._events and (until_ns is None or self._events[0][0] <= until_ns):
            self.now_ns = self._events[0][0]
            while self._events and self._events[0][0] == self.now_ns:
                heapq.heappop(self._events)[2]()
            self._pump()
        if until_ns is not None:
            self.now_ns = until_ns

    def _admit(self, request: Request) -> None:
        refusal = admit(self.state, request, self.now_ns)
        if refusal is not None:
            self._end(request, refusal)

    def _cancel(self, request: Request) -> None:
        if request.id in self.ends:
            return
        if request.id in self.state.waiting:
            self.state.remove(request)
            self._end(request, None)
        else:
            self._left.add(request.id)

    def _pump(self) -> None:
        while True:
            match decide(self.state, self.now_ns):
                case Dispatch() as dispatch:
                    self._start(dispatch)
                case Drop(requests, outcome):
                    for request in requests:
                        self._end(request, outcome)
                case Wait(until_ns):
                    if until_ns not in (None, self._timer_ns):
                        self.at(until_ns, lambda: None)
                        self._timer_ns = until_ns
                    self.on_rest()
                    return

    def _start(self, dispatch: Dispatch) -> None:
        self.on_dispatch(dispatch)
        lane = dispatch.lane
        device = lane.device if lane.device in self.state.device_slots else lane.id
        began_ns = max(self.now_ns + self._staging_ns[lane.id], self._free_ns.get(device, 0))
        took_ns = max(1, round(self._true_ns[lane.id](lane.padded(dispatch.samples), began_ns)))
        ended_ns = began_ns + took_ns - self._staging_ns[lane.id]
        self._free_ns[device] = ended_ns
        batch = Batch(dispatch, self.now_ns, ended_ns, began_ns)
        self.batches.append(batch)
        self.at(ended_ns, lambda: self._finish(batch))

    def _finish(self, batch: Batch) -> None:
        dispatch = batch.dispatch
        staging_ns = self._staging_ns[dispatch.lane.id]
        took_ns = batch.ended_ns - batch.began_ns + staging_ns
        failed = any(request.id in self.poisonous for request in dispatch.requests)
        complete(self.state, dispatch, self.now_ns)
        if not failed:
            learn(dispatch, took_ns, staging_ns)
        wanted = tuple(request for request in dispatch.requests if request.id not in self._left)
        for request in dispatch.requests:
            if request not in wanted:
                self._end(request, None)
        if not failed:
            for request in wanted:
                self._end(request, Outcome.ANSWERED)
        else:
            for request in blame(self.state, dispatch, wanted):
                self._end(request, Outcome.MODEL_FAILED)

    def _end(self, request: Request, outcome: Outcome | Refuse | None) -> None:
        assert request.id not in self.ends, f"request {request.id} ended twice"
        self.ends[request.id] = End(request, outcome, self.now_ns)
