"""One request on its way through the edge: the memory it holds, its clock, and its client's presence.

Whatever happens on the way, an error, a cancelled task, a client that leaves, `close` gives back every
slot that the edge still owns.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from convoy.app.edge.oip.tensors import TensorRef
from convoy.app.scheduling.request import MILLISECOND_NS, SECOND_NS, Done, Outcome, Request, Shape, SlotRef, TensorPlace
from convoy.app.scheduling.slab import Slot
from convoy.app.submission.inference import InferenceCore, ServedLike
from convoy.app.submission.refusals import check
from convoy.app.submission.shared_memory import Region
from convoy.models.errors import DeadlineExceeded


class ClientGone(Exception):
    """The client has closed the connection; there is nobody to answer."""


class Inputs(NamedTuple):
    """A request's decoded inputs: where they lie, how many samples, and their shapes without the batch."""

    samples: int
    shapes: tuple[Shape, ...]
    tensors: tuple[TensorRef, ...]


@dataclass(frozen=True, slots=True)
class Terms:
    """What the client asks of the schedule; None: no limit. `latest_start_ns` counts from the arrival."""

    timeout_ms: float | None = None
    latest_start_us: int | None = None
    priority: int = 0


@dataclass(slots=True)
class Exchange:
    """The edge's side of one HTTP or gRPC call. Times are CLOCK_MONOTONIC nanoseconds."""

    core: InferenceCore
    arrival_ns: int = field(default_factory=time.monotonic_ns)
    _slots: dict[SlotRef, Slot] = field(default_factory=dict)
    _presence: asyncio.Future[None] | None = None
    _client_left: bool = False
    _awaited: list[asyncio.Future[Done]] = field(default_factory=list)
    _begun: bool = False
    _held: ServedLike | None = None
    _regions: list[Region] | None = None

    def begin(self) -> None:
        """Make the call one that is owed an answer. Raises Unavailable when the server is shutting down."""
        self.core.begin_call()
        self._begun = True

    def hold(self, served: ServedLike) -> None:
        """Keep the version loaded until the exchange closes. Comes in the same turn in which it was found."""
        served.enter()
        self._held = served

    def hold_region(self, region: Region) -> None:
        """Keep a region of shared memory until the exchange closes. Raises NotFound when it has just gone."""
        self.core.shared_memory.hold(region)
        self._regions = [*(self._regions or ()), region]

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
        for future in self._awaited:
            _fail(future, ClientGone())

    def reserve(self, nbytes: int) -> Slot:
        """Memory that is given back when the exchange closes. Raises Overloaded."""
        slot = self.core.reserve(nbytes)
        self._slots[slot.ref] = slot
        return slot

    def release(self, slot: Slot) -> None:
        """Give one slot back early."""
        del self._slots[slot.ref]
        self.core.slab.free(slot.ref)

    def close(self) -> None:
        """Give back every slot that is still the edge's. Comes after the answer has been sent."""
        if self._presence is not None:
            self._presence.cancel()
        self.core.slab.free(*self._slots)
        self._slots.clear()
        if self._regions is not None:
            for region in self._regions:
                self.core.shared_memory.release(region)
            self._regions = None
        if self._held is not None:
            self._held.leave()
            self._held = None
        if self._begun:
            self._begun = False
            self.core.end_call()

    def build_request(self, served: ServedLike, inputs: Inputs, wanted: tuple[int, ...], terms: Terms) -> Request:
        """The scheduler's view of what was decoded, with room reserved for the outputs."""
        outputs = self._reserve_outputs(served, inputs.samples, wanted)
        slots: dict[SlotRef, int] = {}  # and their numbers in the request

        def place(ref: TensorRef) -> TensorPlace:
            return TensorPlace(slots.setdefault(ref.slot, len(slots)), ref.offset, ref.nbytes)

        places_in = tuple([place(ref) for ref in inputs.tensors])
        places_out = tuple([None if ref is None else place(ref) for ref in outputs])
        return Request(
            id=self.core.next_request_id(),
            key=served.key,
            samples=inputs.samples,
            shapes=inputs.shapes,
            slots=tuple(slots),
            inputs=places_in,
            wanted=wanted,
            outputs=places_out,
            arrival_ns=self.arrival_ns,
            priority=terms.priority,
            deadline_ns=None if terms.timeout_ms is None else self.arrival_ns + int(terms.timeout_ms * MILLISECOND_NS),
            latest_start_ns=None if terms.latest_start_us is None else self.arrival_ns + terms.latest_start_us * 1000,
        )

    async def run(self, request: Request) -> Done:
        """Submit and wait. Raises RequestError, or ClientGone when the client left before the answer.

        The slots are the scheduler's from here on; with an answer they are the edge's again.
        """
        future = self.core.submit(request)
        own = {ref: self._slots.pop(ref) for ref in request.slots}
        try:
            done = await self._answer(future, request)
        except BaseException as error:
            if _has_answer(future):
                self._slots.update(own)  # it came in the very turn in which we stopped waiting
            else:
                self.core.cancel(request, "REJECTED" if isinstance(error, DeadlineExceeded) else "CANCELED")
            raise
        finally:
            del future  # the error that it may hold holds this frame: a circle for the garbage collector
        check(done)
        self._slots.update(own)
        return done

    async def _answer(self, future: asyncio.Future[Done], request: Request) -> Done:
        timer = None
        if request.deadline_ns is not None:
            remaining_s = (request.deadline_ns - time.monotonic_ns()) / SECOND_NS
            timer = asyncio.get_running_loop().call_later(remaining_s, _expire, future)
        self._awaited.append(future)
        if self._client_left:
            _fail(future, ClientGone())
        try:
            return await future
        finally:
            self._awaited.remove(future)
            del future
            if timer is not None:
                timer.cancel()

    def _reserve_outputs(
        self, served: ServedLike, samples: int, wanted: tuple[int, ...]
    ) -> tuple[TensorRef | None, ...]:
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


def _fail(future: asyncio.Future[Done], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _expire(future: asyncio.Future[Done]) -> None:
    _fail(future, DeadlineExceeded("Request timeout expired before the model had answered"))


def _has_answer(future: asyncio.Future[Done]) -> bool:
    if not future.done() or future.cancelled() or future.exception() is not None:
        return False
    return future.result().outcome is Outcome.ANSWERED
