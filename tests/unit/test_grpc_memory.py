"""What gRPC calls leave in memory: nothing that waits for the garbage collector; and how many messages come into it."""

from __future__ import annotations

import asyncio
import gc
import re
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2, service_pb2_grpc

from convoy.app.calls.access import BodyLimits
from convoy.app.calls.call import Call
from convoy.app.core import Core
from convoy.app.grpc import room as room_module
from convoy.app.grpc.gate import GrpcCall
from convoy.app.grpc.infer import GrpcInference
from convoy.app.grpc.room import MessageRoom, Turn
from convoy.app.grpc.server import GrpcServer
from convoy.app.grpc.tensors import split
from convoy.app.pictures.decoder import Decoder
from convoy.app.scheduling.slab import Slab
from convoy.models.errors import RequestError, RequestTimeout
from tests.support.fake_devices import ROW, Workshop, in_workshop, until
from tests.support.grpc_calls import request
from tests.unit.test_connection import OPTIONS, workshop  # noqa: F401

KIB = 1 << 10


def asked(model: str = "rows", size: int = ROW) -> Any:
    return request(model, np.zeros((1, size), np.float32))


async def code_of(call: Any) -> str:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"


async def take_out_all(core: Core) -> None:
    for served in core.catalog.served():
        leaving = core.lifecycle.take_out_of_service(served.key.model, served.key.version)
        assert leaving is not None
        await leaving


def test_a_call_that_has_ended_leaves_nothing_for_the_garbage_collector(workshop: Workshop) -> None:  # noqa: F811
    """Answered, refused in each way, cancelled, and in streams; small ones, and ones that are split."""

    async def in_a_stream(stub: Any) -> None:
        async def requests() -> AsyncIterator[Any]:
            for one in (asked(), asked("nobody"), asked(size=20 * KIB)):
                yield one

        replies = [reply.error_message async for reply in stub.ModelStreamInfer(requests())]
        assert [bool(words) for words in replies] == [False, True, True]

    async def all_ways(channel: Any) -> None:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        raw = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        none = channel.stream_unary("/inference.GRPCInferenceService/ModelInfer")
        assert await code_of(stub.ModelInfer(asked())) == "OK"
        assert await code_of(stub.ModelInfer(asked("nobody"))) == "NOT_FOUND"
        assert await code_of(stub.ModelInfer(asked(size=20 * KIB))) == "INVALID_ARGUMENT"
        assert await code_of(stub.ModelMetadata(service_pb2.ModelMetadataRequest(name="nobody"))) == "NOT_FOUND"
        assert await code_of(raw(b"\xff" * 100 * KIB)) == "INVALID_ARGUMENT"
        assert await code_of(none(iter(()))) == "INVALID_ARGUMENT"
        left = stub.ModelInfer(asked())
        left.cancel()
        assert await asyncio.wait({asyncio.ensure_future(left.code())})
        await in_a_stream(stub)

    async def scenario() -> None:
        core = workshop.core
        core.listeners_opening += 1
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        decoder = Decoder(1, 8)
        server = GrpcServer(core, OPTIONS, decoder, max_calls=8)
        await server.start("127.0.0.1", port)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await all_ways(channel)
            await until(lambda: core.slab.slots_in_use == core.open_calls == 0)
            gc.collect()
            gc.disable()
            gc.set_debug(gc.DEBUG_SAVEALL)
            try:
                await all_ways(channel)
                await until(lambda: core.slab.slots_in_use == core.open_calls == 0)
                gc.collect()
                ours = GrpcCall, Call, Turn, RequestError
                held = [one for one in gc.garbage if isinstance(one, ours)]
                frames = [
                    one
                    for one in gc.garbage
                    if re.search("convoy/app/(grpc|calls|protocol|pictures)/", str(getattr(one, "f_code", "")))
                ]
            finally:
                gc.set_debug(0)
                gc.garbage.clear()
                gc.enable()
            assert (held, frames) == ([], [])
        await server.stop(0)
        decoder.close()
        await take_out_all(core)

    in_workshop(workshop, scenario)


