"""The shell around the policy: threads, timers and slots, so that the policy needs none.

One event loop owns all state. Each lane has threads of its own, which run a batch and hand the result
back to the loop; nothing is shared between them but the bytes in the slots. Slots belong to the scheduler
from `submit` until the request is done; an answered request gives them back to the caller, every other
outcome frees them, as soon as no engine can touch them any more.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from convoy.app.batch import BatchResult, BatchTrace, EngineFailure, FailureScope
from convoy.app.listeners import tell, tell_bug
from convoy.app.scheduling.gathering import Arrival
from convoy.app.scheduling.policy import Decision, Dispatch, Drop, Refuse, Wait, admit, blame, complete, decide, learn
from convoy.app.scheduling.queues import Lane, Queue, State
from convoy.app.scheduling.request import SECOND_NS, Done, ModelKey, Outcome, Request, SlotRef
from convoy.app.scheduling.slab import Slab, SlotState

OnDone = Callable[[Done], None]
# What a lane runs batches with; called in the lane's thread. Raises EngineFailure.
Runner = Callable[[tuple[Request, ...]], BatchResult]
# The span of a batch that began then, and ended then with that; None where none of its requests is traced.
TraceBatch = Callable[[Dispatch, int, int, BatchResult | EngineFailure], BatchTrace | None]
# Batches that run on the loop itself may follow each other for so long before sockets and other lanes have a turn.
_TURN_NS = 2_000_000
# So many answers to give, and so many requests that wait: then a short batch is worth a thread, too. Fewer would be
# parsed and answered in the time that two threads need to take turns.
_WORTH_A_THREAD = 16
# A thread gains at most what the engine has of a sample's time, and that both take turns at the interpreter costs up to
# 60 us a sample. Where the engine has less than a fifth, a batch of up to twice the usual limit runs on the loop: with
# PNGs on 64 connections 1.11 times the rate for 0.77 of the CPU. With tensors it has two fifths: a thread gains 9 %.
_LITTLE_OF_IT = 5
_LONGER = 2
# Where a thread costs more than it can gain, a quarter of the time and four times the limit: 1.15 and 1.27 times the
# rate of the same for 0.85 and 0.69 of the CPU. With JPEGs, of which the engine has more, it would be 0.9 times.
_TAKING_TURNS_NS = 60_000
_PART_IF_DEARER = 4
_LONGER_IF_DEARER = 4
# Clients that are answered together ask again while the loop reads from the first of them. Where the engine has at most
# a third of a sample's time, and would run on the loop, a batch begins when a turn has brought nothing more, or the
# second one ends: with PNGs on 4 and 16 connections 1.34 and 1.12 times the rate for 0.75 and 0.9 of the CPU.
_SMALL_PART = 3
_MOST_TURNS = 2
# Of requests that come one after the other, however many there are, it does not begin before enough have come together,
# by the rules of `gathering`, or one has waited for so long. With gRPC on 16 connections each had a batch of its own;
# now nine share one. Half as long again costs 0.93 of the CPU on 64 connections, and 1.1 times as much on 16.
_HELD_NS = 2_000_000
# Turns in which many pictures are read are long; nobody who has no more time than this is to wait for them.
_HURRY_NS = 50_000_000
# How far the time of a sample is believed to differ from the engine's share, where nobody asked for a while.
_MOST_OF_IT = 10
_PACE_WEIGHT = 1 / 8


class Observer(Protocol):
    """Who wants to know what happened; called on the loop, once per batch, lane lost and request without an answer.

    Of a batch that ran `done` are the requests that somebody still waited for, at `now_ns`; they have their answers,
    which are not to wait for what is written down of them. A request that nobody waits for has no failure, either. A
    lane is lost alone, or with its whole device.
    """

    def batch_ran(self, dispatch: Dispatch, answers: BatchResult, done: list[Done], now_ns: int) -> None: ...

    def batch_failed(self, dispatch: Dispatch, reason: str) -> None: ...

    def request_failed(self, done: Done) -> None: ...

    def lane_lost(self, key: ModelKey, lane: Lane, reason: str, scope: FailureScope) -> None: ...


@dataclass(slots=True, eq=False)
class _Pending(Arrival):
    """A request that waits or runs. `busy_ns` is 0 unless it comes alone."""

    on_done: OnDone | None  # None once nobody waits for the answer any more
    was_split: bool = False  # its batch was halved for want of memory, which is done once


@dataclass(slots=True, eq=False)
class Running:
    """A batch in an engine. `lost`: its lane was given up; when it returns after all, only its slots matter.

    One that `is_behind` waits for its thread to end another, and has not started before.
    """

    dispatch: Dispatch
    started_ns: int
    is_behind: bool
    lost: bool = False


@dataclass(slots=True)
class _LaneEntry:
    lane: Lane
    key: ModelKey
    run: Runner
    here_below_ns: int = 0  # a batch that is expected to take no longer need not wait for a thread
    jobs: queue.SimpleQueue[Callable[[], None] | None] = field(default_factory=queue.SimpleQueue)
    running: list[Running] = field(default_factory=list)
    jobs_out: int = 0
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)  # which owns all of this
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # no thread is in the engine
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # the same, or the lane was given up
    last_end_ns: int = 0  # of a batch
    sample_ns: float = 0.0  # from one sample's end to the next one's, of late

    def runs_here(self, samples: int) -> bool:
        """Whether a batch of so many need not wait for a thread."""
        took_ns = self.lane.expect_ns(samples)
        if took_ns <= self.here_below_ns:
            return True
        if took_ns <= samples * _TAKING_TURNS_NS:
            return took_ns <= _LONGER_IF_DEARER * self.here_below_ns and self.is_part(_PART_IF_DEARER, samples)
        return took_ns <= _LONGER * self.here_below_ns and self.is_part(_LITTLE_OF_IT, samples)

    def is_part(self, part: int, samples: int) -> bool:
        """Whether of a sample's time at most a `part`-th goes to the engine."""
        return self.lane.expect_ns(samples) * part <= samples * self.sample_ns

    def batch_ended(self, ended_ns: int, took_ns: int, samples: int) -> None:
        """Learn how fast samples follow each other."""
        since_ns, self.last_end_ns = ended_ns - self.last_end_ns, ended_ns
        self.sample_ns += _PACE_WEIGHT * (min(since_ns, _MOST_OF_IT * took_ns) / samples - self.sample_ns)

    def begin(self) -> None:
        """The engine is in use from here to `take_back`."""
        self.jobs_out += 1
        self.idle.clear()
        self.ended.clear()

    def give(self, job: Callable[[], None]) -> None:
        self.begin()
        self.jobs.put(job)

    def take_back(self) -> None:
        """A job has come back from its thread, or has ended here."""
        self.jobs_out -= 1
        if not self.jobs_out:
            self.idle.set()
            self.ended.set()

    def call_loop(self, callback: Callable[[], None]) -> None:
        """From a thread of the lane's."""
        # A lane that hung may come back after the loop has been closed; then there is nobody to tell.
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(callback)


