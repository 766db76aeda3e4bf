"""The core as an edge process has it: at the other end of a socket, with the tensors in shared memory.

An `InferenceCore`, so the routes cannot tell. Owns the edge's part of the memory; what a request holds is lent to
the core from `submit` until the core says that it is the edge's again, whatever became of the client meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from convoy.app.listeners import tell
from convoy.app.outcomes import ANSWERED, CallEnd, Refusal
from convoy.app.processes.channel import Channel
from convoy.app.processes.edge_catalog import EdgeCatalog
from convoy.app.processes.messages import (
    PROTOCOL_VERSION,
    Cancel,
    CatalogUpdate,
    Ended,
    Hello,
    Left,
    LoadTold,
    Message,
    OptionsTold,
    Refused,
    Released,
    Report,
    UpdateApplied,
    Welcome,
)
from convoy.app.processes.references import answers_of, submission
from convoy.app.scheduling.request import Done, ModelKey, Outcome, Request, SlotRef, Spent
from convoy.app.scheduling.slab import Slab, Slot, SlotState
from convoy.app.submission.load import CoreLoad
from convoy.app.submission.open_calls import OnEnd, OpenCalls
from convoy.app.submission.refusals import no_room
from convoy.app.submission.shared_memory import SharedMemory
from convoy.app.tracing.spans import Exemplar
from convoy.models.errors import DeadlineExceeded, Overloaded, RequestError, Unavailable

_log = logging.getLogger("convoy")
# Counters may be so much behind; in return they cost a message per interval and not per request.
_REPORT_EVERY_S = 0.05
_RETRY_S = 0.05
# An edge process counts its requests from its own number on, so that no two in the core have the same.
_INCARNATION_SHIFT = 40
CORE_IS_AWAY = "the process that runs the models is being replaced; send the request again"


class RemoteCore(OpenCalls):
    """One edge's core. `on_options` hears of options that have changed."""

    def __init__(self, slab: Slab, part: int, incarnation: int) -> None:
        super().__init__()
        self.slab = slab
        # Requests that name shared memory are led to the core whole; here there is none.
        self.shared_memory = SharedMemory(is_allowed=False)
        self.catalog = EdgeCatalog(self._unused)
        self._hello = Hello(PROTOCOL_VERSION, part, incarnation, os.getpid())
        self.next_request_id = count(incarnation << _INCARNATION_SHIFT).__next__
        self._channel: Channel | None = None
        self._presence = asyncio.Event()
        self._waiting: dict[int, tuple[Request, OnEnd]] = {}
        self._lent: dict[int, tuple[SlotRef, ...]] = {}
        self._load = CoreLoad()
        self.on_options: Callable[[OptionsTold], None] = lambda told: None
        self._report = Report()
        self._report_timer: asyncio.TimerHandle | None = None
        self._takers: dict[type, Callable[[Any], None]] = {  # each takes its own kind
            Ended: self._ended,
            Refused: self._refused,
            Released: lambda released: self._free(released.id),
            CatalogUpdate: self._catalog_changed,
            LoadTold: self._load_told,
            OptionsTold: lambda told: self.on_options(told),
            Welcome: self._welcomed,
        }

    @property
    def is_present(self) -> bool:
        """Whether there is a core that takes requests."""
        return self._presence.is_set()

    async def until_present(self, within_s: float) -> None:
        """Return when there is one, or when the time is over."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._presence.wait(), within_s)

    async def stay_connected(self, address: Path) -> None:
        """Speak to the core at this address, and to the one after it; until cancelled."""
        while True:
            try:
                await self._speak(address)
            except OSError:  # nobody has listened there yet
                await asyncio.sleep(_RETRY_S)

    async def _speak(self, address: Path) -> None:
        """Until the core is lost."""
        lost = asyncio.Event()
        channel = Channel(lambda message: self._takers[type(message)](message), lost.set)
        await asyncio.get_running_loop().create_unix_connection(lambda: channel, str(address))
        self._channel = channel
        channel.send(self._hello)
        try:
            await lost.wait()
        finally:
            self._core_is_lost()

    # For the routes

    def begin_call(self) -> None:
        """The same as with a core at hand. Raises Unavailable also while there is none."""
        if not self.is_present:
            raise Unavailable(CORE_IS_AWAY, reason=Refusal.CORE_AWAY)
        super().begin_call()

    def reserve(self, nbytes: int) -> Slot:
        """Memory for a body or a tensor. Raises Overloaded when too many bytes of this edge's are in flight."""
        slot = self.slab.reserve(nbytes)
        self._report_soon()
        if slot is None:
            raise no_room(nbytes, self.slab)
        return slot

    def take(self, request: Request, on_end: OnEnd) -> None:
        """Lend the request's memory to the core. Raises Unavailable while there is none."""
        if not self.is_present:
            raise Unavailable(CORE_IS_AWAY, reason=Refusal.CORE_AWAY)
        self.slab.move(request.slots, SlotState.QUEUED)
        self._lent[request.id] = request.slots
        self._waiting[request.id] = (request, on_end)
        self._say(submission(request, self.slab))

    def cancel(self, request: Request, reason: str) -> None:
        """Nobody waits any more. Harmless after the end."""
        if self._waiting.pop(request.id, None) is not None:
            self._say(Cancel(request.id, reason))

    def stage_took(self, key: ModelKey, stage: str, ns: int) -> None:
        """A stage of one request that runs at the edge has ended: `decode_wait`, `decode` or `encode`."""
        self._report.stages.setdefault((key, stage), []).append(ns)
        self._report_soon()

    def request_failed(self, key: ModelKey, reason: str, ns: int) -> None:
        """A request that was never given to `take` has no answer, after so long. `reason` as in `cancel`."""
        self._report.failed.setdefault((key, reason), []).append(ns)
        self._report_soon()

    def call_ended(self, key: ModelKey | None, protocol: str, ending: CallEnd, ns: int) -> None:
        """A call has its answer, or nobody waits for one. `key` is None where no model was found."""
        self._report.calls.setdefault((key, protocol, ending), []).append(ns)
        self._report_soon()

    def call_answered(self, key: ModelKey, protocol: str, spent: Spent) -> None:
        """Both at once, for a call that ended well."""
        self.stage_took(key, "decode_wait", spent.decode_wait_ns)
        self.stage_took(key, "decode", spent.decode_ns)
        self.stage_took(key, "encode", spent.encode_ns)
        self.call_ended(key, protocol, ANSWERED, spent.total_ns)

    def exemplify(self, exemplar: Exemplar) -> None:
        """A call that was counted has a span, which the histograms may name."""
        self._report.exemplars.append(exemplar)
        self._report_soon()

    def current_load(self) -> CoreLoad:
        """Over the last seconds, of the whole server."""
        return self._load

    def turned_away(self, reason: str) -> None:
        """Something was refused that is no call, or part of one: a connection, a file among others."""
        self._report.turned_away[reason] = self._report.turned_away.get(reason, 0) + 1
        self._report_soon()

    # What the core says

    def _welcomed(self, welcome: Welcome) -> None:
        if welcome.version != PROTOCOL_VERSION:
            raise RuntimeError(f"the core speaks version {welcome.version} and this edge {PROTOCOL_VERSION}")
        still_lent = {one.id: one.extents for one in welcome.lent}
        for own_id in [own_id for own_id in self._lent if own_id not in still_lent]:
            self._free(own_id)
        for own_id, extents in still_lent.items():
            if own_id not in self._lent:  # it was an edge's that is no more
                slots = [self.slab.reserve_at(*extent) for extent in extents]
                self._lent[own_id] = tuple(slot.ref for slot in slots)
                self._report_soon()

    def _catalog_changed(self, update: CatalogUpdate) -> None:
        if update.pages_locked:
            self.slab.keep_pages()
        self.catalog.update(update)
        self._presence.set()
        self._report_soon()
        self._say(UpdateApplied(update.number))

    def _load_told(self, told: LoadTold) -> None:
        self._load = told.load

    def _ended(self, ended: Ended) -> None:
        request, on_end = self._waiting.pop(ended.id, (None, None))
        if request is None or on_end is None:
            if ended.outcome is Outcome.ANSWERED:
                self._free(ended.id)  # whoever waited stopped waiting a moment ago
            return
        if ended.outcome is Outcome.ANSWERED:
            self.slab.move(self._lent.pop(ended.id), SlotState.ANSWERED)
        answers = answers_of(ended, request, self.slab)
        times, queue_ns, batch_samples = ended.times, ended.queue_ns, ended.batch_samples
        tell(on_end, Done(request, ended.outcome, answers, times, queue_ns, batch_samples, ended.reason, ended.batch))

    def _refused(self, refused: Refused) -> None:
        self._free(refused.id)
        _, on_end = self._waiting.pop(refused.id, (None, None))
        if on_end is not None:
            tell(on_end, _error(refused))

    def _core_is_lost(self) -> None:
        """Whoever waits is told; what was lent stays lent until the next core says what it still uses."""
        self._presence.clear()
        self.catalog.forget()
        waiting, self._waiting = self._waiting, {}
        for _, on_end in waiting.values():
            tell(on_end, Unavailable(CORE_IS_AWAY))

    # What the core is told

    def _say(self, message: Message) -> None:
        if self._channel is not None:
            self._channel.send(message)

    def _unused(self, key: ModelKey) -> None:
        # After this turn, because the call that needed it last is counted in this turn.
        asyncio.get_running_loop().call_soon(self._say_left, key)

    def _say_left(self, key: ModelKey) -> None:
        self._send_report()
        self._say(Left(key))

    def _report_soon(self) -> None:
        if self._report_timer is None:
            self._report_timer = asyncio.get_running_loop().call_later(_REPORT_EVERY_S, self._report_is_due)

    def _report_is_due(self) -> None:
        self._report_timer = None
        self._send_report()
        if self.slab.used_bytes or self.open_calls:
            self._report_soon()

    def _send_report(self) -> None:
        if not self.is_present:
            return  # the next core will hear of it
        report, self._report = self._report, Report()
        report.used_bytes, report.open_calls = self.slab.used_bytes, self.open_calls
        report.open_by_version = self.catalog.open_calls()
        report.waiting_to_decode = self.waiting_to_decode()
        self._say(report)

    def _free(self, own_id: int) -> None:
        self.slab.free(*self._lent.pop(own_id))


def _error(refused: Refused) -> RequestError:
    match refused.error:
        case "Overloaded":
            return Overloaded(refused.message, reason=refused.reason, retry_after_s=refused.retry_after_s)
        case "DeadlineExceeded":
            return DeadlineExceeded(refused.message)
    return Unavailable(refused.message, reason=refused.reason, retry_after_s=refused.retry_after_s)
