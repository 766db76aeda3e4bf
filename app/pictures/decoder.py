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
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

from convoy.app.calls.call import Call
from convoy.app.calls.refusals import no_room, not_decoded
from convoy.app.lifecycle.catalog import Served
from convoy.app.scheduling.decoding import (
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
from convoy.app.scheduling.slab import Slot
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
    of the request that the sample is for. `since_ns`: when its call began to wait, 0 for now.
    """

    kind: str
    units: int
    slots: tuple[Slot, ...] = ()
    sample_of: Served | None = None
    needs_bytes: int = 0
    latest_start_ns: int | None = None
    priority: int = 0
    since_ns: int = 0


class Decoded(NamedTuple, Generic[Result]):
    """What came of it, and how long it waited for its turn."""

    result: Result
    wait_ns: int


@dataclass(slots=True, eq=False, kw_only=True)
class _Job(DecodeJob):
    """A job and the future of its caller. `call` is None for an answer, whose slots belong to the caller."""

    function: Callable[[], Any]
    call: Call | None = None
    slots: tuple[Slot, ...] = ()
    future: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    began_ns: int = 0
    is_decoded: bool = False


class Decoder:
    """At most `threads` work, and `max_waiting` jobs wait."""

    def __init__(self, threads: int, max_waiting: int) -> None:
        self._executor = ThreadPoolExecutor(threads, "decode")
        self._state = Decoding(threads, max_waiting)
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
        job = _Job(
            self._next_id(),
            work.kind,
            work.units,
            work.since_ns or time.monotonic_ns(),
            call=call,
            slots=work.slots,
            function=partial(function, *args, **kwargs),
        )
        job.deadline_ns, job.latest_start_ns, job.needs_bytes = call.deadline_ns, work.latest_start_ns, work.needs_bytes
        if work.sample_of is not None:
            priorities = work.sample_of.spec.priorities
            job.key, job.most_ahead = work.sample_of.key, self._most_ahead(work.sample_of)
            job.level = level_of(work.priority, priorities.levels, priorities.default)
        self._admit(job)
        try:
            return Decoded(await job.future, job.began_ns - job.arrival_ns)
        except BaseException:
            if job.id in self._state.waiting:
                withdraw(self._state, job)
                self._look_soon()
            elif job.is_decoded and job.key is not None:  # cancelled in the moment in which it was done
                self.answered(job.key)
            raise
        finally:
            # A failed job's traceback holds this frame, and through this name the future would hold its own error,
            # until the garbage collector comes by.
            del job

    async def run_owed(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """The same for the answer to a request that has been computed: it goes first, and is never turned away.

        Returns, even when cancelled, only after the function has ended: it reads the answer's slots.
        """
        reading = partial(function, *args, **kwargs)
        job = _Job(self._next_id(), "answer", 0, time.monotonic_ns(), level=RAISED_LEVEL, function=reading)
        self._admit(job)
        try:
            result: Result = await asyncio.shield(job.future)
            return result
        except asyncio.CancelledError:
            await asyncio.wait({job.future})
            raise
        finally:
            del job

    @property
    def waiting(self) -> int:
        """How many jobs have not begun."""
        return len(self._state.waiting)

    def begin_here(self, served: Served) -> bool:
        """Whether the caller may decode a sample at once, on the event loop; `answered` is to follow, if so."""
        return begin_here(self._state, served.key, self._most_ahead(served))

    def answered(self, key: ModelKey, done: Done | None = None) -> None:
        """A sample that was decoded needs nothing more: it has its answer, or will have none."""
        took_ns = None if done is None or done.times is None else done.queue_ns + done.times.total_ns
        answered(self._state, key, took_ns)
        if self._state.waiting:
            self._look_soon()

    def close(self) -> None:
        if self._giving_back is not None:
            self._giving_back.cancel()
        self._executor.shutdown(wait=False)

    def _most_ahead(self, served: Served) -> int:
        """How many of its samples may be decoded and unanswered: two full batches for each engine."""
        return 2 * max(1, served.spec.max_batch_size) * max(1, served.engines)

    def _admit(self, job: _Job) -> None:
        refusal = admit(self._state, job, job.arrival_ns)
        if refusal is not None:
            raise self._error(job, refusal)
        self._look_soon()

    def _look_soon(self) -> None:
        # After this turn: another job that comes in it may be more urgent.
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        self._is_due = False
        while (decision := decide(self._state, time.monotonic_ns(), _reserve)) is not None:
            job = decision.job if isinstance(decision, NotDecoded) else decision
            assert isinstance(job, _Job)
            if not isinstance(decision, NotDecoded):
                self._begin(job)
            elif not job.future.done():
                job.future.set_exception(self._error(job, decision))

    def _begin(self, job: _Job) -> None:
        if job.call is not None:
            job.call.begin_decode(job.slots)
        if job.future.done():  # its caller has left in this turn
            self._returned(job, _End(None, None, 0, None))
        else:
            self._executor.submit(_work, job, asyncio.get_running_loop(), self._returned)

    def _returned(self, job: _Job, end: _End) -> None:
        """The thread touches nothing of it any more."""
        job.began_ns = end.began_ns
        if job.call is not None:
            job.call.end_decode(job.slots)
            job.call.core.slab.count_outside(-job.needs_bytes)
        if job.future.done():
            self._left(job, end.took_ns)
        elif end.error is not None:
            job.future.set_exception(end.error)
            self._left(job, end.took_ns)
        else:
            ended(self._state, job, end.took_ns)
            job.is_decoded = True
            job.future.set_result(end.result)
        self._look_soon()
        if self._giving_back is None and KEPT_MEMORY.kept_bytes:
            self._give_back_later()

    def _give_back_later(self) -> None:
        self._giving_back = asyncio.get_running_loop().call_later(_KEEP_S, self._give_back)

    def _give_back(self) -> None:
        self._giving_back = None
        if KEPT_MEMORY.give_back_unused():
            self._give_back_later()

    def _left(self, job: _Job, took_ns: int | None) -> None:
        """There will be no answer to it."""
        ended(self._state, job, took_ns)
        if job.key is not None:
            answered(self._state, job.key, None)

    def _error(self, job: _Job, refusal: NotDecoded) -> RequestError:
        call = job.call
        if call is None or call.served is None:
            raise RuntimeError(f"{refusal} of what is owed; this is a bug")
        if refusal.why is Why.NO_ROOM:
            return no_room(job.needs_bytes, call.core.slab)
        return not_decoded(refusal, call.served.key.model, len(self._state.waiting))


def _reserve(job: DecodeJob) -> bool:
    """Count the memory that it takes beside its slots, if there is room for it."""
    assert isinstance(job, _Job)
    return job.call is None or job.call.core.slab.count_outside(job.needs_bytes)


class _End(NamedTuple):
    """What a thread made of a job; `took_ns` is None where there is nothing to learn from."""

    result: Any
    error: BaseException | None
    began_ns: int
    took_ns: int | None


def _work(job: _Job, loop: asyncio.AbstractEventLoop, on_return: Callable[[_Job, _End], None]) -> None:
    """In a thread."""
    loop.call_soon_threadsafe(on_return, job, _end_of(job))


def _end_of(job: _Job) -> _End:
    began_ns = time.monotonic_ns()
    if job.call is not None and job.future.done():
        return _End(None, None, began_ns, None)
    try:
        return _End(job.function(), None, began_ns, time.monotonic_ns() - began_ns)
    except RequestError as error:
        # Without where it comes from, which would hold what the job has copied.
        error.__traceback__ = error.__cause__ = error.__context__ = None
        return _End(None, error, began_ns, None)
    except BaseException as error:
        return _End(None, error, began_ns, None)
