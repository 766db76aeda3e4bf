"""What one gRPC connection may do to the others': nothing that they notice."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2_grpc

from tests.support.grpc_calls import asking, request
from tests.support.http2 import Connection
from tests.support.servers import Server, start_server, wait_until
from tests.support.stores import StoreFolder

pytestmark = pytest.mark.slow
# Far more than an answer takes on a busy machine, and less than the server's patience with one who sends slowly.
CALL_S = 9.0


@pytest.fixture(scope="module")
def store_root(shared_store: StoreFolder) -> Path:
    shared_store.add_identity("FP32")
    return shared_store.root


@pytest.fixture(scope="module")
def server(store_root: Path) -> Iterator[Server]:
    options = ("--access-log", "off", "--max-inflight-mb", "256", "--max-body-mb", "64", "--max-connections", "512")
    with start_server(*options, store=store_root, rests=True) as server:
        yield server


def asked(values: int = 4) -> Any:
    return request("identity_fp32", np.arange(values, dtype=np.float32)[None])


def codes_of(address: str, calls: int, values: int = 4) -> set[str]:
    """How the calls of one more client end, which come one after the other."""
    codes = set()
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for _ in range(calls):
            try:
                reply = stub.ModelInfer(asked(values), timeout=CALL_S)
                codes.add("OK" if len(reply.raw_output_contents[0]) == 4 * values else "another answer")
            except grpc.RpcError as error:
                codes.add(error.code().name)
    return codes


@pytest.mark.parametrize(
    ("connections", "sent"), [(1, "nothing"), (2, "nothing"), (2, "the length"), (1, "a part"), (2, "drops")]
)
def test_a_client_that_ends_none_of_its_messages_holds_up_nobody(server: Server, connections: int, sent: str) -> None:
    message, is_over = asked(1000).SerializeToString(), threading.Event()
    with ExitStack() as open_until_the_end, ThreadPoolExecutor(5) as pool:
        crowd = [open_until_the_end.enter_context(Connection(server.grpc_address)) for _ in range(connections)]
        streams = [(one, one.begin()) for one in crowd for _ in range(100)]
        if sent != "nothing":
            for one, stream in streams:
                one.send_part(stream, message, 0 if sent == "the length" else 400)
        open_calls = "all of them have begun"
        wait_until(lambda: server.stats()["open_calls"] >= 100 * connections, open_calls)
        if sent == "drops":
            pool.submit(drop, streams, is_over)
        try:
            ends = [pool.submit(codes_of, server.grpc_address, 20, values) for values in (4, 4, 20_000, 200_000)]
            assert [one.result() for one in ends] == [{"OK"}] * 4
        finally:
            is_over.set()


def drop(streams: list[tuple[Connection, int]], is_over: threading.Event) -> None:
    """A byte of each message now and then."""
    while not is_over.wait(0.2):
        for one, stream in streams:
            one.send_more(stream, b"\0")


def test_calls_that_are_reset_without_end_cancel_nobody_elses(server: Server) -> None:
    is_over = threading.Event()
    with ExitStack() as open_until_the_end, ThreadPoolExecutor(6) as pool:
        crowd = [open_until_the_end.enter_context(Connection(server.grpc_address)) for _ in range(2)]
        attacks = [pool.submit(reset_without_end, one, is_over) for one in crowd]
        try:
            ends = [pool.submit(codes_of, server.grpc_address, 6) for _ in range(4)]
            assert [one.result() for one in ends] == [{"OK"}] * 4
        finally:
            is_over.set()
        assert all(one.result() for one in attacks)


def reset_without_end(connection: Connection, is_over: threading.Event) -> int:
    """Four thousand calls a second, as far as the machine gives; how often so many were begun at once."""
    times = 0
    while not is_over.wait(0.01):
        connection.begin_and_reset(40)
        times += 1
    return times


def test_a_stream_ends_when_its_key_is_taken_away(store_root: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("first\n")
    with start_server("--api-key-file", str(key), store=store_root) as server:
        messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with asking(server) as stub:
            given = [("authorization", "Bearer first")]
            answers = stub.ModelStreamInfer(iter(messages.get, None), metadata=given, timeout=60)
            messages.put(asked())
            assert not next(answers).error_message
            key.write_text("second\n")
            server.signal(signal.SIGHUP)
            other = {"authorization": "Bearer second"}
            wait_until(lambda: server.get("/v2", headers=other).status_code == 200, "the other key opens")
            messages.put(asked())
            with pytest.raises(grpc.RpcError) as ended:
                next(answers)
            assert ended.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert "key" in ended.value.details()
            messages.put(None)
            again = stub.ModelStreamInfer(iter([asked()]), metadata=[("authorization", "Bearer second")], timeout=60)
            assert [one.error_message for one in again] == [""]
