"""ModelInfer and ModelStreamInfer over gRPC, on tensors and on images; the counterparts of the HTTP routes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import grpc
from tritonclient.grpc import service_pb2

from convoy.app.calls.access import KEY_IS_WRONG, ServeOptions
from convoy.app.calls.call import Call
from convoy.app.calls.refusals import EXPIRED_RUNNING
from convoy.app.core import Core
from convoy.app.grpc.gate import GrpcCall, Read, ReadOn, parse
from convoy.app.grpc.tensors import (
    asked_of,
    infer_response,
    parameters_of,
    response_of,
    split,
    stream_response,
)
from convoy.app.lifecycle.catalog import Served
from convoy.app.pictures.decoder import Decoder, DecodeWork
from convoy.app.pictures.documents import PictureRequest, brings_picture, picture_output, picture_request
from convoy.app.pictures.predictor import Predictor
from convoy.app.protocol.inference import (
    INLINE_BYTES,
    InferRequest,
    is_heavy,
    is_heavy_answer,
    request_for,
    understand,
)
from convoy.app.scheduling.request import Request
from convoy.app.telemetry.outcomes import ANSWERED, CallEnd, ending_of
from convoy.app.telemetry.tracing import RequestSpan
from convoy.models.errors import DeadlineExceeded, RequestError, Unauthorized

_SERVICE = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
_log = logging.getLogger("convoy")
_Pending = asyncio.Queue["tuple[Call, asyncio.Task[bytes]] | None"]


@dataclass(slots=True)
class _Asked:
    """What is left of a message after its tensors are in the slab."""

    own: Call
    in_stream: bool = False
    id: str = ""
    model: str = ""
    version: str = ""
    wants_final: bool = False


class GrpcInference:
    """Runs inference on tensors or on images."""

    def __init__(self, core: Core, options: ServeOptions, decoder: Decoder) -> None:
        self._core, self._options, self._decoder = core, options, decoder
        self._predictor = Predictor(decoder, options.max_pixels)

    async def infer(self, read: Read, call: GrpcCall) -> bytes:
        """Answer an encoded ModelInferRequest with an encoded ModelInferResponse. Raises RequestError."""
        own = call.inference = self._call(call.span)
        try:
            own.begin()  # before the message arrives, as over HTTP
            asked = _Asked(own)
            answer = await self._decode(await read(), asked, call)
            call.turn.end()
            reply = await answer()
        except BaseException as raised:
            own.fail(raised, lambda error: _ending(own, error, call))
        task = asyncio.current_task() if _is_held(own, reply) else None
        if task is not None:  # the library's task, which also sends the answer
            task.add_done_callback(lambda _: own.end(ANSWERED))
        return reply

    def _call(self, span: RequestSpan | None) -> Call:
        own = Call(self._core, "grpc")
        own.span = span
        return own

    def turned_away(self, call: GrpcCall, error: RequestError) -> None:
        """Count a call of any method whose message was not read or could not be parsed."""
        if call.method in ("ModelInfer", "ModelStreamInfer"):
            own = self._call(call.span)
            own.end(_ending(own, error, call))
        elif error.reason:
            self._core.turned_away(error.reason)

    def begin_span(self, call: GrpcCall) -> RequestSpan | None:
        """Begin the span of one request, if it is sampled. An error in tracing never fails the request."""
        try:
            tracing = self._core.tracing
            if tracing is None:
                return None
            names = ("traceparent", "tracestate")
            parent = {name: call.metadata[name].decode("latin-1") for name in names if name in call.metadata}
            attributes = {"rpc.system": "grpc", "rpc.service": _SERVICE, "rpc.method": call.method}
            span = tracing.begin("grpc", f"{_SERVICE}/{call.method}", attributes, parent, time.monotonic_ns())
        except Exception:
            _log.exception("cannot create a span for a request")
            return None
        if span is not None:
            span.status = 0  # OK unless there is an error
        return span

    async def stream(self, read: ReadOn, call: GrpcCall) -> AsyncGenerator[bytes]:
        """Answer each request of a stream, in their order; several run at once.

        Raises Unauthorized if `read` does, after the requests that were read before are answered.
        """
        pending: _Pending = asyncio.Queue()
        room = asyncio.Semaphore(64)  # stop reading, which applies backpressure to the client
        reader = asyncio.ensure_future(self._read(read, call, pending, room))
        try:
            while (running := await pending.get()) is not None:
                own, replying = running
                try:
                    yield await replying
                finally:
                    _give_up(own, replying, call)  # does nothing if it has failed
                room.release()
            await asyncio.wait([reader])
            if isinstance(reader.exception(), Unauthorized):
                # raise a new error: the reader's would keep this frame alive in a cycle
                raise Unauthorized(KEY_IS_WRONG)
        finally:
            reader.cancel()
            while not pending.empty():
                left = pending.get_nowait()
                if left is not None:
                    _give_up(*left, call)
            await asyncio.wait([reader])  # it reads from the call, which must not end first

    async def _read(self, read: ReadOn, call: GrpcCall, pending: _Pending, room: asyncio.Semaphore) -> None:
        try:
            while await room.acquire() and (data := await read()) is not None:
                own = self._call(self.begin_span(call))
                nbytes, taken = len(data), asyncio.Event()
                pending.put_nowait((own, asyncio.ensure_future(self._one_of_stream(data, own, call, taken))))
                del data  # release it now, not when the next message comes
                if nbytes > INLINE_BYTES:
                    # Leave the next message with the client while this one may wait for a decoder.
                    await taken.wait()
                    call.turn.passed(nbytes)
        finally:
            pending.put_nowait(None)

    async def _one_of_stream(self, data: bytes, own: Call, call: GrpcCall, taken: asyncio.Event) -> bytes:
        """Answer one request of a stream. The stream continues after an error, which is sent as a message.

        `taken` is set when the message's tensors are in the slab, or when it has failed.
        """
        asked = _Asked(own, in_stream=True)
        try:
            own.begin()  # opened per message, so that an idle stream does not delay a shutdown
            answer = await self._decode(data, asked, call)
            del data  # release the message while the request waits
            taken.set()
            reply = await answer()
        except BaseException as raised:
            error = own.cause_of(raised)
            try:
                own.end(_ending(own, error, call))
                if not isinstance(error, RequestError):
                    raise
                return _failed_in_stream(asked, str(error))
            finally:
                del error  # avoid a reference cycle with this frame
        finally:
            taken.set()
        _is_held(own, reply)
        return stream_response(reply)

    async def _run(self, meaning: InferRequest, served: Served, request: Request, asked: _Asked) -> bytes:
        done = await asked.own.run(request)
        if is_heavy_answer(meaning, done):
            return await self._decoder.run_owed(infer_response, meaning, served, done, is_final=asked.wants_final)
        return infer_response(meaning, served, done, is_final=asked.wants_final)

    async def _look(self, meaning: PictureRequest, served: Served, asked: _Asked) -> bytes:
        own_id, picture, wanted, terms = meaning
        is_alone = not asked.in_stream
        predicted = await self._predictor.predict(asked.own, served, picture, terms, wanted, is_alone=is_alone)
        return response_of(own_id, served, [picture_output(served, wanted, predicted)], is_final=asked.wants_final)

    async def _decode(self, data: bytes, asked: _Asked, call: GrpcCall) -> Callable[[], Awaitable[bytes]]:
        """Copy the message's tensors into the slab. Returns the function that makes the answer and keeps nothing of
        `data`.
        """
        own, nbytes = asked.own, len(data)
        started_ns = time.monotonic_ns()
        small, raw = split(data) if nbytes > INLINE_BYTES else (data, None)
        message = parse(service_pb2.ModelInferRequest, small)
        if not raw:
            raw = message.raw_input_contents
        asked.id, asked.model, asked.version = message.id, message.model_name, message.model_version
        has_flag = parameters_of(message.parameters).get("triton_enable_empty_final_response") is True
        asked.wants_final = asked.in_stream and has_flag
        served = own.find(asked.model, asked.version or None)
        own.limit(call.timeout_ms(own.arrival_ns) or self._options.timeout_ms(served.key.model))
        memory = self._core.shared_memory
        if brings_picture([tensor.datatype for tensor in message.inputs], served):
            return partial(self._look, picture_request(asked_of(message, raw, memory), served, own), served, asked)
        if nbytes <= INLINE_BYTES or (raw and not is_heavy(nbytes, served)):
            meaning, wait_ns = understand(asked_of(message, raw, memory), served), 0
        else:
            work = DecodeWork("tensors", nbytes)
            meaning, wait_ns = await self._decoder.run(
                own, work, lambda: understand(asked_of(message, raw, memory), served)
            )
        request = request_for(meaning, served, own)
        own.decoded(time.monotonic_ns() - started_ns - wait_ns, wait_ns)
        return partial(self._run, meaning._replace(tensors=()), served, request, asked)


def _failed_in_stream(asked: _Asked, message: str) -> bytes:
    named = service_pb2.ModelInferResponse(id=asked.id, model_name=asked.model, model_version=asked.version)
    failed = service_pb2.ModelStreamInferResponse(error_message=message, infer_response=named)
    return bytes(failed.SerializeToString())


def _is_held(own: Call, reply: bytes) -> bool:
    """Whether the answer is large, so that its room is held until it is sent. Otherwise the call has ended."""
    if len(reply) <= INLINE_BYTES:
        own.end(ANSWERED)
        return False
    own.settle()
    own.discard_pages()
    return True


def _ending(own: Call, error: BaseException, call: GrpcCall) -> CallEnd:
    """The outcome and status of a call, or of a request of a stream, that ends with this error."""
    if not isinstance(error, Exception) and call.is_late:  # cancelled by the library or with its stream
        error = DeadlineExceeded(EXPIRED_RUNNING)
    if own.span is not None and isinstance(error, Exception):
        code = error.grpc_code if isinstance(error, RequestError) else "INTERNAL"  # a bug, which the gate logs
        own.span.status = getattr(grpc.StatusCode, code).value[0]
    return ending_of(error)


def _give_up(own: Call, replying: asyncio.Task[bytes], call: GrpcCall) -> None:
    """Stop a stream's request after its answer was sent, or because it will not be."""
    if replying.cancel():
        # A task that has not started cannot end its call itself.
        replying.add_done_callback(lambda _: own.end(_ending(own, asyncio.CancelledError(), call)))
    else:
        own.end(ANSWERED)
