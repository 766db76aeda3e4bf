"""Where edge processes come to the core: it takes their requests, gives back their memory, keeps their counts.

Each edge has a part of the shared memory. The part outlives the edge: what an engine still touches when an edge
dies is known here, and told to the edge that comes after it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from convoy.app.core import Core
from convoy.app.edge.options import EdgeOptions
from convoy.app.lifecycle.catalog import Served
from convoy.app.outcomes import Refusal
from convoy.app.processes.channel import Channel
from convoy.app.processes.messages import (
    PROTOCOL_VERSION,
    Cancel,
    CatalogUpdate,
    Extent,
    Hello,
    Left,
    Lent,
    LoadTold,
    Message,
    OptionsTold,
    Refused,
    Released,
    Report,
    ServedVersion,
    Submit,
    UpdateApplied,
    Welcome,
)
from convoy.app.processes.references import WrongReference, adopted, check_request, ended_of, request_of
from convoy.app.scheduling.request import Done, ModelKey, Outcome, Request
from convoy.app.submission.load import CoreLoad
from convoy.models.errors import RequestError
from convoy.models.records import to_jsonable

_log = logging.getLogger("convoy")
_KNOWN_WITHIN_S = 2.0
# To a request that found its version while another core spoke.
_REPLACED = "the model was loaded anew in the meantime; send the request again"


@dataclass(slots=True, eq=False)
class _Loan:
    """The memory of one request. `is_told`: the edge knows by other words that it has it back."""

    extents: tuple[Extent, ...]
    in_use: int
    is_told: bool = False


@dataclass(slots=True, eq=False)
class _Part:
    """An edge's part of the memory, what of it is lent, and who speaks for it now."""

    extent: Extent
    loans: dict[int, _Loan] = field(default_factory=dict)
    edge: _EdgeConnection | None = None


