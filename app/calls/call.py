"""The life of one call over any protocol. It begins once and ends once.

    begin -> find -> (read the body) -> reserve, decode -> run -> settle -> (send the answer) -> end

Whatever happens in between (an error, a deadline, a client that leaves), `end` frees every slot that the call still
owns and counts the call once. Knows no headers, messages or sockets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from convoy.app.calls.refusals import EXPIRED_RUNNING, failure_of, no_room, refused
from convoy.app.calls.shared_memory import Region
from convoy.app.core import Core
from convoy.app.engines.batch import StageTimes
from convoy.app.lifecycle.catalog import Catalog, Served
from convoy.app.scheduling.policy import Refuse
from convoy.app.scheduling.request import (
    MILLISECOND_NS,
    Done,
    Outcome,
    Request,
    Shape,
    SlotRef,
    TensorRef,
)
from convoy.app.scheduling.slab import Slot, SlotState
from convoy.app.telemetry.outcomes import ANSWERED, CallEnd, ClientGone, Refusal
from convoy.app.telemetry.tracing import RequestSpan
from convoy.models.errors import BodyTooLarge, DeadlineExceeded, NotReady, RequestError, UnknownVersion


def find_served(catalog: Catalog, model: str, version: str | None) -> Served:
    """The requested version, or the highest. Raises NotFound or Unavailable."""
    if version is None:
        return catalog.find(model, None)
    if not version:
        told = "the version is empty; set its number, or remove the version and the slash before it"
        raise UnknownVersion(f"Request for unknown model: '{model}': {told}")
    if not (version.isascii() and version.isdigit() and len(version) < 10):
        shown = version[:40] if version.isprintable() and " " not in version else repr(version[:40])
        raise UnknownVersion(
            f"Request for unknown model: '{model}' version {shown} is not found; a version is a whole number"
        )
    return catalog.find(model, int(version))


class Inputs(NamedTuple):
    """A request's decoded inputs: their place in the slab, the number of samples, and the shapes without the batch."""

    samples: int
    shapes: tuple[Shape, ...]
    tensors: tuple[TensorRef, ...]


@dataclass(frozen=True, slots=True)
class Terms:
    """Scheduling options of a request beside its deadline.

    `latest_start_us` counts from the arrival. `priority` 1 is the most urgent; 0 is the model's default.
    """

    latest_start_us: int | None = None
    priority: int = 0


