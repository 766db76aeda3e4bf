"""System shared memory: what clients may register, what they may not, and what happens when they misbehave."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
from google.protobuf.json_format import MessageToDict
from tritonclient.utils import InferenceServerException

from tests.support.servers import FakeServer, start_fake_server, start_server, wait_until
from tests.support.stores import digit
from tests.support.wire import check_refused
from tests.support.wire_forms import Region, region

FOLDER = Path("/dev/shm")
SYSTEM, CUDA = "/v2/systemsharedmemory", "/v2/cudasharedmemory"
KITS: dict[str, Any] = {"http": triton, "grpc": triton_grpc}


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with start_fake_server(
        fake={"echo": True, "latency_ms": 1}, allow_shared_memory=True, access_log="off", max_inflight_mb=64, rests=True
    ) as server:
        yield server


@pytest.fixture(params=KITS)
def client(request: pytest.FixtureRequest, server: FakeServer) -> Iterator[Any]:
    address = server.grpc_address if request.param == "grpc" else f"127.0.0.1:{server.port}"
    with KITS[request.param].InferenceServerClient(address) as client:
        yield client
        client.unregister_system_shared_memory()


@pytest.fixture
def http_client(server: FakeServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        yield client
        client.unregister_system_shared_memory()


@pytest.fixture
def place() -> Iterator[Region]:
    with closing(Region(np.arange(8, dtype=np.float32).tobytes(), 64)) as own:
        yield own


@pytest.fixture
def known(http_client: triton.InferenceServerClient, place: Region) -> Region:
    """A place that the server knows."""
    http_client.register_system_shared_memory(place.name, place.key, 64)
    return place


def of(place: Region, byte_size: object = 32, **more: object) -> dict[str, Any]:
    return {"shared_memory_region": place.name, "shared_memory_byte_size": byte_size} | more


def names(client: Any) -> set[str]:
    status = client.get_system_shared_memory_status()
    return {row["name"] for row in status} if isinstance(status, list) else set(status.regions)


def test_a_region_is_registered_once_shown_and_forgotten(client: Any, place: Region) -> None:
    client.register_system_shared_memory(place.name, place.key, 32, offset=16)
    status = client.get_system_shared_memory_status(place.name)
    if not isinstance(status, list):
        status = [MessageToDict(one, preserving_proto_field_name=True) for one in status.regions.values()]
    told = [{name: str(value) for name, value in row.items()} for row in status]
    assert told == [{"name": place.name, "key": place.key, "offset": "16", "byte_size": "32"}]
    with pytest.raises(InferenceServerException, match=f"shared memory region '{place.name}' already in manager"):
        client.register_system_shared_memory(place.name, place.key, 64)
    for _ in range(2):  # the second time it is forgotten already
        client.unregister_system_shared_memory(place.name)
        assert names(client) == set()
    client.register_system_shared_memory(place.name, place.key, 64)


def test_what_one_wire_registers_the_other_finds(server: FakeServer, place: Region) -> None:
    with (
        triton.InferenceServerClient(f"127.0.0.1:{server.port}") as http,
        triton_grpc.InferenceServerClient(server.grpc_address) as grpc,
    ):
        http.register_system_shared_memory(place.name, place.key, 64)
        assert names(grpc) == {place.name}
        given = triton_grpc.InferInput("x", [1, 8], "FP32")
        given.set_shared_memory(place.name, 32)
        answer = grpc.infer("echo_fp32", [given]).as_numpy("y")
        assert answer.tolist() == [list(range(8))]
        grpc.unregister_system_shared_memory()
        assert names(http) == set()


RESERVED = "triton_python_backend_shm_region_"
KEYS = ("", "/", ".", "..", "/..", "../etc/passwd", "/../etc/passwd", "a/b", "//a", "/a/", "x" * 300, "a\0b")


@pytest.mark.parametrize(("key", "words"), [*((key, "shared memory") for key in KEYS), (f"/{RESERVED}1", RESERVED)])
def test_a_key_is_not_reserved_and_cannot_leave_its_folder(server: FakeServer, key: str, words: str) -> None:
    check_refused(
        server.post(f"{SYSTEM}/region/r/register", json={"key": key, "offset": 0, "byte_size": 1}), 400, words
    )


@pytest.fixture
def strange_file(request: pytest.FixtureRequest) -> Iterator[str]:
    """Something in the folder that is no shared memory."""
    path = FOLDER / f"convoy-strange-{os.getpid()}"
    make, remove = request.param
    make(path)
    yield path.name
    remove(path)


@pytest.mark.parametrize(
    "strange_file",
    [
        (lambda path: path.symlink_to("/etc/hostname"), Path.unlink),
        (Path.mkdir, Path.rmdir),
        (os.mkfifo, Path.unlink),
        (Path.touch, Path.unlink),
    ],
    ids=["link", "folder", "pipe", "empty"],
    indirect=True,
)
def test_what_is_no_shared_memory_cannot_be_registered(server: FakeServer, strange_file: str) -> None:
    check_refused(server.post(f"{SYSTEM}/region/r/register", json={"key": strange_file, "byte_size": 1}), 400)


@pytest.mark.parametrize(
    ("offset", "byte_size", "words"),
    [
        (65, 1, "Invalid offset for shared memory region"),
        (-1, 1, "Invalid offset for shared memory region"),
        (1 << 63, 1, "Invalid offset for shared memory region"),
        (0, 65, "Invalid offset + byte size for shared memory region"),
        (60, 5, "Invalid offset + byte size for shared memory region"),
        (0, 0, "Invalid offset + byte size for shared memory region"),
        (0, -1, "Invalid offset + byte size for shared memory region"),
        (1, (1 << 64) - 1, "Invalid offset + byte size for shared memory region"),
        (0, 1 << 70, ""),
        ("0", 1, "the body must be like"),
        (0, 1.0, "the body must be like"),
        (0, True, "the body must be like"),
        (0, None, "the body must be like"),
    ],
)
def test_a_region_must_lie_within_its_object(
    server: FakeServer, place: Region, offset: object, byte_size: object, words: str
) -> None:
    body = {"key": place.key, "offset": offset, "byte_size": byte_size}
    check_refused(server.post(f"{SYSTEM}/region/r/register", json=body), 400, words)


def test_an_unknown_key_is_told(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="Unable to open shared memory region: '/nobody-has-this'"):
        client.register_system_shared_memory("r", "/nobody-has-this", 64)


def test_an_unknown_region_is_a_404(server: FakeServer) -> None:
    for kind, path in (("system", SYSTEM), ("cuda", CUDA)):
        words = f"Unable to find {kind} shared memory region: 'nobody'"
        check_refused(server.get(f"{path}/region/nobody/status"), 404, words)
    answer = ask(server, {"shared_memory_region": "nobody", "shared_memory_byte_size": 32}, {})
    check_refused(answer, 404, "Unable to find shared memory region: 'nobody'")


def ask(
    server: FakeServer, given: dict[str, Any], wanted: dict[str, Any], size: int = 8, **more: object
) -> httpx.Response:
    tensor = {"name": "x", "shape": [1, size], "datatype": "FP32", "parameters": given, **more}
    body = {"inputs": [tensor], "outputs": [{"name": "y", "parameters": wanted}]}
    return server.post("/v2/models/echo_fp32/infer", json=body)


@pytest.mark.parametrize(
    ("offset", "byte_size", "words"),
    [
        (0, 65, "Invalid offset + byte size for shared memory region"),
        (33, 32, "Invalid offset + byte size for shared memory region"),
        (65, 32, "Invalid offset for shared memory region"),
        (0, 28, "input byte size mismatch for input 'x' for model 'echo_fp32'. Expected 32, got 28"),
        (-1, 32, "'shared_memory_offset'"),
        (1 << 62, 32, "'shared_memory_offset'"),
        (0, (1 << 64) - 1, "'shared_memory_byte_size'"),
        (0, "32", "'shared_memory_byte_size'"),
        (0, None, "'shared_memory_byte_size'"),
        (True, 32, "'shared_memory_offset'"),
    ],
)
def test_an_input_must_lie_within_its_region(
    server: FakeServer, known: Region, offset: object, byte_size: object, words: str
) -> None:
    check_refused(ask(server, of(known, byte_size, shared_memory_offset=offset), {}), 400, words)


def test_offsets_of_region_and_tensor_add_up(server: FakeServer, http_client: Any, place: Region) -> None:
    http_client.register_system_shared_memory(place.name, place.key, 56, offset=8)
    answer = ask(server, of(place, 8, shared_memory_offset=4), of(place, 12, shared_memory_offset=40), size=2)
    assert answer.json()["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [1, 2]}]
    assert np.frombuffer(place.contents[48:56], np.float32).tolist() == [3, 4]
    assert place.contents[56:] == b"\xee" * 8


def test_an_output_that_does_not_fit_is_told(server: FakeServer, known: Region) -> None:
    words = "shared memory size specified with the request for output 'y' (31 bytes) should be at least 32 bytes"
    check_refused(ask(server, of(known), of(known, 31)), 400, words)


def test_a_client_that_shortens_its_memory_gets_an_error_and_the_server_lives(
    server: FakeServer, known: Region
) -> None:
    path = FOLDER / known.key.removeprefix("/")
    os.truncate(path, 0)
    for wanted in ({}, of(known)):
        check_refused(ask(server, of(known), wanted), 400, "smaller than when it was")
    check_refused(ask(server, {}, of(known), data=[0] * 8), 400)
    assert (path.stat().st_size, server.is_ready()) == (0, True)


def test_an_input_larger_than_the_memory_for_requests_is_turned_away(server: FakeServer, http_client: Any) -> None:
    nbytes = 65 << 20
    with region(http_client, nbytes=nbytes) as large:
        answer = ask(server, of(large, nbytes), {}, size=nbytes // 4)
        assert (answer.status_code in (413, 429), list(answer.json())) == (True, ["error", "code"])


def test_unregistering_waits_for_the_requests_that_use_it(server: FakeServer, http_client: Any, place: Region) -> None:
    http_client.register_system_shared_memory(place.name, place.key, 64)
    tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "parameters": of(place, 16)}
    body = {"inputs": [tensor], "outputs": [{"name": "y", "parameters": of(place, 16)}]}
    server.switch_on("hold")
    with server.client() as other, ThreadPoolExecutor(1) as pool:
        running = pool.submit(other.post, "/v2/models/rows/infer", json=body)
        wait_until(lambda: server.stats()["unfinished_requests"] == 1, "the request runs")
        http_client.unregister_system_shared_memory()
        assert names(http_client) == {place.name}
        assert server.post("/v2/models/rows/infer", json=body).status_code == 404
        with pytest.raises(InferenceServerException, match="already in manager"):
            http_client.register_system_shared_memory(place.name, place.key, 64)
        server.switch_off("hold")
        assert running.result().status_code == 200
    wait_until(lambda: names(http_client) == set(), "the region goes with its last request")
    http_client.register_system_shared_memory(place.name, place.key, 64)


def test_it_is_off_unless_it_is_allowed() -> None:
    words = "Client shared memory is disabled. Start the server with '--allow-shared-memory' to enable."
    with start_fake_server(access_log="off") as server, server.client() as http:
        for method, path in (
            ("GET", "status"),
            ("GET", "region/r/status"),
            ("POST", "region/r/register"),
            ("POST", "unregister"),
            ("POST", "region/r/unregister"),
        ):
            check_refused(http.request(method, f"{SYSTEM}/{path}"), 501, words)
        assert "system_shared_memory" not in server.get("/v2").json()["extensions"]
        with (
            triton_grpc.InferenceServerClient(server.grpc_address) as client,
            pytest.raises(InferenceServerException, match="Client shared memory is disabled"),
        ):
            client.get_system_shared_memory_status()


def test_an_image_may_lie_in_a_region() -> None:
    packed = struct.pack("<I", len(digit("seven"))) + digit("seven")
    with (
        closing(Region(packed, len(packed))) as whole,
        closing(Region(packed, len(packed))) as cut,
        start_server("--allow-shared-memory") as server,
        triton_grpc.InferenceServerClient(server.grpc_address) as client,
    ):
        for place in (whole, cut):
            client.register_system_shared_memory(place.name, place.key, len(packed))
        image = triton_grpc.InferInput("image", [1], "BYTES")
        image.set_shared_memory(whole.name, len(packed))
        found = json.loads(client.infer("digits", [image]).as_numpy("predictions").item())
        assert found["predictions"][0]["label"] == "7"
        image.set_shared_memory(cut.name, len(packed) - 1)
        with pytest.raises(InferenceServerException, match="for model 'digits'"):
            client.infer("digits", [image])
        wait_until(server.is_at_rest, "nothing is held")
        client.unregister_system_shared_memory()
        assert names(client) == set()


def test_cuda_regions_are_not_offered_but_may_be_tidied_up(server: FakeServer) -> None:
    assert server.get(f"{CUDA}/status").json() == []
    for path in ("unregister", "region/r/unregister"):
        answer = server.post(f"{CUDA}/{path}")
        assert (answer.status_code, answer.content) == (200, b"")
    body = {"raw_handle": {"b64": "AAAA"}, "device_id": 0, "byte_size": 64}
    check_refused(server.post(f"{CUDA}/region/r/register", json=body), 501, "CUDA shared memory is not supported")
    extensions = server.get("/v2").json()["extensions"]
    assert {"system_shared_memory", "cuda_shared_memory"} & set(extensions) == {"system_shared_memory"}
