"""The life of one call at the edge, on whatever wire: begun once, ended once.

    begin -> find -> (the body, by its wire) -> reserve, decode -> run -> render -> end

Whatever happens on the way, an error, a cancelled task, a client that leaves, `end` gives back every slot that the
edge still owns, and counts the call, once. Knows no wire: no header, no message, no socket.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

from convoy.app.batch import StageTimes
from convoy.app.core import Core
from convoy.app.edge.access import CallFacts
from convoy.app.edge.oip.lookup import find_served
from convoy.app.edge.oip.tensors import TensorRef
from convoy.app.lifecycle.catalog import Served
from convoy.app.outcomes import ANSWERED, CallEnd
from convoy.app.scheduling.request import (
    MILLISECOND_NS,
    SECOND_NS,
    Done,
    Request,
    Shape,
    SlotRef,
    Spent,
    TensorPlace,
)
from convoy.app.scheduling.slab import Slot, SlotState
from convoy.app.submission.refusals import EXPIRED_RUNNING, failure_of
from convoy.app.submission.shared_memory import Region
from convoy.app.tracing.spans import EndedCall, Exemplar, RequestSpan
from convoy.models.errors import BodyTooLarge, DeadlineExceeded, Overloaded, RequestError

# Where the gate finds the call that a route has made, for its line in the log.
CALL_IN_SCOPE = "convoy.call"


class ClientGone(Exception):
    """The client has closed the connection; there is nobody to answer."""


class Inputs(NamedTuple):
    """A request's decoded inputs: where they lie, how many samples, and their shapes without the batch."""

    samples: int
    shapes: tuple[Shape, ...]
    tensors: tuple[TensorRef, ...]


@dataclass(frozen=True, slots=True)
class Terms:
    """What the client asks of the schedule; None: no limit. `latest_start_us` counts from the arrival."""

    timeout_ms: float | None = None
    latest_start_us: int | None = None
    priority: int = 0


class _Waiting:
    """A request that the scheduler has: who awaits it, and the slots that come back with its answer."""

    __slots__ = ("future", "request", "slots", "timer")

    def __init__(
        self,
        request: Request,
        future: asyncio.Future[Done],
        slots: dict[SlotRef, Slot],
        timer: asyncio.TimerHandle | None,
    ) -> None:
        self.request, self.future, self.slots, self.timer = request, future, slots, timer


