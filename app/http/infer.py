"""`POST /v2/models/{model}[/versions/{version}]/infer`: tensors in, tensors out."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import orjson

from convoy.app.calls.call import Call
from convoy.app.calls.timing import Timing
from convoy.app.http.hot_route import HotRoute, HttpHead
from convoy.app.http.infer_request import parse_infer
from convoy.app.http.json_documents import (
    INLINE_JSON_BYTES,
    Weight,
    check_weight,
    needed_bytes,
    weigh,
)
from convoy.app.http.replies import Reply
from convoy.app.lifecycle.catalog import Served
from convoy.app.pictures.decoder import Decoded, DecodeWork
from convoy.app.protocol.inference import InferRequest, answers_of, is_heavy, is_heavy_answer, request_for
from convoy.app.scheduling.request import Done
from convoy.app.scheduling.slab import Slot
from convoy.models.errors import BodyTooLarge, InvalidRequest
from convoy.models.tensors import unpack


def render_infer(request: InferRequest, served: Served, done: Done) -> Reply:
    """Encode the answers in the order in which they were asked for.

    The pieces are views of the slab: they must be sent before the call ends. Raises InvalidRequest for
    an answer that does not fit the form in which it was asked for.
    """
    outputs: list[dict[str, Any]] = []
    binary: list[memoryview] = []
    is_strict_json = True
    for answer in answers_of(request, served, done):
        spec = answer.spec
        document: dict[str, Any] = {"name": spec.name, "datatype": spec.dtype, "shape": list(answer.shape)}
        if answer.elsewhere:
            pass  # the client has it
        elif answer.binary:
            document["parameters"] = {"binary_data_size": answer.data.nbytes}
            binary.append(answer.data)
        elif spec.is_strings:
            document["data"] = _texts(spec.name, answer.data)
        else:
            values = np.frombuffer(answer.data, spec.numpy_dtype)
            is_strict_json &= values.dtype.kind != "f" or bool(np.isfinite(values).all())
            document["data"] = values
        outputs.append(document)
    envelope: dict[str, Any] = {"id": request.id} if request.id is not None else {}
    envelope |= {"model_name": served.key.model, "model_version": str(served.key.version), "outputs": outputs}
    header = _dump(envelope, is_strict_json)
    if not binary:
        return Reply(200, (header,))
    length = (HEADER_LENGTH, b"%d" % len(header))
    return Reply(200, (header, *binary), "application/octet-stream", (length,))


def _texts(name: str, data: memoryview) -> list[str]:
    try:
        return [element.decode() for element in unpack(data)]
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"output '{name}' holds bytes that are not UTF-8, which JSON cannot carry; ask for it as binary data"
        ) from error


def _dump(document: dict[str, Any], is_strict_json: bool) -> bytes:
    if is_strict_json:
        return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    # NaN and Infinity are the protocol's own extension of JSON; orjson would write null.
    return json.dumps(document, default=lambda values: values.tolist(), separators=(",", ":")).encode()


HEADER_LENGTH = b"inference-header-content-length"


class InferRoute(HotRoute):
    """The Open Inference Protocol with the binary tensor extension."""

    protocol = "v2"
    paths = ("/v2/models/{model}/infer", "/v2/models/{model}/versions/{version}/infer")

    async def answer(self, call: Call, head: HttpHead, served: Served, body: Slot) -> Reply:
        started_ns = time.monotonic_ns()
        meaning, wait_ns = await self._parse(call, body, _header_length(head), served)
        request = request_for(meaning, served, call)
        call.decoded(time.monotonic_ns() - started_ns - wait_ns, wait_ns)
        done = await call.run(request)
        if is_heavy_answer(meaning, done):
            reply = await self.decoder.run_owed(render_infer, meaning, served, done)
        else:
            reply = render_infer(meaning, served, done)
        total_ns = time.monotonic_ns() - call.arrival_ns
        timing = Timing.of(done, call.decode_wait_ns, call.decode_ns, total_ns)
        reply.headers = (timing.header(), *reply.headers)
        return reply

    async def _parse(self, call: Call, body: Slot, header_length: int | None, served: Served) -> Decoded[InferRequest]:
        memory, slots = self.core.shared_memory, (body,)
        text = body.view[:header_length]
        weighed_ns = needs_bytes = 0
        if text.nbytes > INLINE_JSON_BYTES:
            work = DecodeWork("weigh", text.nbytes, slots)
            weight, weighed_ns = await self.decoder.run(call, work, weigh, text)
            check_weight(weight, served)
            needs_bytes = self._room_for(call, weight, served)
        elif not is_heavy(body.view.nbytes, served):
            return Decoded(parse_infer(body, header_length, served, memory), 0)
        work = DecodeWork("tensors", body.view.nbytes, slots, needs_bytes=needs_bytes)
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


def _header_length(head: HttpHead) -> int | None:
    raw = head.headers.get(HEADER_LENGTH)
    if raw is None:
        return None
    if not raw.isdigit() or len(raw) > 12:
        raise InvalidRequest(
            f"Inference-Header-Content-Length must be a whole number, got {raw[:40].decode('latin-1')!r}"
        )
    return int(raw)