class Call:
    """One HTTP, gRPC or Python call, and its record afterwards. Times are CLOCK_MONOTONIC nanoseconds.

    `protocol` is its name in the metrics. `owed` is the number of requests to the scheduler: one, or one per file of a
    form. `deadline_ns` None means no limit. `late` makes the error for a missed deadline and may change with what the
    call waits for. While the body is read, its next piece is due at `body_due_ns`, and `slow` makes the error.
    `until_client_leaves` is set when the body has been read. `decode_ns` and `decode_wait_ns` belong to the first
    input. `answered_ns` is the time of the last answer.
    """

    def __init__(self, core: Core, protocol: str) -> None:
        self.core, self.protocol = core, protocol
        self.arrival_ns = time.monotonic_ns()
        self.answered_ns = 0
        self.served: Served | None = None
        self.decode_ns = self.decode_wait_ns = self.queue_ns = self.ended_ns = 0
        self.times: StageTimes | None = None
        self.ending: CallEnd | None = None
        self.span: RequestSpan | None = None  # set if the call is sampled
        self.owed = 1
        self.deadline_ns: int | None = None
        self.late: Callable[[], RequestError] = _late
        self.body_due_ns: int | None = None
        self.slow: Callable[[], RequestError] = _late
        self.until_client_leaves: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._slots: dict[SlotRef, Slot] = {}
        self._requests: dict[asyncio.Future[Done], Request] = {}  # every request made to the scheduler
        self._regions: list[Region] = []
        self._lent: dict[SlotRef, int] = {}  # slots in use by decoder threads, with the number of jobs
        self._task: asyncio.Task[Any] | None = None  # the task that `cancel` cancels
        self._cancelled_by: Exception | None = None
        self._watch: asyncio.Task[None] | None = None
        self._has_begun = self._has_ended = self._is_decoded = False

    def begin(self) -> None:
        """Open the call in the current task. Raises Unavailable when the server shuts down."""
        self.core.calls.begin(self)
        self._has_begun, self._task = True, asyncio.current_task()

    def cancel(self, reason: Exception) -> None:
        """End the call from outside: cancel its task, which gets the reason from `cause_of`.

        Does nothing if the call is settled or has all its answers.
        """
        has_answers = sum([request.done() for request in self._requests]) >= self.owed
        if self._task is not None and self._cancelled_by is None and not has_answers:
            self._cancelled_by = reason
            for future, request in self._requests.items():
                if not future.done():
                    self._give_up(request)
            if self.body_due_ns is not None and self.served is not None and isinstance(reason, DeadlineExceeded):
                # The statistics count requests that are late before they are queued, as the scheduler does.
                self.core.request_failed(self.served.key, "REJECTED", time.monotonic_ns() - self.arrival_ns)
            self._task.cancel()

    def _give_up(self, request: Request) -> None:
        """Cancel an unanswered request and count it at once, because its batch may end in this loop iteration."""
        self.core.scheduler.cancel(request)
        reason = "REJECTED" if isinstance(self._cancelled_by, RequestError) else "CANCELED"
        self.core.request_failed(request.key, reason, time.monotonic_ns() - request.arrival_ns)

    def cause_of(self, raised: BaseException) -> BaseException:
        """The error that ended the call: the reason of the cancellation, or what was raised."""
        if isinstance(raised, asyncio.CancelledError) and self._cancelled_by is not None:
            return self._cancelled_by
        return raised

    def fail(self, raised: BaseException, ending_of: Callable[[BaseException], CallEnd]) -> NoReturn:
        """End the call with an error and raise its cause."""
        cause = self.cause_of(raised)
        try:
            self.end(ending_of(cause))
            if cause is raised:
                raise raised
            raise cause from None
        finally:
            del cause, raised  # avoid a reference cycle with this frame

    def settle(self) -> None:
        """Mark that the call has its answer or error; nothing cancels it from now on."""
        if self._task is not None and self._cancelled_by is not None:
            self._task.uncancel()
        self._task = None

    def tick(self, now_ns: int) -> None:
        """Cancel the call if its deadline has passed, and start to watch for a client that leaves."""
        if self._task is None:
            return
        if self.deadline_ns is not None and now_ns >= self.deadline_ns:
            self.cancel(self.late())
        elif self.body_due_ns is not None and now_ns >= self.body_due_ns:
            self.cancel(self.slow())
        elif self.until_client_leaves is not None and self._watch is None:
            self._watch = asyncio.ensure_future(self._watch_client(self.until_client_leaves))

    async def _watch_client(self, until_it_leaves: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await until_it_leaves()
        self.cancel(ClientGone())

    def limit(self, timeout_ms: float | None) -> None:
        """Set the deadline relative to the arrival; None means no deadline."""
        self.deadline_ns = None if timeout_ms is None else self.arrival_ns + int(timeout_ms * MILLISECOND_NS)

    def find(self, model: str, version: str | None) -> Served:
        """Hold the requested version until the call ends. Raises NotFound, or Unavailable if it is not ready."""
        served = find_served(self.core.catalog, model, version)
        served.enter()
        self.served = served
        return served

    def decoded(self, ns: int, wait_ns: int = 0) -> None:
        """Record the decoding wait and time of an input. A form has several inputs."""
        if self.span is not None:
            self.span.decoded(time.monotonic_ns(), ns, wait_ns)
        if not self._is_decoded:
            self._is_decoded, self.decode_ns, self.decode_wait_ns = True, ns, wait_ns  # counted with the call
        elif self.served is not None:
            self.core.stage_took(self.served.key, "decode_wait", wait_ns)
            self.core.stage_took(self.served.key, "decode", ns)

    def latest_start_ns(self, terms: Terms) -> int | None:
        """The latest start of the computation, or None."""
        return None if terms.latest_start_us is None else self.arrival_ns + terms.latest_start_us * 1000

    def begin_decode(self, slots: tuple[Slot, ...]) -> None:
        """Pass slots to a decoder thread until `end_decode`, even if the call ends before that."""
        for slot in slots:
            jobs = self._lent.get(slot.ref, 0)
            if not jobs:
                self.core.slab.move((slot.ref,), SlotState.DECODING)
                del self._slots[slot.ref]
            self._lent[slot.ref] = jobs + 1

    def end_decode(self, slots: tuple[Slot, ...]) -> None:
        """Get slots back from a decoder thread, and free them if the call has ended."""
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
        """Hold a region of shared memory until the call ends. Raises NotFound if it was just unregistered."""
        self.core.shared_memory.hold(region)
        self._regions.append(region)

    def reserve(self, nbytes: int) -> Slot:
        """Reserve memory until the call ends. Raises Overloaded, or BodyTooLarge if it can never fit."""
        slab = self.core.slab
        slot = slab.reserve(nbytes)
        if slot is None:
            if self.may_ever_hold(nbytes):
                raise no_room(nbytes, slab)
            raise BodyTooLarge(
                f"the request takes {self.held_bytes + nbytes} bytes in total, but there are only "
                f"{slab.capacity_bytes} for all requests; send a smaller request, or raise --max-inflight-mb"
            )
        self._slots[slot.ref] = slot
        return slot

    @property
    def held_bytes(self) -> int:
        """The bytes that the call has reserved."""
        return sum([slot.extent_bytes for slot in self._slots.values()])

    def may_ever_hold(self, more_bytes: int) -> bool:
        """Whether `more_bytes` would fit if no other call held memory."""
        return self.held_bytes + more_bytes <= self.core.slab.capacity_bytes

    def release(self, slot: Slot) -> None:
        """Free one slot early."""
        del self._slots[slot.ref]
        self.core.slab.free(slot.ref)

    def discard_pages(self) -> None:
        """Return the pages of its slots, whose bytes were copied; the room stays reserved until the call ends."""
        self.core.slab.discard_pages(self._slots)

    def end(self, ending: CallEnd) -> None:
        """Free everything and count the call, after its answer was sent. Further calls do nothing."""
        if self._has_ended:
            return
        self._has_ended, self.ended_ns, self.ending = True, time.monotonic_ns(), ending
        took_ns = self.ended_ns - self.arrival_ns
        core, served = self.core, self.served
        self.settle()
        # Break reference cycles: these hold frames that hold the call.
        self._cancelled_by = self.until_client_leaves = None
        self._requests.clear()
        self.late = self.slow = _late
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        core.slab.move(self._slots, SlotState.FREE)
        self._slots.clear()
        for region in self._regions:
            core.shared_memory.release(region)
        key = None if served is None else served.key
        core.call_ended(key, self.protocol, ending, took_ns, self._stages_ns())
        if self.span is not None:
            self._end_span(self.span, ending, took_ns)
        if served is not None:
            served.leave()
        if self._has_begun:
            core.calls.end(self)

    def _end_span(self, span: RequestSpan, ending: CallEnd, took_ns: int) -> None:
        key = None if self.served is None else self.served.key
        span.end(key, ending, self.answered_ns, self.ended_ns)
        if key is not None:
            self.core.exemplify(key, self.protocol, ending, took_ns, span)

    def _stages_ns(self) -> dict[str, int]:
        """The stages of the call itself; those of its batch are counted with the batch."""
        stages_ns: dict[str, int] = {}
        if self._is_decoded:
            stages_ns = {"decode_wait": self.decode_wait_ns, "decode": self.decode_ns}
        if self.answered_ns and self.ended_ns:
            stages_ns["encode"] = self.ended_ns - self.answered_ns
        return stages_ns

    def facts(self) -> dict[str, object]:
        """The fields of its line in the access log, after its end. The stages are those of its last request."""
        ending = self.ending or ANSWERED
        key = None if self.served is None else self.served.key
        facts: dict[str, object] = {} if key is None else {"model": key.model, "version": key.version}
        facts["outcome"] = ending.outcome.value
        if ending.reason:
            facts["reason"] = ending.reason
        stages_ns = self._stages_ns()
        if self.times is not None:
            copy_in_ns, compute_ns, copy_out_ns, _ = self.times
            stages_ns.update(queue=self.queue_ns, copy_in=copy_in_ns, compute=compute_ns, copy_out=copy_out_ns)
        facts["stages_ms"] = {stage: round(ns / MILLISECOND_NS, 3) for stage, ns in stages_ns.items()}
        return facts

    def build_request(self, served: Served, inputs: Inputs, wanted: tuple[int, ...], terms: Terms) -> Request:
        """Make the scheduler's request from decoded inputs, and reserve room for the outputs."""
        outputs = self._reserve_outputs(served, inputs.samples, wanted)
        slots = dict.fromkeys([ref.slot for ref in (*inputs.tensors, *outputs) if ref is not None])
        return Request(
            self.core.next_request_id(),
            served.key,
            inputs.samples,
            inputs.shapes,
            tuple(slots),
            inputs.tensors,
            wanted,
            outputs,
            self.arrival_ns,
            terms.priority,
            self.deadline_ns,
            self.latest_start_ns(terms),
            None if self.span is None else self.span.traceparent,
        )

    async def run(self, request: Request) -> Done:
        """Queue the request and wait for its answer. Raises RequestError.

        The scheduler owns the slots meanwhile; with an answer they belong to the call again.
        """
        core, key = self.core, request.key
        if not core.catalog.live(key).takes_requests:
            sentence = f"the engine of '{key.model}' is being replaced; retry later"
            raise NotReady(sentence, reason=Refusal.NOT_READY)
        future = core.scheduler.submit(request)
        if isinstance(future, Refuse):
            core.request_failed(key, "REJECTED", time.monotonic_ns() - request.arrival_ns)
            raise refused(request, future, core.max_waiting(key))
        slots = {ref: self._slots.pop(ref) for ref in request.slots}
        self._requests[future] = request
        try:
            done = await future
        except asyncio.CancelledError:
            if future.cancelled():
                if self._cancelled_by is None:  # cancelled by the owner of the task, not by `cancel`
                    self._give_up(request)
            elif future.result().outcome is Outcome.ANSWERED:  # in the same iteration of the loop
                self._slots.update(slots)
            raise
        if done.outcome is not Outcome.ANSWERED:
            if self.span is not None and done.batch is not None:
                self.span.batches.append(done.batch)
            raise failure_of(done)
        self._slots.update(slots)
        self.answered_ns = time.monotonic_ns()
        self.queue_ns, self.times = done.queue_ns, done.times
        if self.span is not None:
            self.span.answered(done)
        return done

    def _reserve_outputs(self, served: Served, samples: int, wanted: tuple[int, ...]) -> tuple[TensorRef | None, ...]:
        sizes = [served.spec.outputs[index].sample_bytes for index in wanted]
        total = samples * sum([size or 0 for size in sizes])
        if not total:
            return (None,) * len(wanted)
        slot, offset = self.reserve(total).ref, 0
        refs: list[TensorRef | None] = []
        for size in sizes:
            refs.append(None if size is None else TensorRef(slot, offset, samples * size))
            offset += samples * (size or 0)
        return tuple(refs)


def _late() -> RequestError:
    return DeadlineExceeded(EXPIRED_RUNNING)