class Call:
    """The edge's side of one HTTP or gRPC call. Times are CLOCK_MONOTONIC nanoseconds.

    `protocol` is its name in the metrics. `decode_ns` is what its first input
    took to read, after `decode_wait_ns`, `answered_ns` when the last of its answers came, to be written.
    """

    def __init__(self, core: Core, protocol: str) -> None:
        self.core, self.protocol = core, protocol
        self.arrival_ns = time.monotonic_ns()
        self.answered_ns = 0
        self.served: Served | None = None
        self.decode_ns = self.decode_wait_ns = self.queue_ns = self.ended_ns = 0
        self.times: StageTimes | None = None
        self.ending: CallEnd | None = None
        self.span: RequestSpan | None = None  # of one that is sampled
        self._is_decoded = False
        self._slots: dict[SlotRef, Slot] = {}
        self._waiting: dict[int, _Waiting] = {}  # by the request's id
        self._regions: list[Region] = []
        self._decoding: set[asyncio.Future[Any]] = set()
        self._lent: dict[SlotRef, int] = {}  # to so many jobs of a decoder
        self._presence: asyncio.Future[None] | None = None
        self._has_begun = self._has_ended = self._client_left = False

    def begin(self) -> None:
        """Make it one that is owed an answer, until its end. Raises Unavailable when the server is shutting down."""
        self.core.begin_call()
        self._has_begun = True

    def find(self, model: str, version: str | None) -> Served:
        """Hold the version that it asks for until its end. Raises Unavailable when that is not ready, and NotFound."""
        served = find_served(self.core.catalog, model, version)
        served.enter()
        self.served = served
        return served

    def decoded(self, ns: int, wait_ns: int = 0) -> None:
        """An input of it waited so long for its turn, and then took so long to read; a form has several."""
        if self.span is not None:
            self.span.decoded(time.monotonic_ns(), ns, wait_ns)
        if not self._is_decoded:
            self._is_decoded, self.decode_ns, self.decode_wait_ns = True, ns, wait_ns  # counted with the call itself
        elif self.served is not None:
            self.core.stage_took(self.served.key, "decode_wait", wait_ns)
            self.core.stage_took(self.served.key, "decode", ns)

    def deadline_ns(self, timeout_ms: float | None) -> int | None:
        """When its answer is worthless, where the client gives it so long."""
        return None if timeout_ms is None else self.arrival_ns + int(timeout_ms * MILLISECOND_NS)

    def latest_start_ns(self, latest_start_us: int | None) -> int | None:
        """When it must be computed, if it ever is, where the client says how long it may wait."""
        return None if latest_start_us is None else self.arrival_ns + latest_start_us * 1000

    def waits_for(self, future: asyncio.Future[Any]) -> None:
        """Something is to be decoded: the future ends with the call, and when the client leaves. Raises ClientGone."""
        if self._client_left:
            raise ClientGone
        self._decoding.add(future)
        future.add_done_callback(self._decoding.discard)

    def begin_decode(self, slots: tuple[Slot, ...]) -> None:
        """A decoder's thread works on these until they are taken back, whatever becomes of the call meanwhile."""
        for slot in slots:
            jobs = self._lent.get(slot.ref, 0)
            if not jobs:
                self.core.slab.move((slot.ref,), SlotState.DECODING)
                del self._slots[slot.ref]
            self._lent[slot.ref] = jobs + 1

    def end_decode(self, slots: tuple[Slot, ...]) -> None:
        """One thread does not touch them any more. Nobody needs them when the call has ended."""
        for slot in slots:
            self._lent[slot.ref] -= 1
            if self._lent[slot.ref]:
                continue
            del self._lent[slot.ref]
            self.core.slab.move((slot.ref,), SlotState.FILLING)
            if self._has_ended:
                self.core.slab.free(slot.ref)
            else:
                self._slots[slot.ref] = slot

    def hold_region(self, region: Region) -> None:
        """Keep a region of shared memory until the call ends. Raises NotFound when it has just gone."""
        self.core.shared_memory.hold(region)
        self._regions.append(region)

    def watch_client(self, until_it_leaves: Awaitable[None]) -> None:
        """From now on a client that leaves ends the wait for its answers. The body must have been read."""
        self._presence = asyncio.ensure_future(until_it_leaves)
        self._presence.add_done_callback(self._presence_ended)

    def _presence_ended(self, presence: asyncio.Future[None]) -> None:
        if not presence.cancelled():
            self.client_left()

    def client_left(self) -> None:
        """There is nobody to answer any more: whatever is awaited ends with ClientGone, now and later."""
        self._client_left = True
        for future in [*self._decoding]:
            if not future.done():
                future.set_exception(ClientGone())
        for waiting in [*self._waiting.values()]:
            self._wait_no_more(waiting.request, "CANCELED", ClientGone())

    def reserve(self, nbytes: int) -> Slot:
        """Memory that is given back when the call ends. Raises Overloaded, and BodyTooLarge where it never fits."""
        try:
            slot = self.core.reserve(nbytes)
        except Overloaded:
            if self.may_ever_hold(nbytes):
                raise
            raise BodyTooLarge(
                f"the request takes {self.held_bytes + nbytes} bytes at once with all that it holds, and there are "
                f"{self.core.slab.capacity_bytes} for all requests; send less at once, or raise --max-inflight-mb"
            ) from None
        self._slots[slot.ref] = slot
        return slot

    @property
    def held_bytes(self) -> int:
        """What it has reserved and not given back."""
        return sum([slot.extent_bytes for slot in self._slots.values()])

    def may_ever_hold(self, more_bytes: int) -> bool:
        """Whether so much fits beside what it holds where nobody else holds anything."""
        return self.held_bytes + more_bytes <= self.core.slab.capacity_bytes

    def release(self, slot: Slot) -> None:
        """Give one slot back early."""
        del self._slots[slot.ref]
        self.core.slab.free(slot.ref)

    def discard_pages(self) -> None:
        """What it holds has been copied: the room stays its own until it ends, and the memory does not."""
        self.core.slab.discard_pages(self._slots)

    def end(self, ending: CallEnd) -> int:
        """Give back all that it holds, and count it. The answer has been sent.

        Returns the nanoseconds from its arrival to its end. Another end changes nothing.
        """
        now_ns = time.monotonic_ns()
        took_ns = now_ns - self.arrival_ns
        if self._has_ended:
            return took_ns
        self._has_ended, self.ended_ns, self.ending = True, now_ns, ending
        core, served = self.core, self.served
        if self._presence is not None:
            self._presence.cancel()
        for future in [*self._decoding]:
            future.cancel()
        for waiting in [*self._waiting.values()]:
            self._wait_no_more(waiting.request, "CANCELED", None)
        core.slab.move(self._slots, SlotState.FREE)
        self._slots.clear()
        for region in self._regions:
            core.shared_memory.release(region)
        if served is None:
            core.call_ended(None, self.protocol, ending, took_ns)
        elif ending is ANSWERED and self._is_decoded:
            spent = Spent(self.decode_wait_ns, self.decode_ns, now_ns - self.answered_ns, took_ns)
            core.call_answered(served.key, self.protocol, spent)
        else:
            if self._is_decoded:
                core.stage_took(served.key, "decode_wait", self.decode_wait_ns)
                core.stage_took(served.key, "decode", self.decode_ns)
            if self.answered_ns:
                core.stage_took(served.key, "encode", now_ns - self.answered_ns)
            core.call_ended(served.key, self.protocol, ending, took_ns)
        if self.span is not None:
            self._end_span(self.span, ending, took_ns)
        if served is not None:
            served.leave()
        if self._has_begun:
            core.end_call()
        return took_ns

    def _end_span(self, span: RequestSpan, ending: CallEnd, took_ns: int) -> None:
        key = None if self.served is None else self.served.key
        span.end(EndedCall(self.arrival_ns, self.answered_ns, self.ended_ns, key, ending))
        if key is not None:
            where = span.trace_id, span.span_id
            self.core.exemplify(Exemplar(key, self.protocol, ending, took_ns, span.stages_ns(), *where))

    def facts(self) -> CallFacts:
        """For the log, once it has ended, or its answer is being sent."""
        key, ending = None if self.served is None else self.served.key, self.ending or ANSWERED
        stages_ns: dict[str, int] = {}
        if self._is_decoded:
            stages_ns.update(decode_wait=self.decode_wait_ns, decode=self.decode_ns)
        if self.times is not None:
            copy_in_ns, compute_ns, copy_out_ns, _ = self.times
            stages_ns.update(queue=self.queue_ns, copy_in=copy_in_ns, compute=compute_ns, copy_out=copy_out_ns)
        if self.answered_ns and self.ended_ns:
            stages_ns["encode"] = self.ended_ns - self.answered_ns
        stages_ms = {stage: round(ns / MILLISECOND_NS, 3) for stage, ns in stages_ns.items()}
        model, version = (None, None) if key is None else (key.model, key.version)
        return CallFacts(model, version, ending.outcome.value, ending.reason, stages_ms)

    def build_request(self, served: Served, inputs: Inputs, wanted: tuple[int, ...], terms: Terms) -> Request:
        """The scheduler's view of what was decoded, with room reserved for the outputs."""
        outputs = self._reserve_outputs(served, inputs.samples, wanted)
        slots: dict[SlotRef, int] = {}  # and their numbers in the request

        def place(ref: TensorRef) -> TensorPlace:
            return TensorPlace(slots.setdefault(ref.slot, len(slots)), ref.offset, ref.nbytes)

        places_in = tuple([place(ref) for ref in inputs.tensors])
        places_out = tuple([None if ref is None else place(ref) for ref in outputs])
        return Request(
            self.core.next_request_id(),
            served.key,
            inputs.samples,
            inputs.shapes,
            tuple(slots),
            places_in,
            wanted,
            places_out,
            self.arrival_ns,
            terms.priority,
            self.deadline_ns(terms.timeout_ms),
            self.latest_start_ns(terms.latest_start_us),
            None if self.span is None else self.span.traceparent,
        )

    def run(self, request: Request) -> asyncio.Future[Done]:
        """Queue the request. The future holds its answer or the error that the client is told.

        Raises RequestError when it is not taken, and ClientGone. The slots are the scheduler's from here on; with an
        answer they are the call's again.
        """
        if self._client_left:
            raise ClientGone
        loop, timer = asyncio.get_running_loop(), None
        if request.deadline_ns is not None:
            late = DeadlineExceeded(EXPIRED_RUNNING)
            remaining_s = (request.deadline_ns - time.monotonic_ns()) / SECOND_NS
            timer = loop.call_later(remaining_s, self._wait_no_more, request, "REJECTED", late)
        slots = {ref: self._slots.pop(ref) for ref in request.slots}
        waiting = self._waiting[request.id] = _Waiting(request, loop.create_future(), slots, timer)
        try:
            self.core.take(request, partial(self._request_ended, request))
        except BaseException:
            del self._waiting[request.id]
            self._slots.update(slots)
            if timer is not None:
                timer.cancel()
            raise
        return waiting.future

    def _request_ended(self, request: Request, done: Done) -> None:
        """The scheduler has the request no longer."""
        waiting = self._waiting.pop(request.id, None)
        error = failure_of(done)
        if waiting is None:
            if error is None:
                self.core.slab.free(*request.slots)  # the call has given up on it, so nobody else does
            return
        if waiting.timer is not None:
            waiting.timer.cancel()
        if error is None:
            self._slots.update(waiting.slots)
            self.answered_ns = time.monotonic_ns()
            self.queue_ns, self.times = done.queue_ns, done.times
            if self.span is not None:
                self.span.answered(done)
        elif self.span is not None and done.batch is not None:
            self.span.batches.append(done.batch)
        if waiting.future.done():  # its task was cancelled
            return
        if error is None:
            waiting.future.set_result(done)
        else:
            waiting.future.set_exception(error)

    def _wait_no_more(self, request: Request, reason: str, error: RequestError | ClientGone | None) -> None:
        """`reason` is one of the statistics' failures. Without an error nobody hears of it: the call ends."""
        waiting = self._waiting.pop(request.id, None)
        if waiting is None:
            return
        if waiting.timer is not None:
            waiting.timer.cancel()
        self.core.cancel(request, reason)
        if error is not None and not waiting.future.done():
            waiting.future.set_exception(error)

    def _reserve_outputs(self, served: Served, samples: int, wanted: tuple[int, ...]) -> tuple[TensorRef | None, ...]:
        sizes = [served.spec.outputs[index].sample_bytes for index in wanted]
        known = [samples * size if size is not None else 0 for size in sizes]
        if not any(known):
            return (None,) * len(wanted)
        slot = self.reserve(sum(known))
        offsets = accumulate(known, initial=0)
        return tuple(
            None if size is None else TensorRef(slot.ref, offset, nbytes)
            for size, offset, nbytes in zip(sizes, offsets, known, strict=False)
        )
