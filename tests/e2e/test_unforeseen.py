"""What nobody foresaw: on every route and method it is an error in words, with the id under which the log has it."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from tritonclient.grpc import service_pb2

from tests.support.grpc_calls import asking
from tests.support.servers import FakeServer, start_fake_server, wait_until
from tests.support.wire import Wire

pytestmark = pytest.mark.slow
# Mounted, and not in the document.
UNDOCUMENTED = [
    *(("GET", path) for path in ("/docs", "/docs/start.js", "/openapi.json", "/v2/")),
    *((verb, path) for verb in ("GET", "POST") for path in ("/v2/logging", "/v2/trace/setting")),
    *(("GET", f"/v2/cudasharedmemory/{path}") for path in ("status", "region/r/status")),
    *(("POST", f"/v2/cudasharedmemory/{path}") for path in ("unregister", "region/r/register", "region/r/unregister")),
    *(("POST", f"/v2/repository/r/{path}") for path in ("index", "models/rows/load", "models/rows/unload")),
]


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    settings = {"model_control": "explicit", "load_model": "*", "host": "127.0.0.1", "allow_shared_memory": True}
    with start_fake_server(fake={"bugs": True}, clean_log=False, max_inflight_mb=512, **settings) as one:
        yield one


@contextmanager
def bug(server: FakeServer) -> Iterator[None]:
    """No handler works meanwhile."""
    server.switch_on("bug")
    yield
    server.switch_off("bug")


def routes(server: FakeServer) -> list[tuple[str, str]]:
    """Every verb and path that the server has."""
    document = server.get("/openapi.json").json()
    paths = [(verb.upper(), path) for path, verbs in document["paths"].items() for verb in verbs]
    names = {"model": "rows", "version": "1", "repository": "r", "region": "r", "name": "r"}
    return [(verb, re.sub(r"\{(\w+)\}", lambda found: names.get(found[1], "x"), path)) for verb, path in paths]


def lines_of(server: FakeServer, *words: str) -> list[str]:
    """The log's lines so far with all of these in them."""
    return [line for line in server.log_so_far.splitlines() if all(word in line for word in words)]


def test_a_bug_in_any_route_is_json_with_the_requests_id_and_a_trace_in_the_log(server: FakeServer) -> None:
    known = routes(server) + UNDOCUMENTED
    assert len(known) > 45
    with bug(server), Wire(server.port) as wire:
        for verb, path in known:
            own = uuid.uuid4().hex
            reply = wire.ask(path, b"{}", {"X-Request-Id": own, "Content-Type": "application/json"}, method=verb)
            given = {"x-request-id": own, "content-type": "application/json"}
            assert reply.headers.items() >= given.items(), (verb, path)
            assert reply.error == f"internal error; the log has it under request {own}", (verb, path)
            (told,) = wait_until(lambda own=own: lines_of(server, "this is a bug", own), "it is in the log")
            assert f"{verb} {path}" in told
    wait_until(lambda: "the switch says that there is a bug" in server.log_so_far, "the trace is in the log")
    assert "Traceback" in server.log
    assert server.infer(1.0).status_code == 200


def test_a_bug_in_any_method_is_internal_with_the_calls_id(server: FakeServer) -> None:
    messages = {
        "ServerReady": service_pb2.ServerReadyRequest(),
        "ModelReady": service_pb2.ModelReadyRequest(name="rows"),
        "ServerMetadata": service_pb2.ServerMetadataRequest(),
        "ModelMetadata": service_pb2.ModelMetadataRequest(name="rows"),
        "ModelInfer": service_pb2.ModelInferRequest(model_name="rows"),
        "ModelConfig": service_pb2.ModelConfigRequest(name="rows"),
        "ModelStatistics": service_pb2.ModelStatisticsRequest(name="rows"),
        "RepositoryIndex": service_pb2.RepositoryIndexRequest(),
        "RepositoryModelLoad": service_pb2.RepositoryModelLoadRequest(model_name="rows"),
        "RepositoryModelUnload": service_pb2.RepositoryModelUnloadRequest(model_name="rows"),
        "SystemSharedMemoryStatus": service_pb2.SystemSharedMemoryStatusRequest(),
        "SystemSharedMemoryRegister": service_pb2.SystemSharedMemoryRegisterRequest(name="r", key="r", byte_size=1),
        "SystemSharedMemoryUnregister": service_pb2.SystemSharedMemoryUnregisterRequest(name="r"),
    }
    with bug(server), asking(server) as stub:
        assert stub.ServerLive(service_pb2.ServerLiveRequest()).live, "nothing is asked that could fail"
        for method, message in messages.items():
            own = uuid.uuid4().hex
            with pytest.raises(grpc.RpcError) as failed:
                getattr(stub, method)(message, metadata=(("x-request-id", own),))
            error = failed.value
            assert error.code() is grpc.StatusCode.INTERNAL, method
            assert error.details() == f"internal error; the log has it under request {own}"
            assert dict(error.trailing_metadata())["x-request-id"] == own
            told = f"{method} failed; this is a bug"
            wait_until(lambda told=told: lines_of(server, told), "it is in the log")
