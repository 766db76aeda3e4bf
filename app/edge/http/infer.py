"""`POST /v2/models/{model}[/versions/{version}]/infer`: tensors in, tensors out."""

from __future__ import annotations

import time

from convoy.app.edge.http.body import Body
from convoy.app.edge.http.hot_route import HotRoute, HttpHead
from convoy.app.edge.http.infer_request import parse_infer
from convoy.app.edge.http.infer_response import InferResponse, render_infer
from convoy.app.edge.http.json_documents import INLINE_JSON_BYTES
from convoy.app.edge.http.json_weight import WEIGHED_INLINE_BYTES, Weight, check_weight, needed_bytes, weigh
from convoy.app.edge.http.replies import Reply
from convoy.app.edge.oip.answers import is_heavy_answer
from convoy.app.edge.oip.call import Call
from convoy.app.edge.oip.decoder import Decoded, DecodeWork
from convoy.app.edge.oip.inference import InferRequest, is_heavy, request_for, within
from convoy.app.edge.timing import StagesNs, server_timing
from convoy.app.lifecycle.catalog import Served
from convoy.app.scheduling.request import Done
from convoy.models.errors import BodyTooLarge, InvalidRequest

HEADER_LENGTH = b"inference-header-content-length"


class InferRoute(HotRoute):
    """The Open Inference Protocol with the binary tensor extension."""

    protocol = "v2"

    async def answer(self, call: Call, head: HttpHead, served: Served, body: Body) -> Reply:
        started_ns = time.monotonic_ns()
        timeout_ms, header_length = head.timeout_ms, _header_length(head)
        meaning, wait_ns = await self._parse(call, body, header_length, served, timeout_ms)
        request = request_for(meaning, served, call, within(meaning.terms, timeout_ms))
        call.decoded(time.monotonic_ns() - started_ns - wait_ns, wait_ns)
        done = await call.run(request)
        if is_heavy_answer(meaning, done):
            response = await self.decoder.run_owed(render_infer, meaning, served, done)
        else:
            response = render_infer(meaning, served, done)
        return _reply(call, done, response)

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
    timing = server_timing(StagesNs.of(done, call.decode_wait_ns, call.decode_ns, total_ns))
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
