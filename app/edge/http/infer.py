"""`POST /v2/models/{model}[/versions/{version}]/infer`: tensors in, tensors out."""

from __future__ import annotations

import time

from convoy.app.edge.decode_pool import DecodePool
from convoy.app.edge.http.body import Body
from convoy.app.edge.http.calls import Call, HotRoute
from convoy.app.edge.http.express import HEADER_LENGTH, Express
from convoy.app.edge.http.infer_request import RequestParser, parse_infer
from convoy.app.edge.http.infer_response import render_infer
from convoy.app.edge.http.json_documents import INLINE_JSON_BYTES
from convoy.app.edge.http.replies import Reply
from convoy.app.edge.oip.answers import is_heavy_answer
from convoy.app.edge.oip.inference import is_heavy, place_tensors, run_inference
from convoy.app.edge.options import EdgeOptions
from convoy.app.edge.timing import server_timing, timing_ms
from convoy.app.submission.inference import InferenceCore, ServedLike
from convoy.models.errors import InvalidRequest


class InferRoute(HotRoute):
    """The Open Inference Protocol with the binary tensor extension."""

    protocol = "v2"

    def __init__(
        self, core: InferenceCore, options: EdgeOptions, pool: DecodePool, express: Express | None = None
    ) -> None:
        super().__init__(core, options, pool)
        self._parser = RequestParser()
        self._express = express

    async def answer(self, call: Call, served: ServedLike, body: Body) -> Reply:
        started_ns = time.monotonic_ns()
        timeout_ms = self.timeout_ms(call)
        header_length = _header_length(call)
        json_bytes = body.nbytes if header_length is None else header_length
        if json_bytes <= INLINE_JSON_BYTES and not is_heavy(body.nbytes, served):
            request = self._parser.parse(body, header_length, served, self.core.shared_memory)
        else:
            request = await self.pool.run(parse_infer, body, header_length, served, self.core.shared_memory)
        inputs = place_tensors(request, call.exchange)
        decode_ns = time.monotonic_ns() - started_ns
        self.core.stage_took(served.key, "decode", decode_ns)
        done = await run_inference(request, inputs, served, call.exchange, timeout_ms)
        if is_heavy_answer(request, done):
            response = await self.pool.run_anyway(render_infer, request, served, done)
        else:
            response = render_infer(request, served, done)
        headers: tuple[tuple[bytes, bytes], ...] = (
            server_timing(timing_ms(done, decode_ns, time.monotonic_ns() - call.exchange.arrival_ns)),
        )
        if response.header_length is not None:
            headers = (*headers, (HEADER_LENGTH, str(response.header_length).encode()))
        reply = Reply(200, response.pieces, response.content_type, headers)
        if self._express is not None and header_length != 0:
            self._express.learn(call, body, header_length, request, served, reply)
        return reply


def _header_length(call: Call) -> int | None:
    raw = call.headers.get(HEADER_LENGTH)
    if raw is None:
        return None
    if not raw.isdigit() or len(raw) > 12:
        raise InvalidRequest(
            f"Inference-Header-Content-Length must be a whole number, got {raw[:40].decode('latin-1')!r}"
        )
    return int(raw)