def test_a_request_of_a_stream_that_is_left_before_it_is_looked_at_is_counted(workshop: Workshop) -> None:  # noqa: F811
    async def scenario() -> None:
        core, decoder = workshop.core, Decoder(1, 8)
        inference = GrpcInference(core, OPTIONS, decoder)
        call = GrpcCall("ModelStreamInfer", {}, b"7", "", Turn(MessageRoom(core.slab, OPTIONS.body), "one"))

        messages: list[bytes] = [asked().SerializeToString()]

        async def read() -> bytes | None:
            first.cancel()
            return messages.pop() if messages else None

        first = asyncio.ensure_future(anext(inference.stream(read, call)))
        with pytest.raises(asyncio.CancelledError):
            await first
        counted = {"model": "", "version": "", "protocol": "grpc", "outcome": "cancelled"}
        value = core.metrics.registry.get_sample_value
        async with asyncio.timeout(60):
            await until(lambda: value("convoy_call_duration_seconds_count", counted) == 1)
        assert core.open_calls == 0
        decoder.close()
        await take_out_all(core)

    in_workshop(workshop, scenario)


class Context:
    """A call whose message comes when it is told to."""

    def __init__(self) -> None:
        self.is_read = False
        self.message = asyncio.get_running_loop().create_future()

    async def read(self) -> bytes:
        self.is_read = True
        data: bytes = await self.message
        return data


async def read(room: MessageRoom, connection: str, context: Context) -> bytes:
    """A whole call of that connection."""
    turn = Turn(room, connection)
    try:
        return await turn.read(context)
    finally:
        turn.end()


@pytest.mark.parametrize(("used", "at_once"), [(0, 4), (100, 3), (64 * KIB - 64, 2)])
def test_so_many_messages_are_read_at_once_as_fit_what_the_slab_has_left(used: int, at_once: int) -> None:
    async def scene() -> None:
        slab = Slab(64 * KIB)
        room = MessageRoom(slab, BodyLimits(16 * KIB))
        slot = slab.reserve(used) if used else None
        turns, contexts = [Turn(room, str(number)) for number in range(9)], [Context() for _ in range(9)]
        reads = [asyncio.ensure_future(turn.read(one)) for turn, one in zip(turns, contexts, strict=True)]

        def being_read() -> int:
            return sum(one.is_read for one in contexts)

        await until(lambda: being_read() == at_once)
        reads[5].cancel()  # it waits, or is being read
        await asyncio.wait([reads[5]])
        turns[5].end()
        for number in (0, 1, 2, 3, 4, 6, 7, 8):
            contexts[number].message.set_result(b"x")
            assert await reads[number] == b"x"
            turns[number].end()
            turns[number].end()
        assert being_read() == 8
        if slot is not None:
            slab.free(slot.ref)
        assert not room._held

    asyncio.run(scene())


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_who_comes_as_anothers_time_ends_waits_for_its_place(is_cancelled: bool) -> None:
    """In the moment between, the other has had its time and is still there; who cancels it then is heard, too."""

    async def scene() -> None:
        room = MessageRoom(Slab(16 * KIB), BodyLimits(16 * KIB))
        room.patience_s = 0.01
        assert room.take_at_once("others")
        turn = Turn(room, "slow")
        slow = asyncio.ensure_future(turn.read(Context()))
        await asyncio.sleep(0)
        while not slow.cancelling():  # noqa: ASYNC110 - the very turn counts
            await asyncio.sleep(0)
        assert not slow.done()
        late = asyncio.ensure_future(room.take("one more"))
        if is_cancelled:
            slow.cancel()
        await asyncio.wait([slow])
        if is_cancelled:
            assert slow.cancelled()
        else:
            assert isinstance(slow.exception(), RequestTimeout)
            assert not slow.cancelling()
        turn.end()
        await asyncio.wait_for(late, 60)

    asyncio.run(scene())


