"""Large gRPC messages, many at once, against the memory that they may cost."""

from __future__ import annotations

import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import grpc
import numpy as np
import pytest

from tests.support.grpc_calls import request
from tests.support.servers import peak_bytes, start_server
from tests.support.stores import StoreFolder

MIB = 1 << 20
# What a process may use for its work beside the memory that its requests are admitted to.
LEEWAY_BYTES = 128 * MIB


OWN_CONNECTION = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]


@pytest.mark.slow
def test_large_grpc_messages_stay_within_the_memory_for_requests(store: StoreFolder) -> None:
    """24 of 12 MiB, where all requests together may hold 64 MiB; the engine takes single ones."""
    store.add_identity("FP32")
    allowed = 64 * MIB
    message = request("identity_fp32", np.zeros((1, 3 * MIB), np.float32)).SerializeToString()
    limits = ("--max-body-mb", "16", "--max-inflight-mb", "64", "--max-batch", "1")
    with start_server(*limits, store=store.root) as server, ExitStack() as stack:
        addresses = [server.grpc_address] * 24
        channels = [stack.enter_context(grpc.insecure_channel(one, OWN_CONNECTION)) for one in addresses]
        asks = [channel.unary_unary("/inference.GRPCInferenceService/ModelInfer") for channel in channels]
        for channel in channels:
            grpc.channel_ready_future(channel).result(30)
        before = peak_bytes(server)
        calls = [ask.future(message, timeout=60) for ask in asks]
        codes = {call.code() for call in calls}
        assert grpc.StatusCode.OK in codes
        assert codes <= {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
        grown = peak_bytes(server) - before
        assert grown <= allowed + LEEWAY_BYTES, f"{grown / MIB:.0f} MiB more"


@pytest.mark.slow
def test_streams_of_large_messages_have_one_each_that_waits_for_a_decoder(store: StoreFolder) -> None:
    """Two streams of 64 of 4 MiB, whose strings are checked in a thread: 512 MiB in all."""
    store.add_identity("BYTES")
    count = 50_000
    element = bytes(4 * MIB // count - 4)
    data = (struct.pack("<I", len(element)) + element) * count
    shape = np.empty((1, count))
    message = request("identity_bytes", shape, "BYTES", raw_input_contents=[data]).SerializeToString()
    allowed = 32 * MIB
    limits = ("--max-body-mb", "4", "--max-inflight-mb", "32", "--max-batch", "1")

    def ask(address: str) -> int:
        with grpc.insecure_channel(address, OWN_CONNECTION) as channel:
            stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
            return sum(1 for _ in stream(iter([message] * 64), timeout=120))

    with start_server(*limits, store=store.root) as server:
        address = server.grpc_address
        before = peak_bytes(server)
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(ask, [address] * 2)) == [64] * 2
        grown = peak_bytes(server) - before
        assert grown <= allowed + LEEWAY_BYTES, f"{grown / MIB:.0f} MiB more"
