"""`POST /v2/models/{model}[/versions/{version}]/infer`: tensors in, tensors out."""

from __future__ import annotations

import time

from convoy.app.core import Core
from convoy.app.edge.http.body import Body
from convoy.app.edge.http.hot_route import HotRoute, HttpHead, OnError, OnReply
from convoy.app.edge.http.infer_request import parse_infer
from convoy.app.edge.http.infer_response import InferResponse, render_infer, repeat_response, repeatable_json
from convoy.app.edge.http.json_documents import INLINE_JSON_BYTES
from convoy.app.edge.http.json_weight import WEIGHED_INLINE_BYTES, Weight, check_weight, needed_bytes, weigh
from convoy.app.edge.http.known_requests import Known, KnownRequests
from convoy.app.edge.http.replies import Reply
from convoy.app.edge.oip.answers import is_heavy_answer
from convoy.app.edge.oip.call import Call, Terms
from convoy.app.edge.oip.decoder import Decoded, Decoder, DecodeWork
from convoy.app.edge.oip.inference import InferRequest, is_heavy, request_for, within
from convoy.app.edge.options import EdgeOptions
from convoy.app.edge.timing import StagesNs, server_timing
from convoy.app.lifecycle.catalog import Served
from convoy.app.scheduling.request import Done
from convoy.models.errors import BodyTooLarge, InvalidRequest

HEADER_LENGTH = b"inference-header-content-length"


class InferRoute(HotRoute):
    """The Open Inference Protocol with the binary tensor extension."""

    protocol = "v2"

    def __init__(self, core: Core, options: EdgeOptions, decoder: Decoder) -> None:
        super().__init__(core, options, decoder)
        self.known = KnownRequests()

    async def answer(self, call: Call, head: HttpHead, served: Served, body: Body) -> Reply:
        started_ns = time.monotonic_ns()
        timeout_ms, wait_ns = self.timeout_ms(head, served), 0
        header_length = _header_length(head)
        header = bytes(body.view[:header_length]) if header_length else b""
        known = self.known.find(served.key, header, body.nbytes) if header_length else None
        if known is not None:
            meaning, terms = known.meaning, within(known.meaning.terms, timeout_ms)
            slots = (body.slot.ref, call.reserve(known.room_bytes).ref) if known.room_bytes else (body.slot.ref,)
            request = call.repeat_request(known.request, slots, terms)
        else:
            meaning, wait_ns = await self._parse(call, body, header_length, served, timeout_ms)
            request = request_for(meaning, served, call, within(meaning.terms, timeout_ms))
        call.decoded(time.monotonic_ns() - started_ns - wait_ns, wait_ns)
        done = await call.run(request)
        if known is not None and known.answer is not None:
            return _reply(call, done, repeat_response(known.answer, meaning, done))
        if is_heavy_answer(meaning, done):
            response = await self.decoder.run_owed(render_infer, meaning, served, done)
        else:
            response = render_infer(meaning, served, done)
        if header_length and known is None:
            learned = Known.of(meaning, request, body.nbytes, repeatable_json(meaning, served, done))
            self.known.learn(header, body.nbytes, served.spec, learned)
        return _reply(call, done, response)

    def terms_of(self, known: Known, served: Served) -> Terms:
        """Of a request without a query, by this edition of the options."""
        return within(known.meaning.terms, self.options.timeout_ms(served.key.model))

    def repeat(
        self,
        call: Call,
        known: Known,
        terms: Terms,
        body: memoryview,
        on_reply: OnReply,
        on_error: OnError,
    ) -> None:
        """Answer a body of which all is known but its tensors and its answers' values. Raises RequestError."""
        json_part = known.answer
        assert json_part is not None, "only such are repeated; this is a bug"
        request = known.pattern.request_of(call, body, terms)
        call.decoded(time.monotonic_ns() - call.arrival_ns)

        def on_end(end: Done | Exception | None) -> None:
            if isinstance(end, Done):
                try:
                    on_reply(_reply(call, end, repeat_response(json_part, known.meaning, end)))
                except Exception as error:  # a bug, which its client would wait for
                    on_error(error)
            elif end is not None:
                on_error(end)

        call.take(request, on_end)

    async def _parse(
        self, call: Call, body: Body, header_length: int | None, served: Served, timeout_ms: float | None
    ) -> Decoded[InferRequest]:
        memory, slots, deadline_ns = self.core.shared_memory, (body.slot,), call.deadline_ns(timeout_ms)
        text = body.view[:header_length]
        weighed_ns = needs_bytes = 0
        if text.nbytes > INLINE_JSON_BYTES:
            if text.nbytes <= WEIGHED_INLINE_BYTES:
                weight = weigh(text)
            else:
                work = DecodeWork("weigh", text.nbytes, slots, deadline_ns)
                weight, weighed_ns = await self.decoder.run(call, work, weigh, text)
            check_weight(weight, served)
            needs_bytes = self._room_for(call, weight, served)
        elif not is_heavy(body.nbytes, served):
            return Decoded(parse_infer(body, header_length, served, memory), 0)
        work = DecodeWork("tensors", body.nbytes, slots, deadline_ns, needs_bytes=needs_bytes)
        meaning, wait_ns = await self.decoder.run(call, work, parse_infer, body, header_length, served, memory)
        return Decoded(meaning, weighed_ns + wait_ns)

    def _room_for(self, call: Call, weight: Weight, served: Served) -> int:
        """The memory that it takes to read such JSON. Raises BodyTooLarge where there can never be so much."""
        needs_bytes = needed_bytes(weight, served)
        if not call.may_ever_hold(needs_bytes):
            raise BodyTooLarge(
                f"to read {weight.values} values in {weight.nbytes} bytes of JSON takes {needs_bytes} beside it, and "
                f"there are {call.core.slab.capacity_bytes} for all requests; send binary tensor data, or raise "
                "--max-inflight-mb"
            )
        return needs_bytes


def _reply(call: Call, done: Done, response: InferResponse) -> Reply:
    total_ns = time.monotonic_ns() - call.arrival_ns
    timing = server_timing(StagesNs(done, call.decode_wait_ns, call.decode_ns, total_ns))
    if response.header_length is None:
        return Reply(200, response.pieces, response.content_type, (timing,))
    length = (HEADER_LENGTH, b"%d" % response.header_length)
    return Reply(200, response.pieces, response.content_type, (timing, length))


def _header_length(head: HttpHead) -> int | None:
    raw = head.headers.get(HEADER_LENGTH)
    if raw is None:
        return None
    if not raw.isdigit() or len(raw) > 12:
        raise InvalidRequest(
            f"Inference-Header-Content-Length must be a whole number, got {raw[:40].decode('latin-1')!r}"
        )
    return int(raw)
