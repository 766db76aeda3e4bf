"""Large gRPC messages, many at once, against the memory that they may cost."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2

from tests.support.servers import Server, start_server
from tests.support.stores import StoreFolder

MIB = 1 << 20
# What a process may use for its work beside the memory that its requests are admitted to.
LEEWAY_BYTES = 128 * MIB


def peak_bytes(server: Server) -> int:
    """The most memory that the server's process has ever held."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) << 10  # type: ignore[index]


@pytest.mark.slow
def test_large_grpc_messages_stay_within_the_memory_for_requests(store: StoreFolder) -> None:
    """24 of 12 MiB, where all requests together may hold 64 MiB; the engine takes single ones."""
    store.add_identity("FP32")
    allowed = 64 * MIB
    data = bytes(12 * MIB)
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="x", shape=[1, len(data) // 4], datatype="FP32")
    request = service_pb2.ModelInferRequest(
        model_name="identity_fp32", inputs=[tensor], raw_input_contents=[data]
    ).SerializeToString()
    limits = ("--max-body-mb", "16", "--max-inflight-mb", "64", "--max-batch", "1")
    with start_server(*limits, store=store.root) as server, ExitStack() as stack:
        options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        channels = [stack.enter_context(grpc.insecure_channel(server.grpc_address, options)) for _ in range(24)]
        asks = [channel.unary_unary("/inference.GRPCInferenceService/ModelInfer") for channel in channels]
        for channel in channels:
            grpc.channel_ready_future(channel).result(30)
        before = peak_bytes(server)
        calls = [ask.future(request, timeout=60) for ask in asks]
        codes = {call.code() for call in calls}
        assert grpc.StatusCode.OK in codes
        assert codes <= {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
        grown = peak_bytes(server) - before
        assert grown <= allowed + LEEWAY_BYTES, f"{grown / MIB:.0f} MiB more"
