"""Threads that decode, so that the event loop computes only what is surely short.

The shell around `scheduling.decoding`, which decides. Threads, clock, slots and waiting calls are here.
Belongs to one event loop. A thread cannot be stopped, so what it works on stays with it until it returns; all else ends
at once, with the call, when its client leaves and at its deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

from convoy.app.calls.call import Call
from convoy.app.calls.refusals import no_room, not_decoded
from convoy.app.lifecycle.catalog import Served
from convoy.app.scheduling.decoding import (
    Begin,
    DecodeJob,
    Decoding,
    NotDecoded,
    Why,
    admit,
    answered,
    begin_here,
    decide,
    ended,
    withdraw,
)
from convoy.app.scheduling.queues import RAISED_LEVEL, level_of
from convoy.app.scheduling.request import Done, ModelKey
from convoy.app.scheduling.slab import Slot, SlotState
from convoy.models.errors import RequestError
from convoy.models.images import KEPT_MEMORY

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
# Memory for large images goes back to the system after this time without use.
_KEEP_S = 10.0


class DecodeWork(NamedTuple):
    """What to decode: units of a kind (`scheduling.decoding`), in these slots.

    `sample_of`: it is a sample for this version, and `answered` says when it needs nothing more. `needs_bytes`: memory
    beside its slots, counted from before it begins until its thread returns. `latest_start_ns` and `priority` are those
    of the request that the sample is for.
    """

    kind: str
    units: int
    slots: tuple[Slot, ...] = ()
    sample_of: Served | None = None
    needs_bytes: int = 0
    latest_start_ns: int | None = None
    priority: int = 0


class Decoded(NamedTuple, Generic[Result]):
    """What came of it, and how long it waited for its turn."""

    result: Result
    wait_ns: int


class _Waiting:
    """A job and the future of its caller. `call` is None for an answer, whose slots belong to the caller."""

    __slots__ = ("began_ns", "call", "function", "future", "is_decoded", "job", "room", "slots")

    def __init__(self, job: DecodeJob, call: Call | None, slots: tuple[Slot, ...], function: Callable[[], Any]) -> None:
        self.job, self.call, self.slots, self.function = job, call, slots, function
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.began_ns, self.is_decoded = 0, False
        self.room: Slot | None = None  # counts memory that the decoder takes elsewhere; never written to


class Decoder:
    """At most `threads` work, and `max_waiting` jobs wait."""

    def __init__(self, threads: int, max_waiting: int) -> None:
        self._executor = ThreadPoolExecutor(threads, "decode")
        self._state = Decoding(threads, max_waiting)
        self._waiting: dict[int, _Waiting] = {}  # those that have not begun, by their job's id
        self._next_id = count(1).__next__
        self._is_due = False
        self._giving_back: asyncio.TimerHandle | None = None

    async def run(
        self,
        call: Call,
        work: DecodeWork,
        function: Callable[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Decoded[Result]:
        """What the function gives. Raises what it raises, and Overloaded or DeadlineExceeded."""
        key, most, level = None, 0, 1
        if work.sample_of is not None:
            spec = work.sample_of.spec
            key, most = work.sample_of.key, self._most_ahead(work.sample_of)
            level = level_of(work.priority, spec.priorities.levels, spec.priorities.default)
        now_ns = time.monotonic_ns()
        job = DecodeJob(
            self._next_id(),
            work.kind,
            work.units,
            now_ns,
            call.deadline_ns,
            key,
            most,
            level,
            work.needs_bytes,
            work.latest_start_ns,
        )
        waiting = _Waiting(job, call, work.slots, partial(function, *args, **kwargs))
        self._admit(waiting, now_ns)
        try:
            return Decoded(await waiting.future, waiting.began_ns - now_ns)
        except BaseException:
            if self._waiting.pop(job.id, None) is not None:
                withdraw(self._state, job)
                self._look_soon()
            elif waiting.is_decoded and key is not None:  # cancelled in the moment in which it was done
                self.answered(key)
            raise
        finally:
            # A failed job's traceback holds this frame, and through these names the future would hold its own error,
            # until the garbage collector comes by.
            del waiting

    async def run_owed(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """The same for the answer to a request that has been computed: it goes first, and is never turned away.

        Returns, even when cancelled, only after the function has ended: it reads the answer's slots.
        """
        job = DecodeJob(self._next_id(), "answer", 0, time.monotonic_ns(), level=RAISED_LEVEL)
        waiting = _Waiting(job, None, (), partial(function, *args, **kwargs))
        self._admit(waiting, job.arrival_ns)
        future = waiting.future
        try:
            result: Result = await asyncio.shield(future)
            return result
        except asyncio.CancelledError:
            await asyncio.wait({future})
            raise
        finally:
            del waiting, future

    @property
    def waiting(self) -> int:
        """How many jobs have not begun."""
        return len(self._waiting)

    def begin_here(self, served: Served) -> bool:
        """Whether the caller may decode a sample at once, on the event loop; `answered` is to follow, if so."""
        return begin_here(self._state, served.key, self._most_ahead(served))

    def answered(self, key: ModelKey, done: Done | None = None) -> None:
        """A sample that was decoded needs nothing more: it has its answer, or will have none."""
        took_ns = None if done is None or done.times is None else done.queue_ns + done.times.total_ns
        answered(self._state, key, took_ns)
        if self._waiting:
            self._look_soon()

    def close(self) -> None:
        if self._giving_back is not None:
            self._giving_back.cancel()
        self._executor.shutdown(wait=False)

    def _most_ahead(self, served: Served) -> int:
        """How many of its samples may be decoded and unanswered: two full batches for each engine."""
        return 2 * max(1, served.spec.max_batch_size) * max(1, served.engines)

    def _admit(self, waiting: _Waiting, now_ns: int) -> None:
        refusal = admit(self._state, waiting.job, now_ns)
        if refusal is not None:
            raise self._error(waiting, refusal)
        self._waiting[waiting.job.id] = waiting
        self._look_soon()

    def _look_soon(self) -> None:
        # After this turn: another job that comes in it may be more urgent.
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        self._is_due = False
        while (decision := decide(self._state, time.monotonic_ns(), self._reserve)) is not None:
            if isinstance(decision, Begin):
                self._begin(decision)
                continue
            waiting = self._waiting.pop(decision.job.id)
            if not waiting.future.done():
                waiting.future.set_exception(self._error(waiting, decision))

    def _reserve(self, job: DecodeJob) -> bool:
        waiting = self._waiting[job.id]
        call = waiting.call
        if not job.needs_bytes or call is None or waiting.future.done():
            return True
        waiting.room = call.core.slab.reserve(job.needs_bytes)
        if waiting.room is None:
            return False
        call.core.slab.move((waiting.room.ref,), SlotState.DECODING)
        return True

    def _begin(self, begin: Begin) -> None:
        waiting = self._waiting.pop(begin.job.id)
        if waiting.future.done():  # its caller has left in this turn
            self._left(waiting, None)
            return
        if waiting.call is not None:
            waiting.call.begin_decode(waiting.slots)
        self._executor.submit(_work, waiting, asyncio.get_running_loop(), self._returned)

    def _returned(self, waiting: _Waiting, end: _End) -> None:
        """The thread touches nothing of it any more."""
        waiting.began_ns = end.began_ns
        if (call := waiting.call) is not None:
            call.end_decode(waiting.slots)
            if (room := waiting.room) is not None:
                call.core.slab.move((room.ref,), SlotState.FILLING)
                call.core.slab.free(room.ref)
        if waiting.future.done():
            self._left(waiting, end.took_ns)
        elif end.error is not None:
            waiting.future.set_exception(end.error)
            self._left(waiting, end.took_ns)
        else:
            ended(self._state, waiting.job, end.took_ns)
            waiting.is_decoded = True
            waiting.future.set_result(end.result)
        self._look_soon()
        if self._giving_back is None and KEPT_MEMORY.kept_bytes:
            self._give_back_later()

    def _give_back_later(self) -> None:
        self._giving_back = asyncio.get_running_loop().call_later(_KEEP_S, self._give_back)

    def _give_back(self) -> None:
        self._giving_back = None
        if KEPT_MEMORY.give_back_unused():
            self._give_back_later()

    def _left(self, waiting: _Waiting, took_ns: int | None) -> None:
        """There will be no answer to it."""
        ended(self._state, waiting.job, took_ns)
        if waiting.job.key is not None:
            answered(self._state, waiting.job.key, None)

    def _error(self, waiting: _Waiting, refusal: NotDecoded) -> RequestError:
        call = waiting.call
        if call is None or call.served is None:
            raise RuntimeError(f"{refusal} of what is owed; this is a bug")
        if refusal.why is Why.NO_ROOM:
            return no_room(waiting.job.needs_bytes, call.core.slab)
        return not_decoded(refusal, call.served.key.model, self._state.waiting)


class _End(NamedTuple):
    """What a thread made of a job; `took_ns` is None where there is nothing to learn from."""

    result: Any
    error: BaseException | None
    began_ns: int
    took_ns: int | None


def _work(waiting: _Waiting, loop: asyncio.AbstractEventLoop, on_return: Callable[[_Waiting, _End], None]) -> None:
    """In a thread."""
    loop.call_soon_threadsafe(on_return, waiting, _end_of(waiting))


def _end_of(waiting: _Waiting) -> _End:
    began_ns = time.monotonic_ns()
    if waiting.call is not None and waiting.future.done():
        return _End(None, None, began_ns, None)
    try:
        return _End(waiting.function(), None, began_ns, time.monotonic_ns() - began_ns)
    except RequestError as error:
        # Without where it comes from, which would hold what the job has copied.
        error.__traceback__ = error.__cause__ = error.__context__ = None
        return _End(None, error, began_ns, None)
    except BaseException as error:
        return _End(None, error, began_ns, None)
