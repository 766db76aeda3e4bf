"""The scheduler: threads, timers and slots around the pure policy.

One event loop owns all state. Each lane has its own threads, which run a batch and pass the result back to the loop.
They share nothing but the bytes in the slots. The scheduler owns a request's slots from `submit` until the request is
done. An answered request returns them to the caller; every other outcome frees them as soon as no engine can use them
any more.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVarTuple

from convoy.app.engines.batch import BatchResult, BatchTrace, EngineFailure, FailureScope
from convoy.app.scheduling.policy import Drop, Refuse, Wait, admit, blame, complete, decide, learn
from convoy.app.scheduling.queues import Dispatch, Lane, Queue, State
from convoy.app.scheduling.request import SECOND_NS, Done, ModelKey, Outcome, Request
from convoy.app.scheduling.slab import Slab, SlotState

Args = TypeVarTuple("Args")


def tell(listener: Callable[[*Args], None], *args: *Args) -> None:
    """Call a listener on the event loop. Exceptions go to the loop's exception handler."""
    try:
        listener(*args)
    except Exception as error:
        tell_bug(repr(listener), error)


def tell_bug(what: str, error: Exception) -> None:
    """Report a bug to the event loop's exception handler, which logs it."""
    context = {"message": f"{what} failed; this is a bug", "exception": error}
    asyncio.get_running_loop().call_exception_handler(context)


# Runs a batch in the lane's thread. Raises EngineFailure.
Runner = Callable[[tuple[Request, ...]], BatchResult]
# Called on the loop with the result or exception of a job, and the time of its end.
OnEnd = Callable[[Any, int], None]
_Job = tuple[Callable[[], object], OnEnd]
# Makes the span of a batch from its start, end and result. Returns None if no request of it is traced.
TraceBatch = Callable[[Dispatch, int, int, BatchResult | EngineFailure], BatchTrace | None]


class Observer(Protocol):
    """Receives events on the loop: one per batch, per lost lane, and per request without an answer.

    In `batch_ran`, `done` are the requests whose callers still waited, and `now_ns` is the time of their answers. A
    request whose caller has left is not reported as failed. `scope` says whether a lane was lost alone or with its
    device.
    """

    def batch_ran(self, dispatch: Dispatch, answers: BatchResult, done: list[Done], now_ns: int) -> None: ...

    def batch_failed(self, dispatch: Dispatch, reason: str) -> None: ...

    def request_failed(self, done: Done) -> None: ...

    def lane_lost(self, key: ModelKey, lane: Lane, reason: str, scope: FailureScope) -> None: ...


@dataclass(slots=True, eq=False)
class _Pending:
    """A request that waits or runs. Its future is cancelled when the caller leaves."""

    submitted_ns: int
    future: asyncio.Future[Done]
    was_split: bool = False  # the batch was halved once because memory was short


@dataclass(slots=True, eq=False)
class Running:
    """A batch in an engine. `lost` means that its lane was given up: if it still returns, only its slots are freed."""

    dispatch: Dispatch
    started_ns: int
    lost: bool = False


@dataclass(slots=True, eq=False)
class _LaneEntry:
    """A lane and its threads. `jobs` holds functions to run, each with a callback for its end."""

    lane: Lane
    key: ModelKey
    run: Runner
    jobs: queue.SimpleQueue[_Job | None] = field(default_factory=queue.SimpleQueue)
    running: list[Running] = field(default_factory=list)
    jobs_out: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # set while no thread is in the engine
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # the same, and also set when the lane is given up

    def give(self, function: Callable[[], object], on_end: OnEnd) -> None:
        """Run a function in one of the lane's threads."""
        self.jobs_out += 1
        self.idle.clear()
        self.ended.clear()
        self.jobs.put((function, on_end))