class EdgeRegistry:
    """All edges of one core."""

    def __init__(self, core: Core, parts: Sequence[Extent], supervisor_pid: int) -> None:
        self.core, self._supervisor_pid = core, supervisor_pid
        self.parts = [_Part(extent) for extent in parts]
        core.room_elsewhere_bytes = sum(extent.nbytes for extent in parts)
        self._edges: set[_EdgeConnection] = set()
        self._update_is_due = False
        self._update_number = 0
        self._update_is_known = asyncio.Event()  # an edge knows more, or is no more
        core.other_processes = self._processes
        core.version_open_elsewhere = self._open_of
        self.options: OptionsTold | None = None  # since the start no other ones
        core.catalog.watch(self._catalog_changed, self._until_update_is_known)
        core.load_watch.on_look = self._tell_load

    def receive(self) -> Channel:
        """The protocol of a new connection, which is not an edge before it has said Hello."""
        return _EdgeConnection(self).channel

    def open(self, edge: _EdgeConnection) -> None:
        self._edges.add(edge)

    def close(self, edge: _EdgeConnection) -> None:
        self._edges.discard(edge)
        self.count_held()
        self.update_is_known()

    def count_held(self) -> None:
        self.core.bytes_elsewhere = sum(edge.used_bytes for edge in self._edges)
        self.core.open_calls_elsewhere = sum(edge.open_calls for edge in self._edges)
        self.core.decoding_elsewhere = sum(edge.waiting_to_decode for edge in self._edges)

    def _open_of(self, key: ModelKey) -> int:
        """Calls for a version, without the edges' own hold of it."""
        return sum(edge.open_by_version.get(key, 0) - 1 for edge in self._edges if edge.holds(key))

    def _processes(self) -> dict[str, int]:
        edges = {f"edge_{number}": part.edge.pid for number, part in enumerate(self.parts) if part.edge is not None}
        return {"supervisor": self._supervisor_pid, **edges}

    def update(self) -> CatalogUpdate:
        catalog = self.core.catalog
        served = tuple(ServedVersion(one.key, one.spec, one.text_only, one.engines) for one in catalog.served())
        is_complete, pages_locked = self.core.initial_load_done, self.core.slab.keeps_pages
        return CatalogUpdate(self._update_number, served, tuple(catalog.others()), is_complete, pages_locked)

    def update_is_known(self) -> None:
        """Let who waits for the edges look again."""
        self._update_is_known.set()
        self._update_is_known.clear()

    async def _until_update_is_known(self) -> None:
        """Return when every edge has the update of now; one that hangs is not waited for."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_KNOWN_WITHIN_S):
                number = self._update_number
                while any(edge.known_update < number for edge in self._edges):
                    await self._update_is_known.wait()

    def _catalog_changed(self) -> None:
        # Once for all changes of this turn, and after it, when the new version has its queue and its engines.
        if not self._update_is_due:
            self._update_is_due = True
            self._update_number += 1
            asyncio.get_running_loop().call_soon(self._tell_catalog)

    def tell_options(self, options: EdgeOptions, log_level: str) -> None:
        """To all edges, and to those that come."""
        self.options = OptionsTold(json.dumps(to_jsonable(options)), log_level)
        for edge in self._edges:
            edge.channel.send(self.options)

    def _tell_load(self, load: CoreLoad) -> None:
        for edge in self._edges:
            edge.channel.send(LoadTold(load))

    def _tell_catalog(self) -> None:
        self._update_is_due = False
        for edge in self._edges:
            edge.tell_catalog()


class _EdgeConnection:
    """One connection. For each version that it may find, it holds the version until it says that it does not."""

    def __init__(self, registry: EdgeRegistry) -> None:
        self.channel = Channel(self._heard, self._lost)
        self.used_bytes = self.open_calls = self.waiting_to_decode = 0
        self.open_by_version: dict[ModelKey, int] = {}
        self.known_update = -1
        self.pid = 0
        self._edges, self._core = registry, registry.core
        self._part: _Part | None = None
        self._requests: dict[int, Request] = {}
        self._held: dict[ModelKey, Served] = {}

    def holds(self, key: ModelKey) -> bool:
        """Whether it keeps a version from being closed."""
        return key in self._held

    def tell_catalog(self) -> None:
        for served in self._core.catalog.served():
            if served.key not in self._held:
                served.enter()
                self._held[served.key] = served
        self.channel.send(self._edges.update())

    def _heard(self, message: Message) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Report():
                self._take_report(message)
            case Cancel(own_id, reason):
                request = self._requests.pop(own_id, None)
                if request is not None:
                    self._core.cancel(request, reason)
            case UpdateApplied(number):
                self.known_update = number
                self._edges.update_is_known()
            case Left(key):
                if key in self._held:
                    self._held.pop(key).leave()
            case Hello():
                self._greet(message)
            case _:
                raise WrongReference(f"an edge does not say {type(message).__name__}")

    def _greet(self, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION or not 0 <= hello.part < len(self._edges.parts):
            raise WrongReference(f"{hello} is not of this server, which speaks version {PROTOCOL_VERSION}")
        self._part = part = self._edges.parts[hello.part]
        if part.edge is not None:
            part.edge.channel.close()  # of a process that has died, and whose end has not been seen yet
        part.edge = self
        self.pid = hello.pid
        self._edges.open(self)
        lent = tuple(Lent(own_id, loan.extents) for own_id, loan in part.loans.items())
        self.channel.send(Welcome(PROTOCOL_VERSION, lent))
        if self._edges.options is not None:
            self.channel.send(self._edges.options)
        self.tell_catalog()

    def _submit(self, submit: Submit) -> None:
        part, own_id = self._part, submit.id
        if part is None or own_id in part.loans:
            raise WrongReference(f"request {own_id} comes before Hello, or a second time")
        served = self._held.get(submit.key)
        if served is None:
            self.channel.send(Refused(own_id, "Unavailable", _REPLACED, Refusal.NOT_READY, 0.0))
            return
        check_request(submit, served)
        loan = _Loan(submit.extents, len(submit.extents))
        slots = adopted(submit, part.extent, self._core.slab, lambda: _one_is_free(part, own_id, loan))
        part.loans[own_id] = loan
        request = request_of(submit, slots)
        self._requests[own_id] = request
        try:
            self._core.take(request, lambda done: self._ended(done, loan))
        except RequestError as error:
            self._refuse(request, loan, error)

    def _refuse(self, request: Request, loan: _Loan, error: RequestError) -> None:
        del self._requests[request.id]
        loan.is_told = True
        self._core.slab.free(*request.slots)
        words, retry_after_s = str(error), error.retry_after_s or 0.0
        self.channel.send(Refused(request.id, type(error).__name__, words, error.reason, retry_after_s))

    def _ended(self, done: Done, loan: _Loan) -> None:
        self._requests.pop(done.request.id, None)
        self.channel.send(ended_of(done))
        if done.outcome is Outcome.ANSWERED:
            loan.is_told = True
            self._core.slab.free(*done.request.slots)

    def _take_report(self, report: Report) -> None:
        # What was found while another core spoke is not known here: its calls are counted as those of no model.
        for (key, stage), values in report.stages.items():
            for ns in values if key in self._held else ():
                self._core.stage_took(key, stage, ns)
        for (called, protocol, ending), values in report.calls.items():
            found = called if called in self._held else None
            for ns in values:
                self._core.call_ended(found, protocol, ending, ns)
        for (key, reason), values in report.failed.items():
            for ns in values if key in self._held else ():
                self._core.request_failed(key, reason, ns)
        for exemplar in report.exemplars:
            if exemplar.key in self._held:
                self._core.exemplify(exemplar)
        for reason, count in report.turned_away.items():
            self._core.turned_away(reason, count)
        self.used_bytes, self.open_calls = report.used_bytes, report.open_calls
        self.open_by_version = report.open_by_version
        self.waiting_to_decode = report.waiting_to_decode
        self._edges.count_held()

    def _lost(self) -> None:
        """The edge has died: its requests with it, as far as no engine has them."""
        if self._part is not None and self._part.edge is self:
            self._part.edge = None
        self._edges.close(self)
        requests, self._requests = self._requests, {}
        for request in requests.values():
            self._core.cancel(request, "CANCELED")
        held, self._held = self._held, {}
        for served in held.values():
            served.leave()


def _one_is_free(part: _Part, own_id: int, loan: _Loan) -> None:
    """No engine can touch one slot of a request any more."""
    loan.in_use -= 1
    if loan.in_use:
        return
    del part.loans[own_id]
    if not loan.is_told and part.edge is not None:
        part.edge.channel.send(Released(own_id))
