"""The pool of decoder threads, so that the event loop only does work that is surely short.

The threads, clock, slots and waiting calls around the pure rules in `scheduling.decoding`. Used on one event loop. A
running thread cannot be stopped, so its memory stays in use until it returns; everything else ends at once when the
client leaves or the deadline passes.
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
# Memory for large images is returned to the system when it was not used for this long.
_KEEP_S = 10.0


class DecodeWork(NamedTuple):
    """Work for the decoder: units of a kind (`scheduling.decoding`) in these slots.

    `sample_of` is the version if the work decodes a sample; `answered` must then be called when the sample needs
    nothing more. `needs_bytes` is memory beside the slots, counted until the thread returns. `latest_start_ns` and
    `priority` are those of the sample's request. `since_ns` is when its call began to wait, 0 for now.
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
    """The result of the work and the time that it waited."""

    result: Result
    wait_ns: int


@dataclass(slots=True, eq=False, kw_only=True)
class _Job(DecodeJob):
    """A job and its caller's future. `call` is None for an answer, whose slots belong to the caller."""

    function: Callable[[], Any]
    call: Call | None = None
    slots: tuple[Slot, ...] = ()
    future: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    began_ns: int = 0
    is_decoded: bool = False


class Decoder:
    """Runs jobs on at most `threads` threads; at most `max_waiting` jobs wait."""

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
        """Run the function in a thread. Raises what it raises, and Overloaded or DeadlineExceeded."""
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
            elif job.is_decoded and job.key is not None:  # cancelled at the moment when it was done
                self.answered(job.key)
            raise
        finally:
            # A failed job's traceback holds this frame. Without this, the future would hold its own error until the
            # garbage collector runs.
            del job

    async def run_owed(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Run work for an answer that is already computed: it goes first and is never refused.

        Returns only after the function has ended, even if cancelled, because the function reads the answer's slots.
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
        """The number of jobs that have not begun."""
        return len(self._state.waiting)

    def begin_here(self, served: Served) -> bool:
        """Whether the caller may decode a sample inline on the event loop now. If so, call `answered` later."""
        return begin_here(self._state, served.key, self._most_ahead(served))

    def answered(self, key: ModelKey, done: Done | None = None) -> None:
        """Record that a decoded sample has its answer or will get none."""
        took_ns = None if done is None or done.times is None else done.queue_ns + done.times.total_ns
        answered(self._state, key, took_ns)
        if self._state.waiting:
            self._look_soon()

    def close(self) -> None:
        if self._giving_back is not None:
            self._giving_back.cancel()
        self._executor.shutdown(wait=False)

    def _most_ahead(self, served: Served) -> int:
        """How many of its samples may be decoded and unanswered: two full batches per engine."""
        return 2 * max(1, served.spec.max_batch_size) * max(1, served.engines)

    def _admit(self, job: _Job) -> None:
        refusal = admit(self._state, job, job.arrival_ns)
        if refusal is not None:
            raise self._error(job, refusal)
        self._look_soon()

    def _look_soon(self) -> None:
        # After this iteration of the loop: a more urgent job may still arrive in it.
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
        if job.future.done():  # its caller has left in this iteration
            self._returned(job, _End(None, None, 0, None))
        else:
            self._executor.submit(_work, job, asyncio.get_running_loop(), self._returned)

    def _returned(self, job: _Job, end: _End) -> None:
        """Handle a job whose thread has returned and uses none of its memory any more."""
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
        """Handle a job whose caller has left."""
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
    """Count the memory that the job takes beside its slots, if there is room."""
    assert isinstance(job, _Job)
    return job.call is None or job.call.core.slab.count_outside(job.needs_bytes)


class _End(NamedTuple):
    """The end of a job in its thread; `took_ns` is None if the cost model cannot learn from it."""

    result: Any
    error: BaseException | None
    began_ns: int
    took_ns: int | None


def _work(job: _Job, loop: asyncio.AbstractEventLoop, on_return: Callable[[_Job, _End], None]) -> None:
    """The loop of a decoder thread."""
    loop.call_soon_threadsafe(on_return, job, _end_of(job))


def _end_of(job: _Job) -> _End:
    began_ns = time.monotonic_ns()
    if job.call is not None and job.future.done():
        return _End(None, None, began_ns, None)
    try:
        return _End(job.function(), None, began_ns, time.monotonic_ns() - began_ns)
    except RequestError as error:
        # Without the traceback, which would hold what the job has copied.
        error.__traceback__ = error.__cause__ = error.__context__ = None
        return _End(None, error, began_ns, None)
    except BaseException as error:
        return _End(None, error, began_ns, None)