def test_each_who_sends_slowly_has_its_own_time_and_leaves_nothing() -> None:
    """One begins while another's time runs, one when it has ended, one was cancelled before and went on."""

    async def scene() -> None:
        room = MessageRoom(Slab(16 * KIB), BodyLimits(16 * KIB))
        room.patience_s = 0.05

        async def reads_in_vain() -> None:
            with pytest.raises(RequestTimeout, match="send it faster"):
                await read(room, "slow", Context())

        async def was_cancelled_before() -> None:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            await reads_in_vain()

        async with asyncio.timeout(60):
            stubborn = asyncio.ensure_future(was_cancelled_before())
            first = asyncio.ensure_future(reads_in_vain())
            await asyncio.sleep(0.02)
            stubborn.cancel()
            await asyncio.gather(stubborn, first)
            await reads_in_vain()
        assert not room._reading
        assert not room._held

    asyncio.run(scene())


@pytest.mark.parametrize("somebody_waits", [True, False])
def test_who_sends_slowly_makes_room_for_those_who_wait(somebody_waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_module, "HURRIED_S", 0.02 if somebody_waits else 0.0)

    async def scene() -> None:
        room = MessageRoom(Slab(16 * KIB), BodyLimits(16 * KIB))
        contexts = [Context() for _ in range(3 if somebody_waits else 2)]

        reads = [asyncio.ensure_future(read(room, str(number), one)) for number, one in enumerate(contexts)]
        for one in contexts[2:]:
            one.message.set_result(b"mine")
        if somebody_waits:
            assert await reads[2] == b"mine"
            for slow in reads[:2]:
                with pytest.raises(RequestTimeout, match="send it faster"):
                    await slow
            return
        await until(lambda: all(one.is_read for one in contexts))
        for one in contexts:
            one.message.set_result(b"late")
        assert await asyncio.gather(*reads) == [b"late", b"late"]

    asyncio.run(scene())


def test_one_connection_leaves_room_for_the_others_however_many_messages_it_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room_module, "CROWDING_S", 0.0)

    async def scene() -> None:
        slab = Slab(128 * KIB)
        room = MessageRoom(slab, BodyLimits(16 * KIB))
        slow = [Context() for _ in range(100)]

        reads = [asyncio.ensure_future(read(room, "slow", one)) for one in slow]
        await until(lambda: sum(one.is_read for one in slow) == 6)  # of eight

        async def reads_at_once(connection: str) -> None:
            context = Context()
            context.message.set_result(b"here")
            assert await read(room, connection, context) == b"here"

        for number in range(20):
            await reads_at_once(str(number))
        assert [one.done() for one in reads] == [False] * 100, "nobody had to go"
        # What has come counts with its own length, so that there is room for more.
        small = [Turn(room, f"small-{number}") for number in range(30)]
        for turn in small:
            context = Context()
            context.message.set_result(b"few bytes")
            assert await turn.read(context) == b"few bytes"
        for turn in small:
            turn.end()
        # The slab has less left than is being read: of those who have most, one goes for each who has nothing.
        rest = slab.reserve(112 * KIB)
        await reads_at_once("late")
        gone = [one for one in reads if one.done()]
        assert len(gone) == 5, "the last one has the time of those who are alone"
        assert all(isinstance(one.exception(), RequestTimeout) for one in gone)
        slab.free(rest.ref)
        for one in reads:
            one.cancel()
        await asyncio.wait(reads)
        assert (room._taken_bytes, room._held, room._waiting) == (0, {}, {})

    asyncio.run(scene())


@given(st.lists(st.binary(max_size=300), max_size=3), st.text(max_size=9), st.binary(max_size=40))
def test_a_message_that_is_split_is_the_same_message(raw: list[bytes], name: str, noise: bytes) -> None:
    whole = service_pb2.ModelInferRequest(model_name=name, id="7", raw_input_contents=raw)
    whole.inputs.add(name="x", shape=[1 << 40, 3])
    rest, found = split(whole.SerializeToString())
    assert [bytes(one) for one in found] == raw
    del whole.raw_input_contents[:]
    assert service_pb2.ModelInferRequest.FromString(rest) == whole
    split(noise)  # raises nothing, whatever it is


def test_a_message_of_very_many_fields_is_left_to_the_library() -> None:
    data = service_pb2.ModelInferRequest(model_name="m").SerializeToString() + b"\x7a\x00" * 100_000
    assert split(data) == (data, [])