class Scheduler:
    """Runs requests in batches on lanes and reports exactly once how each ended.

    It has the only table of waiting and running requests.
    """

    def __init__(self, slab: Slab, observer: Observer, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.state = State()
        self._slab = slab
        self._observer = observer
        self._now_ns = now_ns
        self._pending: dict[int, _Pending] = {}
        self._lanes: dict[int, _LaneEntry] = {}
        self._lost: dict[int, _LaneEntry] = {}  # given up while a thread is in the engine
        self._pump_is_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0
        self.trace_batch: TraceBatch | None = None

    # Queues and lanes

    def add_queue(
        self, key: ModelKey, *, max_batch: int, max_waiting: int, levels: int = 1, default_level: int = 1
    ) -> None:
        self.state.queues[key] = Queue(key, max_batch, max_waiting, levels, default_level)

    def change_queue(self, key: ModelKey, *, max_waiting: int, levels: int, default_level: int) -> None:
        """Change the limits and levels. Waiting requests stay and are sorted again."""
        queue = self.state.queues[key]
        queue.max_waiting, queue.levels, queue.default_level = max_waiting, levels, default_level
        queue.put_in_order()
        self._wake()

    def remove_queue(self, key: ModelKey, reason: str) -> None:
        """Remove a queue whose lanes have been stopped. Requests that still wait end with `reason`."""
        waiting = tuple(request for request in self.state.waiting.values() if request.key == key)
        for request in waiting:
            self.state.remove(request)
            self._end(request, Outcome.STOPPED, reason)
        del self.state.queues[key]

    def add_lane(self, key: ModelKey, lane: Lane, run: Runner) -> None:
        """Add a lane to a queue and start its threads."""
        entry = _LaneEntry(lane, key, run)
        entry.ended.set()
        self._lanes[lane.id] = entry
        work = entry.jobs, asyncio.get_running_loop(), self._now_ns
        for number in range(lane.depth):
            threading.Thread(target=_work, args=work, name=f"lane-{lane.id}.{number}", daemon=True).start()
        self.state.queues[key].lanes.append(lane)
        self._wake()

    async def stop_lane(self, lane: Lane, within_s: float | None = None) -> bool:
        """Stop giving work to the lane and wait until it has none.

        Returns True to exactly one caller, who may then close the engine. Returns False if the lane was given up, if
        another caller has stopped it, or if it still has work after `within_s`.
        """
        entry = self._lanes.get(lane.id)
        if entry is None:
            return False
        lane.stopping = True
        try:
            async with asyncio.timeout(within_s):
                await entry.ended.wait()
        except TimeoutError:
            return False
        if lane.id not in self._lanes:
            return False
        self._forget(entry)
        return True

    def give_up_lane(self, lane: Lane, reason: str, scope: FailureScope = FailureScope.ENGINE) -> None:
        """Abandon a lane that hangs. Its requests end now; their slots stay in use until it returns.

        Does nothing if the lane is already gone.
        """
        entry = self._lanes.get(lane.id)
        if entry is None:
            return
        lane.stopping = True
        self._forget(entry)
        if entry.jobs_out:
            self._lost[lane.id] = entry
        entry.ended.set()
        for running in entry.running:
            running.lost = True
            for request in running.dispatch.requests:
                self._tell(request, Done(request, Outcome.ENGINE_LOST, reason=reason))
        tell(self._observer.lane_lost, entry.key, lane, reason, scope)
        self._wake()

    def give_up_device(self, device: str, reason: str) -> None:
        """Abandon every lane of a device."""
        for entry in [entry for entry in self._lanes.values() if entry.lane.device == device]:
            self.give_up_lane(entry.lane, reason, FailureScope.DEVICE)

    def has_returned(self, lane: Lane) -> bool:
        """Whether all threads have left the engine of an abandoned lane."""
        return lane.id not in self._lost

    async def until_returned(self, lane: Lane) -> None:
        """Wait until all threads have left the engine of an abandoned lane, which may never happen."""
        entry = self._lost.get(lane.id)
        if entry is not None:
            await entry.idle.wait()

    async def probe(self, lane: Lane, job: Callable[[], object]) -> None:
        """Run a job in the lane's thread like a batch. Raises what the job raises."""
        entry = self._lanes[lane.id]
        finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_end(result: object, ended_ns: int) -> None:
            lane.in_flight -= 1
            self._take_back(entry)
            self._wake()
            if finished.done():
                return
            if isinstance(result, Exception):
                finished.set_exception(result)
            else:
                finished.set_result(None)

        lane.in_flight += 1
        entry.give(job, on_end)
        await finished

    def running(self) -> Iterator[tuple[Lane, Running]]:
        """All batches that are in an engine now."""
        return ((entry.lane, running) for entry in self._lanes.values() for running in entry.running)

    # Requests

    def submit(self, request: Request) -> asyncio.Future[Done] | Refuse:
        """Queue the request, whose slots must be FILLING, or return why it is refused.

        If it is refused, the caller keeps the slots. If you cancel the future, call `cancel` as well.
        """
        now_ns = self._now_ns()
        refusal = admit(self.state, request, now_ns)
        if refusal is not None:
            return refusal
        future: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self._pending[request.id] = _Pending(now_ns, future)
        self._slab.move(request.slots, SlotState.QUEUED)
        self._wake()
        return future

    def cancel(self, request: Request) -> None:
        """Cancel a request. It leaves the queue; a running batch continues for its other requests.

        The observer is not called. Does nothing for a request that has ended.
        """
        pending = self._pending.get(request.id)
        if pending is None:
            return
        pending.future.cancel()
        if request.id in self.state.waiting:
            self.state.remove(request)
            del self._pending[request.id]
            self._free(request)

    @property
    def unfinished(self) -> int:
        """How many requests wait or run."""
        return len(self._pending)

    def waiting_samples(self, key: ModelKey) -> int:
        """How many samples wait for a version; 0 if it has no queue."""
        queue = self.state.queues.get(key)
        return queue.waiting if queue is not None else 0

    # On the loop

    def _wake(self) -> None:
        # Once per iteration of the loop, so that requests of one iteration share a batch.
        if self.state.waiting and not self._pump_is_due:
            self._pump_is_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_is_due = False
        self._decide_all()

    def _decide_all(self) -> None:
        while True:
            match decide(self.state, self._now_ns()):
                case Dispatch() as dispatch:
                    self._start(dispatch)
                case Drop(requests, outcome):
                    for request in requests:
                        self._end(request, outcome, "")
                case Wait(until_ns):
                    self._set_timer(until_ns)
                    return

    def _set_timer(self, until_ns: int | None) -> None:
        if self._timer is not None:
            if until_ns == self._timer_ns:
                return
            self._timer.cancel()
            self._timer = None
        if until_ns is not None:
            self._timer_ns = until_ns
            delay_s = max(0, until_ns - self._now_ns()) / SECOND_NS
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        self._wake()

    def _start(self, dispatch: Dispatch) -> None:
        entry = self._lanes[dispatch.lane.id]
        for request in dispatch.requests:
            self._slab.move(request.slots, SlotState.COPYING)
        running = Running(dispatch, self._now_ns())
        entry.running.append(running)
        entry.give(partial(entry.run, dispatch.requests), partial(self._finished, entry, running))

    def _finished(self, entry: _LaneEntry, running: Running, result: BatchResult | Exception, ended_ns: int) -> None:
        entry.running.remove(running)
        self._take_back(entry)
        dispatch = running.dispatch
        if running.lost:
            for request in dispatch.requests:
                self._free(request)
            return
        complete(self.state, dispatch, ended_ns)
        if isinstance(result, BatchResult):
            try:
                if self.state.queues[entry.key].waiting:
                    # Start the engine's next batch first: sending the answers occupies this thread.
                    self._decide_all()
            finally:  # an error there must not lose these answers
                self._answer(running, result, ended_ns)
            times = result.times
            took_ns = ended_ns - running.started_ns - times.waited_ns
            learn(dispatch, took_ns, took_ns - times.compute_ns - times.copy_out_ns)
        elif isinstance(result, EngineFailure):
            self._blame(entry, running, result, ended_ns)
        else:
            self._blame(entry, running, EngineFailure(f"{type(result).__name__}: {result}"), ended_ns)
        self._wake()

    def _answer(self, running: Running, result: BatchResult, ended_ns: int) -> None:
        dispatch, times = running.dispatch, result.times
        ended: list[Done] = []
        batch = self._traced(running, result, ended_ns)
        # The wait for the device inside the engine counts as queueing.
        began_ns = running.started_ns + times.waited_ns
        for request, answers in zip(dispatch.requests, result.answers, strict=True):
            pending = self._pending.pop(request.id)
            if pending.future.done():
                self._free(request)
                continue
            queue_ns = began_ns - pending.submitted_ns
            done = Done(request, Outcome.ANSWERED, answers, times, queue_ns, dispatch.samples, "", batch)
            ended.append(done)
            self._slab.move(request.slots, SlotState.ANSWERED)
            pending.future.set_result(done)
        tell(self._observer.batch_ran, dispatch, result, ended, self._now_ns())

    def _traced(self, running: Running, result: BatchResult | EngineFailure, ended_ns: int) -> BatchTrace | None:
        if self.trace_batch is None:
            return None
        try:
            return self.trace_batch(running.dispatch, running.started_ns, ended_ns, result)
        except Exception as error:  # an answer must not be lost because tracing failed
            tell_bug("tracing a batch", error)
            return None

    def _blame(self, entry: _LaneEntry, running: Running, failure: EngineFailure, ended_ns: int) -> None:
        dispatch, reason = running.dispatch, str(failure)
        batch = self._traced(running, failure, ended_ns)
        tell(self._observer.batch_failed, dispatch, reason)
        if failure.scope in (FailureScope.ENGINE, FailureScope.DEVICE):
            for request in dispatch.requests:
                self._end(request, Outcome.ENGINE_LOST, reason, batch)
            if failure.scope is FailureScope.DEVICE:
                self.give_up_device(entry.lane.device, reason)
            else:
                self.give_up_lane(entry.lane, reason)
            return
        for request in dispatch.requests:
            if self._pending[request.id].future.done():
                self._end(request, Outcome.STOPPED, "cancelled")
        suspects = tuple([request for request in dispatch.requests if request.id in self._pending])
        # Retry in halves, down to the request that fails alone; only once if memory was short.
        is_memory = failure.scope is FailureScope.MEMORY
        was_split = is_memory and any(self._pending[request.id].was_split for request in suspects)
        for request in suspects if was_split else blame(self.state, dispatch, suspects):
            self._end(request, Outcome.NO_MEMORY if is_memory else Outcome.MODEL_FAILED, reason, batch)
        for request in suspects:
            if request.id in self._pending:
                self._pending[request.id].was_split |= is_memory
                self._slab.move(request.slots, SlotState.QUEUED)

    # Endings

    def _end(self, request: Request, outcome: Outcome, reason: str, batch: BatchTrace | None = None) -> None:
        self._free(request)
        self._tell(request, Done(request, outcome, reason=reason, batch=batch))

    def _tell(self, request: Request, done: Done) -> None:
        pending = self._pending.pop(request.id, None)
        if pending is None or pending.future.done():
            return
        tell(self._observer.request_failed, done)
        pending.future.set_result(done)

    def _free(self, request: Request) -> None:
        self._slab.free(*request.slots)

    def _take_back(self, entry: _LaneEntry) -> None:
        """Count a job that has returned from its thread."""
        entry.jobs_out -= 1
        if not entry.jobs_out:
            entry.idle.set()
            entry.ended.set()
            self._lost.pop(entry.lane.id, None)

    def _forget(self, entry: _LaneEntry) -> None:
        for _ in range(entry.lane.depth):
            entry.jobs.put(None)
        del self._lanes[entry.lane.id]
        self.state.drop_lane(self.state.queues[entry.key], entry.lane)


def _work(jobs: queue.SimpleQueue[_Job | None], loop: asyncio.AbstractEventLoop, now_ns: Callable[[], int]) -> None:
    """The loop of a lane's thread."""
    while (job := jobs.get()) is not None:
        function, on_end = job
        # A lane that hung may return after the loop was closed.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(on_end, _result(function), now_ns())


def _result(function: Callable[[], object]) -> object:
    """Return the result or the exception: an engine's error must not end the thread."""
    try:
        return function()
    except Exception as error:
        return error
