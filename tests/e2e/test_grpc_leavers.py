"""gRPC clients that ask for much, read nothing of it, and leave: the server must outlive every one of them."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2_grpc

from tests.support.grpc_calls import request
from tests.support.servers import Server, start_server, wait_until
from tests.support.stores import StoreFolder

SMALL, LARGE = 4, 1 << 20  # values of a request; four bytes each
AT_ONCE = 8


@pytest.fixture(scope="module")
def server(shared_store: StoreFolder) -> Iterator[Server]:
    shared_store.add_identity("FP32")
    with start_server("--access-log", "off", store=shared_store.root) as server:
        yield server


def asked(values: int) -> Any:
    return request("identity_fp32", np.arange(values, dtype=np.float32)[None])


class Leaver:
    """One client's connection, and ways to leave it."""

    def __init__(self, address: str, seed: int) -> None:
        self._address = address
        self._chance = random.Random(seed)
        # Each client a connection of its own; the library would share one.
        self._channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._small, self._large = asked(SMALL), asked(LARGE)

    def leave(self, times: int) -> None:
        ways = (self._one_request, self._many_requests, self._large_answers, self._watch, self._slam_the_door)
        for way in self._chance.choices(ways, weights=(50, 40, 3, 5, 2), k=times):
            way()
        self._channel.close()

    def _one_request(self) -> None:
        self._gone_after(self._stub.ModelInfer.future(self._small))

    def _many_requests(self) -> None:
        count = self._chance.choice((2, 20, 20, 200, 200, 2000))
        self._gone_after(self._stub.ModelStreamInfer(iter([self._small] * count)), most_s=0.02)

    def _large_answers(self) -> None:
        self._gone_after(self._stub.ModelStreamInfer(iter([self._large] * 8)), most_s=0.2)

    def _watch(self) -> None:
        self._gone_after(self._health.Watch(health_pb2.HealthCheckRequest()))

    def _slam_the_door(self) -> None:
        """The whole connection ends, in the middle of a call."""
        with grpc.insecure_channel(self._address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            left = stub.ModelStreamInfer(iter([self._small] * 200))
            self._wait(0.02)
            del left

    def _gone_after(self, call: Any, most_s: float = 0.005) -> None:
        self._wait(most_s)
        call.cancel()

    def _wait(self, most_s: float) -> None:
        # So long the client stays; that it may be no time at all is the point.
        threading.Event().wait(self._chance.random() * most_s)


def leave(server: Server, times: int) -> None:
    """All of them, and then whoever comes next is answered and nothing is left of those before."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for done in [pool.submit(Leaver(server.grpc_address, seed).leave, times // AT_ONCE) for seed in range(AT_ONCE)]:
            done.result()
    assert server.process.poll() is None, f"the server ended with {server.process.returncode}"
    wait_until(server.is_at_rest, "nothing waits, runs or holds memory")
    with grpc.insecure_channel(server.grpc_address) as channel:
        reply = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(asked(SMALL), timeout=60)
    assert np.frombuffer(reply.raw_output_contents[0], np.float32).tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.slow
def test_the_server_outlives_clients_that_leave(server: Server) -> None:
    leave(server, 160)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_server_outlives_ten_thousand_of_them(server: Server) -> None:
    leave(server, 10_000)
