"""ModelInfer and ModelStreamInfer: the gRPC twins of the HTTP infer route."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from tritonclient.grpc import service_pb2

from convoy.app.edge.decode_pool import DecodePool
from convoy.app.edge.entry import outcome_of
from convoy.app.edge.grpc.gate import GrpcCall, parse
from convoy.app.edge.grpc.tensors import asked_of, infer_response, parameters_of
from convoy.app.edge.oip.answers import is_heavy_answer
from convoy.app.edge.oip.exchange import Exchange
from convoy.app.edge.oip.inference import INLINE_BYTES, InferRequest, is_heavy, place_tensors, run_inference, understand
from convoy.app.edge.oip.lookup import find_served
from convoy.app.edge.options import EdgeOptions
from convoy.app.submission.inference import InferenceCore, ServedLike
from convoy.models.errors import RequestError

_PROTOCOL = "grpc"
# So many requests of one stream may be in flight; more are left unread, which holds the client up.
_STREAM_WINDOW = 64
_WANTS_FINAL_FLAG = "triton_enable_empty_final_response"
_Pending = asyncio.Queue["asyncio.Task[Any] | None"]


class GrpcInference:
    """Tensors in, tensors out."""

    def __init__(self, core: InferenceCore, options: EdgeOptions, pool: DecodePool) -> None:
        self._core, self._options, self._pool = core, options, pool

    async def infer(self, message: Any, call: GrpcCall) -> Any:
        """The ModelInferResponse to a ModelInferRequest. Raises RequestError."""
        exchange = Exchange(self._core)
        served: ServedLike | None = None
        outcome = "cancelled"
        try:
            exchange.begin()
            served = find_served(self._core.catalog, message.model_name, message.model_version or None)
            exchange.hold(served)
            response = await self._answer(message, served, exchange, call)
            outcome = "success"
            return response
        except RequestError as error:
            outcome = outcome_of(error.http_status)
            raise
        finally:
            exchange.close()
            took_ns = time.monotonic_ns() - exchange.arrival_ns
            self._core.call_ended(None if served is None else served.key, _PROTOCOL, outcome, took_ns)

    async def stream(self, messages: AsyncIterator[bytes], call: GrpcCall) -> AsyncGenerator[Any]:
        """One response per request, in the order of the requests; several of them run at once."""
        pending: _Pending = asyncio.Queue()
        room = asyncio.Semaphore(_STREAM_WINDOW)
        reader = asyncio.ensure_future(self._read(messages, call, pending, room))
        try:
            while (running := await pending.get()) is not None:
                try:
                    yield await running
                finally:
                    running.cancel()  # does nothing to one that has ended
                room.release()
        finally:
            reader.cancel()
            while not pending.empty():
                left = pending.get_nowait()
                if left is not None:
                    left.cancel()
            await asyncio.wait([reader])  # it reads from the call, which must not end before

    async def _read(
        self, messages: AsyncIterator[bytes], call: GrpcCall, pending: _Pending, room: asyncio.Semaphore
    ) -> None:
        try:
            async for data in messages:
                await room.acquire()
                pending.put_nowait(asyncio.ensure_future(self._one_of_stream(data, call)))
        finally:
            pending.put_nowait(None)

    async def _one_of_stream(self, data: bytes, call: GrpcCall) -> Any:
        """A stream outlives a request that fails: its error is a message like any other."""
        message = service_pb2.ModelInferRequest()
        try:
            message = parse(service_pb2.ModelInferRequest, data)
            response = await self.infer(message, call)
        except RequestError as error:
            named = service_pb2.ModelInferResponse(
                id=message.id, model_name=message.model_name, model_version=message.model_version
            )
            return service_pb2.ModelStreamInferResponse(error_message=str(error), infer_response=named)
        if parameters_of(message.parameters).get(_WANTS_FINAL_FLAG) is True:
            response.parameters["triton_final_response"].bool_param = True
        return service_pb2.ModelStreamInferResponse(infer_response=response)

    async def _answer(self, message: Any, served: ServedLike, exchange: Exchange, call: GrpcCall) -> Any:
        started_ns = time.monotonic_ns()
        timeout_ms = call.timeout_ms() or self._options.default_timeout_ms or None
        request = await self._decode(message, served)
        inputs = place_tensors(request, exchange)
        self._core.stage_took(served.key, "decode", time.monotonic_ns() - started_ns)
        done = await run_inference(request, inputs, served, exchange, timeout_ms)
        encode_ns = time.monotonic_ns()
        if is_heavy_answer(request, done):
            response = await self._pool.run_anyway(infer_response, request, served, done)
        else:
            response = infer_response(request, served, done)
        self._core.stage_took(served.key, "encode", time.monotonic_ns() - encode_ns)
        return response

    async def _decode(self, message: Any, served: ServedLike) -> InferRequest:
        nbytes = message.ByteSize()
        if nbytes <= INLINE_BYTES or (message.raw_input_contents and not is_heavy(nbytes, served)):
            return understand(asked_of(message, self._core.shared_memory), served)
        return await self._pool.run(lambda: understand(asked_of(message, self._core.shared_memory), served))