class Scheduler:
    """Takes requests, runs them in batches on lanes, and says how each ended, exactly once."""

    def __init__(
        self,
        slab: Slab,
        observer: Observer,
        now_ns: Callable[[], int] = time.monotonic_ns,
        busy_ns: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        """`busy_ns` is the CPU time of the thread that calls it, which is the loop's."""
        self.state = State()
        self._slab = slab
        self._observer = observer
        self._now_ns, self._busy_ns = now_ns, busy_ns
        self._pending: dict[int, _Pending] = {}
        self._lanes: dict[int, _LaneEntry] = {}
        self._lost: dict[int, _LaneEntry] = {}  # given up with a thread in their engines
        self._pump_is_due = False
        self._turns = self._waited = 0  # since the pump is due; and how many requests waited at the last of them
        # The next batch is held back for others; and has been for as long as it may be.
        self._is_held = self._was_held = False
        self.here_since_ns = 0  # when the batch that runs on the loop itself began; 0 when none does
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0
        self.trace_batch: TraceBatch | None = None

    # Queues and lanes

    def add_queue(
        self, key: ModelKey, *, max_batch: int, max_waiting: int, levels: int = 1, default_level: int = 1
    ) -> None:
        self.state.queues[key] = Queue(key, max_batch, max_waiting, levels, default_level)

    def change_queue(self, key: ModelKey, *, max_waiting: int, levels: int, default_level: int) -> None:
        """Let other rules hold from now on; who waits already stays, in the place that it would have by these."""
        queue = self.state.queues[key]
        queue.max_waiting, queue.levels, queue.default_level = max_waiting, levels, default_level
        queue.put_in_order()
        self._wake()

    def remove_queue(self, key: ModelKey, reason: str) -> None:
        """Forget the queue; who still waits in it is told `reason`. Its lanes must have been stopped."""
        waiting = tuple(request for request in self.state.waiting.values() if request.key == key)
        for request in waiting:
            self.state.remove(request)
            self._end(request, Outcome.STOPPED, reason)
        del self.state.queues[key]

    def add_lane(
        self,
        key: ModelKey,
        lane: Lane,
        run: Runner,
        *,
        here_below_ns: int = 0,
        on_thread: Callable[[], None] | None = None,
    ) -> None:
        """Let a lane work for a queue from now on.

        A batch that is expected to take at most `here_below_ns` is run by the loop's own thread: waking another
        one, being woken by it, and taking turns at the interpreter would take as long. Up to four times as much is run
        there where the engine has little of a sample's time. `on_thread` is what the lane's own threads begin with.
        """
        entry = _LaneEntry(lane, key, run, here_below_ns)
        entry.ended.set()
        self._lanes[lane.id] = entry
        for number in range(lane.depth):
            name = f"lane-{lane.id}.{number}"
            threading.Thread(target=_work, args=(entry.jobs, on_thread), name=name, daemon=True).start()
        self.state.queues[key].lanes.append(lane)
        self._wake()

    async def stop_lane(self, lane: Lane, within_s: float | None = None) -> bool:
        """Give the lane no more work and return when it has none.

        True to one caller, when its engine is free to be closed; False when the lane was given up, another caller has
        stopped it, or it still has work after `within_s`.
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
        """Stop counting on a lane that hangs. Its requests end now; their slots stay until it returns.

        Harmless for a lane that is gone already.
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
        """Stop counting on every lane of a device."""
        for entry in [entry for entry in self._lanes.values() if entry.lane.device == device]:
            self.give_up_lane(entry.lane, reason, FailureScope.DEVICE)

    def has_returned(self, lane: Lane) -> bool:
        """Whether no thread is in the engine of a lane that was given up."""
        return lane.id not in self._lost

    async def until_returned(self, lane: Lane) -> None:
        """Return when no thread is in the engine of a lane that was given up any more; that may be never."""
        entry = self._lost.get(lane.id)
        if entry is not None:
            await entry.idle.wait()

    async def probe(self, lane: Lane, job: Callable[[], None]) -> None:
        """Run a job of somebody else's in the lane's thread, as if it were a batch. Raises what it raises."""
        entry = self._lanes[lane.id]
        finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def work() -> None:
            failure: Exception | None = None
            try:
                job()
            except Exception as error:  # told to whoever asked for the probe
                failure = error
            entry.call_loop(lambda: self._probed(entry, finished, failure))

        lane.in_flight += 1
        entry.give(work)
        await finished

    def _probed(self, entry: _LaneEntry, finished: asyncio.Future[None], failure: Exception | None) -> None:
        entry.lane.in_flight -= 1
        self._take_back(entry)
        self._wake()
        if finished.done():
            return
        if failure is None:
            finished.set_result(None)
        else:
            finished.set_exception(failure)

    def running(self) -> Iterator[tuple[Lane, Running]]:
        """Every batch that is in an engine now."""
        return ((entry.lane, running) for entry in self._lanes.values() for running in entry.running)

    # Requests

    def submit(self, request: Request, on_done: OnDone) -> Refuse | None:
        """Take the request, whose slots must be FILLING; or say why not, and the slots stay the caller's."""
        now_ns = self._now_ns()
        verdict = admit(self.state, request, now_ns)
        if isinstance(verdict, Refuse):
            return verdict
        self._pending[request.id] = _Pending(now_ns, self._busy_ns() if request.comes_alone else 0, on_done)
        self._slab.move(request.slots, SlotState.QUEUED)
        self._wake()
        return None

    def cancel(self, request_id: int) -> bool:
        """Nobody waits for this answer any more; whether somebody did until now. The observer hears nothing of it."""
        pending = self._pending.get(request_id)
        if pending is None or pending.on_done is None:
            return False
        request = self.state.waiting.get(request_id)
        if request is None:  # it runs
            pending.on_done = None
            return True
        self.state.remove(request)
        del self._pending[request_id]
        self._free(request)
        return True

    @property
    def unfinished(self) -> int:
        """How many requests wait or run."""
        return len(self._pending)

    def waiting_samples(self, key: ModelKey) -> int:
        """How many samples wait for a version; none for one without a queue."""
        queue = self.state.queues.get(key)
        return queue.waiting if queue is not None else 0

    # The loop's side

    def _wake(self) -> None:
        # Once per turn of the loop, or a few of them: requests that come meanwhile share a batch.
        if not self._pump_is_due:
            self._pump_is_due = True
            self._turns = self._waited = 0
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        # Still due while it runs: whatever a batch that ran here changes is seen by the next decision.
        is_all, others_ns = True, None
        try:
            others_ns = self._worth_waiting_ns()
            if others_ns is None:
                is_all = self._decide_all()
        finally:
            self._pump_is_due = others_ns == 0
        if others_ns == 0:
            self._turns += 1
            asyncio.get_running_loop().call_soon(self._pump)
        elif others_ns is not None and not self._is_held:
            self._is_held = True
            self._set_timer(self._now_ns() + others_ns)
        elif not is_all:
            self._wake()

    def _worth_waiting_ns(self) -> int | None:
        """How long no batch is to begin, so that others can come: 0 until the loop has read who is there already.

        None where the next batch is to begin now.
        """
        state, before = self.state, self._waited
        waited = self._waited = len(state.waiting)
        is_growing = self._turns < _MOST_TURNS and waited > max(1, before)
        if not waited:
            return None
        oldest = next(iter(state.waiting.values()))
        may_be_held = oldest.comes_alone and not self._was_held
        if not is_growing and not may_be_held:
            return None
        queue, expiry_ns, now_ns = state.queues[oldest.key], state.next_expiry_ns, self._now_ns()
        samples = queue.waiting
        if queue.requests < waited or samples >= queue.max_batch or samples + queue.max_batch > queue.max_waiting:
            return None  # it would cost others their time, or those that come their place
        if expiry_ns is not None and expiry_ns - now_ns < _HURRY_NS:
            return None
        for lane in state.having_room(queue):
            entry = self._lanes[lane.id]
            if not entry.runs_here(samples) or not entry.is_part(_SMALL_PART, samples):
                continue
            if is_growing and now_ns - oldest.arrival_ns <= _TURN_NS:
                return 0
            if may_be_held and queue.gathering.hold(waited):
                return self._time_to_hold_ns(oldest, now_ns)
        return None

    def _time_to_hold_ns(self, oldest: Request, now_ns: int) -> int | None:
        """How long this one may still be held back for those like it; None where it may not."""
        left_ns = self._pending[oldest.id].submitted_ns + _HELD_NS - now_ns
        if left_ns <= 0 or not all(one.comes_alone for one in self.state.waiting.values()):
            return None
        return left_ns

    def _decide_all(self, *, may_run_here: bool = True) -> bool:
        """Whether nothing is left to decide now; else others wait for the loop."""
        self._is_held = self._was_held = False
        began_ns = self._now_ns()
        while True:
            decision: Decision = decide(self.state, self._now_ns())
            match decision:
                case Dispatch():
                    self._start(decision, may_run_here=may_run_here)
                    if self._now_ns() - began_ns > _TURN_NS:
                        return False
                case Drop(requests, outcome):
                    for request in requests:
                        self._end(request, outcome, "")
                case Wait(until_ns):
                    self._set_timer(until_ns)
                    return True

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
        self._was_held = self._is_held
        self._wake()

    def _start(self, dispatch: Dispatch, *, may_run_here: bool) -> None:
        entry = self._lanes[dispatch.lane.id]
        self._slab.move([slot for request in dispatch.requests for slot in request.slots], SlotState.COPYING)
        lane = dispatch.lane
        running = Running(dispatch, self._now_ns(), is_behind=lane.in_flight > lane.depth)
        entry.running.append(running)
        came: list[Arrival] = [self._pending[request.id] for request in dispatch.requests if request.comes_alone]
        if came:
            self.state.queues[entry.key].gathering.batch_began(came, running.started_ns, self._busy_ns())
        if may_run_here and not entry.jobs_out and entry.runs_here(dispatch.samples):
            self._run_here(entry, running)
        else:
            entry.give(lambda: self._run(entry, running))

    def _run_here(self, entry: _LaneEntry, running: Running) -> None:
        entry.begin()
        self.here_since_ns = running.started_ns
        result = _result(entry.run, running.dispatch.requests)
        self.here_since_ns = 0
        self._finished(entry, running, result, self._now_ns())

    def _finished(
        self, entry: _LaneEntry, running: Running, result: BatchResult | EngineFailure, ended_ns: int
    ) -> None:
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
                if self._is_thread_next(entry, len(dispatch.requests)):
                    # First the engine's next batch, and then the answers, which occupy this thread meanwhile.
                    self._decide_all(may_run_here=False)
            finally:  # nothing may cost these their answers
                self._answer(running, result, ended_ns)
            times = result.times
            took_ns = ended_ns - running.started_ns - times.waited_ns
            learn(dispatch, took_ns, took_ns - times.compute_ns - times.copy_out_ns)
            entry.batch_ended(ended_ns, took_ns, dispatch.samples)
        else:
            self._blame(entry, running, result, ended_ns)
        self._wake()

    def _is_thread_next(self, entry: _LaneEntry, answers: int) -> bool:
        """Whether what waits for the lane should run beside this thread, which has so many answers to give."""
        queue = self.state.queues[entry.key]
        samples = min(queue.waiting, queue.max_batch)
        if not samples:
            return False
        if not entry.runs_here(samples):
            return True
        if entry.is_part(_LITTLE_OF_IT, samples):
            return False
        return answers >= _WORTH_A_THREAD and queue.requests >= _WORTH_A_THREAD

    def _answer(self, running: Running, result: BatchResult, ended_ns: int) -> None:
        dispatch = running.dispatch
        ended: list[tuple[OnDone, Done]] = []
        answered: list[SlotRef] = []
        unwanted: list[SlotRef] = []
        times, samples = result.times, dispatch.samples
        batch = self._traced(running, result, ended_ns)
        # What it waited for the device, already in the engine, is waiting too.
        began_ns = running.started_ns + times.waited_ns
        for request, answers in zip(dispatch.requests, result.answers, strict=True):
            pending = self._pending.pop(request.id)
            listener = pending.on_done
            if listener is None:
                unwanted.extend(request.slots)
                continue
            queue_ns = began_ns - pending.submitted_ns
            done = Done(request, Outcome.ANSWERED, answers, times, queue_ns, samples, "", batch)
            ended.append((listener, done))
            answered.extend(request.slots)
        self._slab.free(*unwanted)
        self._slab.move(answered, SlotState.ANSWERED)
        now_ns = self._now_ns()
        for listener, done in ended:
            tell(listener, done)
        tell(self._observer.batch_ran, dispatch, result, [done for _, done in ended], now_ns)

    def _traced(self, running: Running, result: BatchResult | EngineFailure, ended_ns: int) -> BatchTrace | None:
        if self.trace_batch is None:
            return None
        try:
            return self.trace_batch(running.dispatch, running.started_ns, ended_ns, result)
        except Exception as error:  # must not cost anybody an answer
            tell_bug("tracing a batch", error)
            return None

    def _blame(self, entry: _LaneEntry, running: Running, failure: EngineFailure, ended_ns: int) -> None:
        dispatch = running.dispatch
        batch = self._traced(running, failure, ended_ns)
        tell(self._observer.batch_failed, dispatch, str(failure))
        if failure.scope in (FailureScope.ENGINE, FailureScope.DEVICE):
            for request in dispatch.requests:
                self._end(request, Outcome.ENGINE_LOST, str(failure), batch)
            if failure.scope is FailureScope.DEVICE:
                self.give_up_device(entry.lane.device, str(failure))
            else:
                self.give_up_lane(entry.lane, str(failure))
            return
        for request in dispatch.requests:
            if self._pending[request.id].on_done is None:
                self._end(request, Outcome.STOPPED, "cancelled")
        suspects = tuple(request for request in dispatch.requests if request.id in self._pending)
        if suspects:
            self._try_again(dispatch, suspects, failure, batch)

    def _try_again(
        self, dispatch: Dispatch, suspects: tuple[Request, ...], failure: EngineFailure, batch: BatchTrace | None
    ) -> None:
        """In halves, down to who is to blame; for want of memory only once."""
        is_memory = failure.scope is FailureScope.MEMORY
        if is_memory and any(self._pending[request.id].was_split for request in suspects):
            for request in suspects:
                self._end(request, Outcome.NO_MEMORY, str(failure), batch)
            return
        guilty = blame(self.state, dispatch, suspects)
        if guilty is not None:
            self._end(guilty, Outcome.NO_MEMORY if is_memory else Outcome.MODEL_FAILED, str(failure), batch)
            return
        for request in suspects:
            pending = self._pending[request.id]
            pending.was_split |= is_memory
            self._slab.move(request.slots, SlotState.QUEUED)

    # Ends

    def _end(self, request: Request, outcome: Outcome, reason: str, batch: BatchTrace | None = None) -> None:
        self._free(request)
        self._tell(request, Done(request, outcome, reason=reason, batch=batch))

    def _tell(self, request: Request, done: Done) -> None:
        pending = self._pending.pop(request.id, None)
        if pending is None or pending.on_done is None:
            return
        tell(self._observer.request_failed, done)
        tell(pending.on_done, done)

    def _free(self, request: Request) -> None:
        self._slab.free(*request.slots)

    def _take_back(self, entry: _LaneEntry) -> None:
        entry.take_back()
        if not entry.jobs_out:
            self._lost.pop(entry.lane.id, None)

    def _forget(self, entry: _LaneEntry) -> None:
        for _ in range(entry.lane.depth):
            entry.jobs.put(None)
        del self._lanes[entry.lane.id]
        self.state.drop_lane(self.state.queues[entry.key], entry.lane)

    # The lanes' side

    def _run(self, entry: _LaneEntry, running: Running) -> None:
        if running.is_behind:
            running.started_ns = self._now_ns()
        result = _result(entry.run, running.dispatch.requests)
        ended_ns = self._now_ns()
        entry.call_loop(lambda: self._finished(entry, running, result, ended_ns))


def _result(run: Runner, requests: tuple[Request, ...]) -> BatchResult | EngineFailure:
    try:
        return run(requests)
    except EngineFailure as failure:
        return failure
    except Exception as error:  # whatever an engine raises must not cost the lane its thread
        return EngineFailure(f"{type(error).__name__}: {error}")


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None], on_thread: Callable[[], None] | None) -> None:
    if on_thread is not None:
        on_thread()
    while (job := jobs.get()) is not None:
        job()
