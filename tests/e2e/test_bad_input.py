"""What bad input gets: a 4xx in one form that says what was expected, and a server that goes on.

Every bad request goes over a connection that is used for a good request afterwards. The tables go over connections
in memory; what concerns memory, the order of bytes, or the connection itself goes over sockets.
"""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.support.memory_server import MemoryServer, MemoryWire
from tests.support.pictures import jpeg, png_claiming
from tests.support.servers import Server, fresh_peak, peak_bytes, start_server, wait_until
from tests.support.stores import StoreFolder, digit
from tests.support.wire import Wire, WireReply, check_refused, head

DIGITS = "/predictions/digits"
SIMPLE = "/v2/models/simple/infer"
IMAGES = "/v2/models/digits/infer"
UINT64 = "/v2/models/identity_uint64/infer"
POST = f"POST {SIMPLE} HTTP/1.1\r\n".encode()


@pytest.fixture(scope="module")
def filled_store(shared_store: StoreFolder) -> StoreFolder:
    shared_store.add_digits()
    shared_store.add_add_sub()
    shared_store.add_identity("FP16")
    shared_store.add_identity("BOOL")
    shared_store.add_identity("UINT64")
    return shared_store


@pytest.fixture(scope="module")
def server(filled_store: StoreFolder) -> Iterator[Server]:
    with start_server("--max-body-mb", "2", "--max-inflight-mb", "64", store=filled_store.root) as server:
        yield server
        assert server.is_ready()
        wait_until(server.is_at_rest, "nothing is held after all these requests")


@pytest.fixture(scope="module")
def large_server(filled_store: StoreFolder) -> Iterator[Server]:
    """Takes bodies as large as a server without options does, and has room to read them."""
    with start_server("--max-inflight-mb", "2048", store=filled_store.root, rests=True) as server:
        yield server


@pytest.fixture(scope="module")
def memory_server(filled_store: StoreFolder) -> Iterator[MemoryServer]:
    server = MemoryServer(store=filled_store.root, max_body_mb=2, max_inflight_mb=64)
    with server.running():
        yield server


@pytest.fixture
def wire(memory_server: MemoryServer) -> Iterator[MemoryWire]:
    wire = MemoryWire(memory_server)
    yield wire
    check_good(wire)


@pytest.fixture
def socket_wire(server: Server) -> Iterator[Wire]:
    with Wire(server.port) as wire:
        yield wire
        check_good(wire)


def check_good(wire: Wire | MemoryWire) -> None:
    reply = wire.ask(DIGITS, digit("seven"))
    assert reply.status == 200, reply
    assert reply.json()["predictions"][0]["label"] == "7"


def tensor(_name: str, **changes: Any) -> dict[str, Any]:
    return {"name": _name, "shape": [1, 16], "datatype": "INT32", "data": list(range(16))} | changes


def inputs(*tensors: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"inputs": tensors, **more}).encode()


def simple(first: dict[str, Any] | None = None, **more: Any) -> bytes:
    """A good request for the add/sub model, with changes to its first input or to the whole."""
    return inputs(tensor("INPUT0", **(first or {})), tensor("INPUT1"), **more)


def nested(first: dict[str, Any] | None = None, **more: Any) -> bytes:
    """The same, with 900 lists in the place of each "@"."""
    return simple(first, **more).replace(b'"@"', b"[" * 900 + b"]" * 900)


def binary(size: object, tail: bytes) -> tuple[bytes, dict[str, str]]:
    """INPUT0 as JSON and INPUT1 as `tail` behind it, announced as `size` bytes."""
    second = {"name": "INPUT1", "shape": [1, 16], "datatype": "INT32", "parameters": {"binary_data_size": size}}
    document = inputs(tensor("INPUT0"), second)
    return document + tail, {"Inference-Header-Content-Length": str(len(document))}


SQUEEZE: dict[str, Callable[[bytes], bytes]] = {"gzip": partial(gzip.compress, mtime=0), "deflate": zlib.compress}
# What may have happened to a compressed body, and the word for it.
SPOILS: list[tuple[Callable[[bytes], bytes], str]] = [
    ((lambda data: b""), "cut off"),
    ((lambda data: data[:-9]), "cut off"),
    ((lambda data: data[:12]), "cut off"),
    ((lambda data: b"{}" + data), "is not"),
    ((lambda data: data[:30] + b"\0" * 30 + data[60:]), "is not"),
    ((lambda data: data + b"more"), "more behind the end"),
    ((lambda data: data + data), "more behind the end"),
]


def form(*parts: tuple[str, bytes], boundary: str = "frontier") -> bytes:
    pieces = [
        f"--{boundary}\r\nContent-Disposition: form-data; {name}\r\n\r\n".encode() + data + b"\r\n"
        for name, data in parts
    ]
    return b"".join(pieces) + f"--{boundary}--\r\n".encode()


FORM = {"Content-Type": "multipart/form-data; boundary=frontier"}
FILE = 'name="file"; filename="image.png"'
# The path, the body and headers of what is wrong, and the words of its 400.
WRONG: list[tuple[str, bytes, dict[str, str], tuple[str, ...]]] = [
    # Images, also in JSON
    *(
        (DIGITS, body, {}, words)
        for body, words in [
            (b"this is no image", ("image",)),
            (b"", ("empty",)),
            (jpeg()[:5000], ("JPEG",)),
            (digit("seven")[:100], ("PNG",)),
            (png_claiming(50_000, 50_000), ("pixel",)),
            (png_claiming(0, 0), ()),
            (b"\xff\xd8\xff", ()),
            (b"<svg xmlns='http://www.w3.org/2000/svg'/>", ("JPEG",)),
            (b"\0" * 100_000, ("image",)),
            (b'{"image": "????"}', ("not base64",)),
            (b'{"image": "AAAA"}', ("image",)),
        ]
    ),
    (DIGITS, b"[1, 2]", {"Content-Type": "application/json"}, ("must be an object",)),
    # Forms
    *(
        (DIGITS, body, FORM, words)
        for body, words in [
            (b"", ("multipart",)),
            (b"no form at all", ("multipart form",)),
            (form((FILE, digit("one")))[:-20], ("cut off",)),
            (form(('name="file"', digit("one"))), ("no file", "curl -F")),
            (form(('name="filename"', digit("one"))), ("no file",)),
            (form(), ("multipart",)),
            (form(*[(FILE, b"x")] * 300), ("256",)),
        ]
    ),
    *(
        (DIGITS, form((FILE, b"x"), boundary="z" * 257), {"Content-Type": f"multipart/form-data{odd}"}, words)
        for odd, words in [
            ("", ("boundary",)),
            ("; boundary*0=a; boundary*=b", ("boundary",)),
            (f"; boundary*{'9' * 5000}=a", ("boundary",)),
            ("; boundary*=idna''%ff", ("boundary",)),
            (f"; boundary={'z' * 257}", ("multipart form", "257", "256")),
        ]
    ),
    # Tensors
    *(
        (SIMPLE, simple(first), {}, words)
        for first, words in [
            ({"shape": [1, 15]}, ("unexpected shape for input 'INPUT0' for model 'simple'", "[-1,16]", "[1,15]")),
            ({"shape": [16]}, ("unexpected shape for input 'INPUT0'", "[-1,16]", "[16]")),
            ({"shape": [1, 16, 1]}, ("unexpected shape for input 'INPUT0'",)),
            ({"shape": []}, ("unexpected shape for input 'INPUT0'",)),
            ({"shape": [-1, 16]}, ("INPUT0", ">= 0", "[-1, 16]")),
            ({"shape": [0, 16], "data": []}, ("batch size",)),
            ({"shape": [1 << 62, 16]}, ("INPUT0", "exceed")),
            ({"shape": [1 << 63, 1 << 63, 1 << 63]}, ("INPUT0", "exceed")),
            ({"shape": [1 << 100, 16]}, ("INPUT0",)),
            ({"shape": [1.0, 16]}, ("inputs[0].shape[0]", "int")),
            ({"shape": [True, 16]}, ("inputs[0].shape[0]", "int")),
            ({"shape": "1,16"}, ("inputs[0].shape", "array")),
            ({"shape": None}, ("inputs[0].shape",)),
            ({"datatype": "FP32"}, ("'INPUT0' data-type is 'FP32', but model 'simple' expects 'INT32'",)),
            ({"datatype": "INT33"}, ("INT33", "INT32")),
            ({"datatype": 32}, ("inputs[0].datatype", "str")),
            ({"datatype": "BYTES"}, ("BYTES", "INT32")),
            ({"name": "INPUT9"}, ("unexpected inference input 'INPUT9' for model 'simple'", "INPUT0")),
            ({"name": 7}, ("inputs[0].name", "str")),
            ({"name": "INPUT1"}, ("input 'INPUT1' already exists",)),
            ({"data": list(range(15))}, ("INPUT0", "15 values", "16")),
            ({"data": list(range(17))}, ("INPUT0", "17 values", "16")),
            ({"data": []}, ("INPUT0", "0 values")),
            ({"data": ["one"] * 16}, ("INPUT0", "INT32")),
            ({"data": ["1"] * 16}, ("INPUT0", "INT32")),
            ({"data": [1.5] * 16}, ("INPUT0", "INT32")),
            ({"data": [True] * 16}, ("INPUT0", "INT32")),
            ({"data": [*range(15), True]}, ("INPUT0", "INT32")),
            ({"data": [[*range(8)], [*range(7), False]]}, ("INPUT0", "INT32")),
            ({"data": [None] * 16}, ("INPUT0", "INT32")),
            ({"data": [{}] * 16}, ("INPUT0", "INT32")),
            ({"data": [1 << 31] * 16}, ("INPUT0", "-2147483648..2147483647")),
            ({"data": [-(1 << 31) - 1] * 16}, ("INPUT0", "-2147483648..2147483647")),
            ({"data": [1 << 80] * 16}, ("INPUT0",)),
            ({"data": [float("nan")] * 16}, ("INPUT0", "INT32")),
            ({"data": [[1, 2], [3]]}, ("INPUT0",)),
            ({"data": "0123456789abcdef"}, ("INPUT0", "list")),
            ({"data": 7}, ("INPUT0", "list")),
            ({"data": None}, ("INPUT0",)),
            ({"parameters": {"binary_data_size": 64}}, ("INPUT0", "only one of")),
            ({"parameters": []}, ("inputs[0].parameters", "object")),
            ({"shape": [2, 16], "data": [0] * 32}, ("batch size does not match",)),
            ({"shape": [-1] * 300_000}, ("INPUT0",)),  # which is not repeated
        ]
    ),
    (SIMPLE, inputs(tensor("INPUT0")), {}, ("expected 2 inputs but got 1", "['INPUT1']")),
    (
        *(SIMPLE, inputs(*(tensor(name, shape=[33, 16], data=[0] * 33 * 16) for name in ("INPUT0", "INPUT1"))), {}),
        ("batch-size must be <= 32 for 'simple'", "33"),
    ),
    *(
        (
            "/v2/models/identity_bool/infer",
            inputs(tensor("x", shape=[1, len(data)], datatype="BOOL", data=data)),
            {},
            ("BOOL",),
        )
        for data in ([1], [0, 2], [0.0], ["true"])
    ),
    *(
        (IMAGES, inputs(tensor("images", shape=[1, 3, 32, 32], datatype=dtype, data=[0] * 3072)), {}, ("images", word))
        for dtype, word in (("FP32", "UINT8"), ("UINT8", "[32,32,3]"))
    ),
    # Fields
    *(
        (SIMPLE, simple(**more), {}, words)
        for more, words in [
            ({"outputs": [{"name": "OUTPUT9"}]}, ("unexpected inference output 'OUTPUT9'", "OUTPUT0")),
            ({"outputs": [{"name": "OUTPUT0"}] * 2}, ("output 'OUTPUT0' already exists in request",)),
            ({"outputs": [{}]}, ("`name`", "outputs[0]")),
            ({"outputs": {"name": "OUTPUT0"}}, ("outputs", "array")),
            ({"outputs": ["OUTPUT0"]}, ("outputs[0]", "object")),
            ({"outputs": [{"name": "OUTPUT0", "parameters": {"binary_data": "yes"}}]}, ("binary_data", "OUTPUT0")),
            ({"parameters": {"binary_data_output": 1}}, ("binary_data_output",)),
            ({"parameters": {"timeout": -1}}, ("'timeout'", "-1")),
            ({"parameters": {"timeout": "soon"}}, ("'timeout'", "soon")),
            ({"parameters": {"timeout": 1 << 53}}, ("'timeout'", "< 9007199254740992")),
            ({"parameters": {"priority": 1.5}}, ("'priority'",)),
            ({"parameters": "none"}, ("parameters", "object")),
            ({"id": 7}, ("id", "str")),
            ({"id": "\ud800"}, ("'id'",)),
            ({"inputs": "all"}, ("inputs", "array")),
            ({"inputs": None}, ("inputs", "array")),
        ]
    ),
    # JSON
    *(
        (SIMPLE, body, {}, words)
        for body, words in [
            (b"", ("JSON",)),
            (b"{", ("JSON",)),
            (b"[]", ("object",)),
            (b"null", ("object",)),
            (b"\xff\xfe{}", ("JSON",)),
            (b'{"inputs": [' + b"9" * 5000 + b"]}", ()),
            (b"[" * 500_000, ("nesting",)),
            (b'{"a":' * 200_000, ("nesting",)),
            (b'{"inputs":' + b"[" * 900 + b"]" * 900 + b"}", ("inputs",)),
        ]
    ),
    *((SIMPLE, nested({field: "@"}), {}, ()) for field in (*tensor("INPUT0"), "parameters")),
    *((SIMPLE, nested(parameters={field: "@"}), {}, ()) for field in ("timeout", "priority", "binary_data_output")),
    (SIMPLE, nested(id="@"), {}, ()),
    # Binary data
    *(
        (SIMPLE, *binary(size, tail), words)
        for size, tail, words in [
            (64, b"\0" * 60, ("unexpected size for input 'INPUT1', expecting 4 additional bytes for model 'simple'",)),
            (64, b"", ("expecting 64 additional bytes",)),
            (64, b"\0" * 68, ("unexpected additional input data for model 'simple'",)),
            (60, b"\0" * 60, ("input byte size mismatch for input 'INPUT1' for model 'simple'. Expected 64, got 60",)),
            (-64, b"\0" * 64, ("binary_data_size", "INPUT1", "-64")),
            ("64", b"\0" * 64, ("binary_data_size", "INPUT1")),
            (64.0, b"\0" * 64, ("binary_data_size", "INPUT1")),
            (1 << 63, b"\0" * 64, ("INPUT1",)),
        ]
    ),
    *(
        (SIMPLE, binary(64, bytes(64))[0], {"Inference-Header-Content-Length": length.encode().decode("latin-1")}, ())
        for length in ("0", "-1", "abc", "1e3", "99999999999999999999", "100000", "3", "0x10", "", "٣")
    ),
    # Compressed bodies
    *(
        (SIMPLE, spoil(squeeze(simple())), {"Content-Encoding": encoding}, (encoding, word))
        for encoding, squeeze in SQUEEZE.items()
        for spoil, word in SPOILS
    ),
    (SIMPLE, zlib.compress(simple())[2:-4], {"Content-Encoding": "deflate"}, ("zlib's format",)),  # without its head
]


def refused(reply: WireReply, status: int, *words: str, code: str = "") -> None:
    check_refused(reply, status, *words, code=code)
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"]
    assert len(reply.error) < 600


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_a_400_that_names_it(
    wire: MemoryWire, case: tuple[str, bytes, dict[str, str], tuple[str, ...]]
) -> None:
    path, body, headers, words = case
    refused(wire.ask(path, body, headers), 400, *words)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("top_k=0", ("top_k", "at least 1", "'0'")),
        ("top_k=abc", ("top_k", "'abc'")),
        ("top_k=-1", ("top_k",)),
        ("top_k=", ("top_k",)),
        ("top_k=1.5", ("top_k",)),
        ("top_k=000", ("top_k", "'000'")),
        ("top_k=%F0%9F%98%80", ("top_k",)),
        ("timeout_ms=-1", ("timeout_ms", "'-1'")),
        ("timeout_ms=0", ("timeout_ms",)),
        ("timeout_ms=soon", ("timeout_ms", "'soon'")),
        ("timeout_ms=nan", ("timeout_ms",)),
        ("timeout_ms=inf", ("timeout_ms",)),
        ("timeout_ms=1e400", ("timeout_ms",)),
        ("timeout_ms=1000000000", ("timeout_ms", "below 1000000000")),
        ("threshold=" + "0" * 800 + "&top_k=0", ("top_k", "at least 1", "'0'")),
        ("top_k&" * 40 + "top_k=0", ("top_k", "at least 1", "'0'")),
        ("topk=1", ("unknown query parameter 'topk'; did you mean top_k?",)),
        ("Threshold=1", ("unknown query parameter 'Threshold'; did you mean threshold?",)),
        ("top_k=1&timeout=5", ("unknown query parameter 'timeout'; did you mean timeout_ms?",)),
        ("note=1", ("'note'", "there are format, iou, masks, threshold, timeout_ms, top_k")),
        ("a&" * 40 + "top_k=1", ("unknown query parameter 'a'",)),
        ("long" * 2000 + "=1", ("unknown query parameter 'longlong",)),
        ("top_k=1&top_k=0", ("top_k", "at least 1", "'0'")),  # the last one counts
    ],
)
def test_a_query_out_of_range_is_a_400(wire: MemoryWire, query: str, words: tuple[str, ...]) -> None:
    for _ in range(2):  # what a query says is kept for the next one
        refused(wire.ask(f"{DIGITS}?{query}", digit("seven")), 400, *words)


@pytest.mark.parametrize("top_k", ["1000", "999999999", "1000000000", "9" * 23, "9" * 5000, "0" * 20 + "11"])
def test_more_classes_than_there_are_give_all(wire: MemoryWire, top_k: str) -> None:
    assert len(wire.ask(f"{DIGITS}?top_k={top_k}", digit("seven")).json()["predictions"]) == 10


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/predictions/nobody", ("Request for unknown model: 'nobody' is not found",)),
        ("/predictions/digits/9", ("Request for unknown model: 'digits' version 9 is not found",)),
        ("/predictions/digits/first", ("first", "is not found")),
        ("/predictions/digits/-1", ("-1", "is not found")),
        ("/predictions/digits/99999999999999999999", ("is not found",)),
        ("/predictions/%E2%82%AC%00%0A", ("is not found",)),
        ("/predictions/%FF%FE", ("is not found",)),
        ("/v2/models/nobody/infer", ("Request for unknown model: 'nobody' is not found",)),
        ("/v2/models/simple/versions/2/infer", ("'simple' version 2 is not found",)),
        ("/v2/models/simple/versions/two/infer", ("two", "is not found")),
        ("/nowhere", ("there is no route POST /nowhere; /docs lists the routes",)),
        ("/predictions", ("did you mean POST /predictions/{model}?",)),
        ("/predictions/digits/", ("the version is empty", "remove the version")),
        ("/predictions/digits/1/2/3", ("/docs lists the routes",)),
        ("/predict/digits", ("did you mean POST /predictions/digits?",)),
        ("/prediction/digits", ("did you mean POST /predictions/digits?",)),
        ("/Predictions/digits/2", ("did you mean POST /predictions/digits/2?",)),
        ("/predict/models", ("did you mean POST /predictions/models?",)),
        ("/v1/models/digits:predict", ("did you mean POST /predictions/digits?",)),
        ("/v1/models/digits/versions/3:predict", ("did you mean POST /predictions/digits/3?",)),
        ("/v2/model/digits/infer", ("did you mean POST /v2/models/digits/infer?",)),
        ("/v2/models/digits/predict", ("did you mean POST /v2/models/digits/infer?",)),
        ("/v2/models/digits/version/1/infer", ("did you mean POST /v2/models/digits/versions/1/infer?",)),
        ("/x" * 30_000, ("/docs lists the routes",)),
        ("/predictions/..%2fdigits", ("is not found",)),
        ("/v2/models/simple/infer/", ("did you mean POST /v2/models/simple/infer?",)),
        ("/v2/models/simple/explain", ("did you mean POST /v2/models/simple/infer?",)),
        ("//", ("there is no route POST //",)),
    ],
)
def test_what_is_not_there_is_a_404(wire: MemoryWire, path: str, words: tuple[str, ...]) -> None:
    refused(wire.ask(path, b"x" * 1000), 404, *words)


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/predict/digits", "POST /predictions/digits"),
        ("/stat", "GET /stats"),
        ("/v2/heath/ready", "GET /v2/health/ready"),
        ("/v2/models/digits/read", "GET /v2/models/digits/ready"),
    ],
)
def test_a_route_that_is_not_there_for_a_get_names_one_that_is(wire: MemoryWire, path: str, route: str) -> None:
    refused(wire.ask(path, method="GET"), 404, f"did you mean {route}?", code="unknown_route")


NO_IMAGE = b"this is no image"
SHARED = {"name": "OUTPUT0", "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 64}}


@pytest.mark.parametrize(
    ("request_line", "body", "headers", "status", "code"),
    [
        (f"POST {DIGITS}", NO_IMAGE, {}, 400, "invalid_image"),
        (f"POST {DIGITS}?topk=1", NO_IMAGE, {}, 400, "unknown_parameter"),
        (f"POST {DIGITS}?top_k=0", NO_IMAGE, {}, 400, "invalid_request"),
        (f"POST {DIGITS}", b"{", {}, 400, "invalid_json"),
        (f"POST {SIMPLE}", b"{", {}, 400, "invalid_json"),
        (f"POST {SIMPLE}", b"{}", {}, 400, "invalid_request"),
        (f"POST {SIMPLE}", simple(outputs=[SHARED]), {}, 501, "not_supported"),
        ("POST /v2/repository/index", b"{", {}, 400, "invalid_json"),
        ("GET /models?limit=0", b"", {}, 400, "invalid_request"),
        ("POST /predictions/nobody", NO_IMAGE, {}, 404, "unknown_model"),
        ("POST /predictions/nobody/1", NO_IMAGE, {}, 404, "unknown_model"),
        ("POST /predictions/digits/9", NO_IMAGE, {}, 404, "unknown_version"),
        ("POST /predictions/digits/one", NO_IMAGE, {}, 404, "unknown_version"),
        ("GET /v2/models/nobody", b"", {}, 404, "unknown_model"),
        ("GET /v2/models/digits/versions/9/ready", b"", {}, 404, "unknown_version"),
        ("GET /docs/nothing", b"", {}, 404, "not_found"),
        ("GET /nowhere", b"", {}, 404, "unknown_route"),
        (f"GET {DIGITS}", b"", {}, 405, "method_not_allowed"),
        ("PUT /stats", b"", {}, 405, "method_not_allowed"),
        (f"POST {DIGITS}", bytes(3 << 20), {}, 413, "payload_too_large"),
        (f"POST {DIGITS}", b"x", {"Content-Encoding": "br"}, 501, "not_supported"),
        ("POST /v2/repository/models/digits/load", b"", {}, 501, "not_supported"),
        ("GET /v2/logging", b"", {}, 501, "not_supported"),
        ("GET /v2/cudasharedmemory/region/r/status", b"", {}, 404, "not_found"),
        ("POST /v2/cudasharedmemory/region/r/register", b"", {}, 501, "not_supported"),
    ],
)
def test_every_error_has_a_code(
    wire: MemoryWire, request_line: str, body: bytes, headers: dict[str, str], status: int, code: str
) -> None:
    method, _, path = request_line.partition(" ")
    reply = wire.ask(path, body, headers, method)
    refused(reply, status, code=code)
    assert reply.json().keys() == {"error", "code"}


@pytest.mark.parametrize(
    "body",
    [
        {"url": "https://example.org/cat.jpg"},
        {"image": "http://example.org/cat.jpg"},
        {"image_url": "HTTPS://example.org/cat.jpg"},
        {"image_url": {"url": "https://example.org/cat.jpg"}},
        {"image": {"b64": "s3://bucket/cat.jpg"}},
    ],
)
def test_urls_are_not_fetched(wire: MemoryWire, body: object) -> None:
    reply = wire.ask(DIGITS, json.dumps(body).encode())
    told = "URLs are not fetched; send the image's bytes as the body, or base64 in 'image'"
    refused(reply, 400, told, code="invalid_request")
    reply = wire.ask(DIGITS, json.dumps({"instances": ["gs://bucket/cat.jpg"]}).encode())
    assert reply.status == 400
    assert reply.json()["results"] == [{"error": told, "code": "invalid_request"}]


def test_a_name_may_be_percent_encoded(wire: MemoryWire) -> None:
    assert wire.ask("/predictions/%64%69gits", digit("two")).status == 200
    assert wire.ask("/v2/models/si%6Dple/versions/%31/infer", simple()).status == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", DIGITS),
        ("PUT", DIGITS),
        ("DELETE", SIMPLE),
        ("GET", SIMPLE),
        ("POST", "/v2/health/ready"),
        ("POST", "/metrics"),
        ("PATCH", "/stats"),
        ("OPTIONS", DIGITS),
    ],
)
def test_the_wrong_verb_is_a_405_that_names_the_right_one(wire: MemoryWire, method: str, path: str) -> None:
    reply = wire.ask(path, b"", method=method)
    refused(reply, 405, f"{method} is not allowed here; send {reply.headers['allow']} {path}")
    assert reply.headers["allow"] == ("POST" if "/predictions" in path or "/infer" in path else "GET")


def test_a_prediction_by_the_path_of_a_get_route_names_the_right_path(wire: MemoryWire) -> None:
    refused(wire.ask("/models/digits/predict", b"x"), 405, "POST is not allowed here; send POST /predictions/digits")


def test_integers_between_two_types_keep_their_value(wire: MemoryWire) -> None:
    values = [(1 << 64) - 1, 0, 1 << 63]
    reply = wire.ask(UINT64, inputs(tensor("x", shape=[1, 3], datatype="UINT64", data=values)))
    assert reply.json()["outputs"][0]["data"] == values


@pytest.mark.parametrize("encoding", ["br", "zstd", "identity, gzip", "gzip, gzip", "compress"])
def test_an_unknown_compression_is_a_501_that_names_the_known_ones(wire: MemoryWire, encoding: str) -> None:
    reply = wire.ask(DIGITS, b"x" * 100, {"Content-Encoding": encoding})
    refused(reply, 501, "Unsupported compression type", "gzip or deflate")
    assert reply.headers["accept-encoding"] == "gzip, deflate"


@pytest.mark.parametrize("encoding", SQUEEZE)
@pytest.mark.parametrize("path", [SIMPLE, DIGITS])
def test_a_bomb_is_a_413_and_takes_no_more_memory_than_a_body_may(server: Server, encoding: str, path: str) -> None:
    bomb = SQUEEZE[encoding](bytes(200 << 20))  # before there is a connection, whose headers would be late
    with Wire(server.port) as wire:
        refused(wire.ask(path, bomb, {"Content-Encoding": encoding}), 413, "--max-body-mb")
        before = server.rss_bytes
        for _ in range(5):
            refused(wire.ask(path, bomb, {"Content-Encoding": encoding}), 413)
        assert server.rss_bytes - before < 20 << 20


@pytest.mark.parametrize("encoding", SQUEEZE)
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_compressed_body_may_be_as_large_as_a_plain_one(wire: MemoryWire, encoding: str, extra: int) -> None:
    body = simple()
    whole = body + b" " * ((2 << 20) - len(body) + extra)
    reply = wire.ask(SIMPLE, SQUEEZE[encoding](whole), {"Content-Encoding": encoding})
    assert reply.status == (200 if extra <= 0 else 413), reply


@pytest.mark.parametrize(
    ("path", "before", "behind"),
    [
        pytest.param(UINT64, b'{"inputs": [], "x": [', b"]}", id="a-member-that-means-nothing"),
        pytest.param(
            UINT64, b'{"inputs": [{"name": "x", "datatype": "UINT64", "shape": [1, 3], "data": [', b"]}]}", id="data"
        ),
        pytest.param(IMAGES, b'{"inputs": [], "x": [', b"]}", id="for-a-model-of-one-size"),
    ],
)
def test_a_list_of_more_values_than_the_reader_counts_is_a_400(
    large_server: Server, path: str, before: bytes, behind: bytes
) -> None:
    body = gzip.compress(before + b"1," * ((1 << 24) + 200_000) + b"1" + behind, compresslevel=1)
    with Wire(large_server.port) as wire:
        refused(wire.ask(path, body, {"Content-Encoding": "gzip"}), 400)
        check_good(wire)


@pytest.mark.parametrize(
    ("path", "pieces", "most_mib", "status", "words"),
    [
        *(
            (IMAGES, piece * ((16 << 20) // len(piece)), 24, 400, ("digits", "images", "at most"))
            for piece in (b"[],", b"1,", b'"a":1,', b"[")
        ),
        (UINT64, b"[]," * (14 << 20), 60, 413, ("binary tensor data", "--max-inflight-mb")),
    ],
    ids=("lists", "numbers", "members", "nests", "more than there is"),
)
def test_json_of_more_than_the_inputs_hold_costs_its_body(
    large_server: Server, path: str, pieces: bytes, most_mib: int, status: int, words: tuple[str, ...]
) -> None:
    name = "images" if path == IMAGES else "x"
    with Wire(large_server.port) as wire:
        before = fresh_peak(large_server)
        refused(
            wire.ask(path, b'{"inputs": [{"name": "%b", "data": [' % name.encode() + pieces + b"1]}]}"), status, *words
        )
        assert peak_bytes(large_server) - before < most_mib << 20
        check_good(wire)


def test_json_that_cannot_be_read_without_stopping_all_others_is_a_400(large_server: Server) -> None:
    start = b'{"inputs": [{"name": "x", "datatype": "UINT64", "shape": [1, 3], "data": ['
    with Wire(large_server.port) as wire:
        refused(wire.ask(UINT64, start + b"1," * (2 << 20) + b"NaN]}]}"), 400, "NaN", "binary tensor data")
        refused(
            wire.ask(UINT64, start + b'{"a":1},' * (1 << 19) + b"1]}]}"),
            400,
            "no flat or even lists",
            "binary tensor data",
        )
        check_good(wire)


def test_an_uncompressed_body_may_say_so(wire: MemoryWire) -> None:
    assert wire.ask(DIGITS, digit("one"), {"Content-Encoding": "Identity"}).status == 200


def test_shared_memory_is_a_501_unless_it_is_allowed(wire: MemoryWire) -> None:
    place = {"parameters": {"shared_memory_region": "region", "shared_memory_byte_size": 64}}
    words = ("Client shared memory is disabled", "--allow-shared-memory")
    refused(wire.ask(SIMPLE, simple(outputs=[{"name": "OUTPUT0", **place}])), 501, *words)
    first = {"name": "INPUT0", "shape": [1, 16], "datatype": "INT32", **place}
    refused(wire.ask(SIMPLE, inputs(first, tensor("INPUT1"))), 501, *words)


def test_a_body_declared_too_large_is_a_413_before_it_is_sent(socket_wire: Wire) -> None:
    body = b"x" * (3 << 20)
    socket_wire.send(head(DIGITS, {"Content-Length": str(len(body))}))
    refused(socket_wire.reply(), 413, str(len(body)), "--max-body-mb")
    socket_wire.send(body)  # a client that sends it all the same can still use its connection


def test_an_early_error_does_not_cost_the_connection_while_a_large_body_is_still_coming(server: Server) -> None:
    with Wire(server.port) as wire:
        wire.send(head("/predictions/nobody", {"Content-Length": str(30 << 20)}))
        piece = b"x" * (1 << 20)
        wire.send(piece)
        refused(wire.reply(), 404, "nobody")
        for _ in range(29):
            wire.send(piece)
        assert wire.ask(DIGITS, digit("seven")).status == 200


def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    bad = b"no image"
    with Wire(server.port) as wire:
        one, two = digit("one"), digit("two")
        wire.send(
            head(DIGITS, {"Content-Length": str(len(one))})
            + one
            + head("/predictions/nobody", {"Content-Length": "0"})
            + head(DIGITS, {"Content-Length": str(len(bad))})
            + bad
            + head("/v2/health/live", method="GET")
            + head(DIGITS, {"Content-Length": str(len(two))})
            + two
        )
        replies = [wire.reply() for _ in range(5)]
    assert [reply.status for reply in replies] == [200, 404, 400, 200, 200]
    assert replies[0].json()["predictions"][0]["label"] == "1"
    assert replies[4].json()["predictions"][0]["label"] == "2"


def test_a_body_before_pipelined_headers_is_not_counted_as_headers(server: Server) -> None:
    body = simple({"data": [[0] * 16]}) + b" " * 100_000
    request = head(SIMPLE, {"Content-Length": str(len(body))}) + body
    with Wire(server.port) as wire:
        wire.send(request + request[:60])
        assert wire.reply().status == 200
        wire.send(request[60:])
        assert wire.reply().status == 200


# The beginnings of what is no request, and of one whose headers are longer than may be.
NO_HTTP = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 50,
    b"hello there\r\n\r\n",
    b"GET\r\n\r\n",
    b"POST / HTTP/9.9\r\n\r\n",
    POST + b"Content-Length: -5\r\n\r\n",
    POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nhello",
    POST + b"bad header\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
]
TOO_LONG = [
    b"GET / HTTP/1.1\r\nX-Long: " + b"a" * 70_000,
    b"GET / HTTP/1.1\r\n" + b"X-Header: value\r\n" * 5000,
    b"GET /" + b"a" * 70_000,
    b"GET / HTTP/1.1\r\nX-Long: " + b"a" * 70_000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"X-Header: value\r\n" * 5000 + b"\r\n",
    b"POST /predictions/digits HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"X-Tr: value\r\n" * 9000,
]


@pytest.mark.parametrize(
    ("data", "status", "word"),
    [*((data, 400, "HTTP") for data in NO_HTTP), *((data, 431, "65536") for data in TOO_LONG)],
    ids=itertools.count(),
)
def test_what_is_no_request_is_answered_and_the_end_of_the_connection(
    server: Server, data: bytes, status: int, word: str
) -> None:
    with Wire(server.port) as wire:
        wire.send(data)
        reply = wire.reply()
        assert (reply.status, word in reply.error, wire.is_closed()) == (status, True, True), reply
        assert reply.json()["code"] == ("headers_too_large" if status == 431 else "invalid_request")


def test_each_file_of_a_form_is_answered_in_its_place(wire: MemoryWire) -> None:
    files = [digit("one"), b"no image", digit("three"), b"", jpeg()[:3000], digit("five")]
    parts = [('name="note"', b"a field that is not a file"), *((FILE, file) for file in files)]
    reply = wire.ask(DIGITS, form(*parts), FORM)
    assert reply.status == 200
    results = reply.json()["results"]
    assert [result["predictions"][0]["label"] if "predictions" in result else None for result in results] == [
        *("1", None, "3"),
        *(None, None, "5"),
    ]
    assert all(list(result) == ["error", "code"] for result in results if "predictions" not in result)
    none = wire.ask(DIGITS, form((FILE, b"no image"), (FILE, b"")), FORM)
    assert (none.status, len(none.json()["results"])) == (400, 2)
    assert "none of the 2 files" in none.json()["error"]


@pytest.mark.parametrize(
    ("body", "labels"),
    [
        # A file that looks like a boundary stays whole.
        (form((FILE, digit("four") + b"\r\n--frontie" * 9000), (FILE, digit("six"))), "46"),
        *(
            (form((name, digit("six"))), "6")
            for name in (
                *("filename*=idna''%ff", "filename*=punycode''%ff", "filename*=utf-99''x", "filename*='"),
                *("filename*0=a; filename*=b", "filename*0*=utf-8''%ff", "filename*1=b", 'filename=""'),
            )
        ),
        *(
            (preamble + form((FILE, digit("six")), (FILE, digit("two"))), "62")
            for preamble in (b"\r\n", b"This is a form.\r\n", b"one --frontier\r\n--fron\r\n\r\n")
        ),
    ],
    ids=itertools.count(),
)
def test_files_are_found_whatever_their_names_and_what_is_around_them(
    wire: MemoryWire, body: bytes, labels: str
) -> None:
    results = wire.ask(DIGITS, body, FORM).json()["results"]
    assert [result["predictions"][0]["label"] for result in results] == list(labels)


def test_a_malformed_form_is_told_to_its_client_and_not_to_the_log(
    wire: MemoryWire, caplog: pytest.LogCaptureFixture
) -> None:
    assert wire.ask(DIGITS, b"--frontier\r\nno header\r\n\r\n", FORM).status == 400
    assert not [line for line in caplog.records if not line.name.startswith("convoy")]


def test_an_image_is_an_image_whatever_its_content_type_says(wire: MemoryWire) -> None:
    for kind in ("application/x-www-form-urlencoded", "text/plain", "application/json", FORM["Content-Type"], "\xe9;="):
        assert wire.ask(DIGITS, digit("nine"), {"Content-Type": kind}).json()["predictions"][0]["label"] == "9"


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_an_image_in_json_is_answered_as_the_image_is(wire: MemoryWire) -> None:
    plain = wire.ask(f"{DIGITS}?top_k=3", digit("nine")).json()
    for document in ({"image": in_base64(digit("nine"))}, {"data": {"b64": in_base64(digit("nine"))}}):
        for kind in ("application/json", "application/x-www-form-urlencoded"):
            reply = wire.ask(f"{DIGITS}?top_k=3", json.dumps(document).encode(), {"Content-Type": kind})
            assert reply.json()["predictions"] == plain["predictions"]
            assert "server-timing" in reply.headers


def test_each_instance_is_answered_in_its_place(wire: MemoryWire) -> None:
    images = [digit("one"), b"no image", jpeg(1200, 900)]  # the last one is read by a decoder's thread
    instances = [{"b64": in_base64(image)} for image in images]
    reply = wire.ask(DIGITS, json.dumps({"instances": [*instances, "?"]}).encode())
    assert reply.status == 200
    results = reply.json()["results"]
    assert [next(iter(result)) for result in results] == ["predictions", "error", "predictions", "error"]
    assert results[0]["predictions"][0]["label"] == "1"
    assert "instances[3] is not base64" in results[3]["error"]
    none = wire.ask(DIGITS, b'{"instances": ["AAAA", ""]}')
    assert (none.status, len(none.json()["results"])) == (400, 2)
    one = wire.ask(DIGITS, json.dumps({"instances": instances[:1]}).encode())
    assert [result["predictions"][0]["label"] for result in one.json()["results"]] == ["1"]


def test_json_that_cannot_be_read_in_the_memory_there_is_is_a_413(filled_store: StoreFolder) -> None:
    server = MemoryServer(store=filled_store.root, max_body_mb=2, max_inflight_mb=4)
    with server.running():
        body = json.dumps({"image": in_base64(jpeg() + bytes(1_200_000))}).encode()
        refused(MemoryWire(server).ask(DIGITS, body), 413, "send the image itself")
        assert MemoryWire(server).ask(DIGITS, digit("one")).status == 200


def test_the_index_of_the_repository_takes_what_clients_send(wire: MemoryWire) -> None:
    names = {row["name"] for row in wire.ask("/v2/repository/index").json()}
    assert {"digits", "simple"} <= names
    assert wire.ask("/v2/repository/index", b'{"ready": true}').status == 200
    refused(wire.ask("/v2/repository/index", b"[1"), 400, "ready")
    refused(wire.ask("/v2/repository/index", b'{"ready": "yes"}'), 400, "'ready'")


def test_http_1_0_is_not_told_to_go_on(server: Server) -> None:
    image = digit("one")
    request = head(DIGITS, {"Content-Length": str(len(image)), "Expect": "100-continue"})
    with Wire(server.port) as wire:
        wire.send(request.replace(b"HTTP/1.1", b"HTTP/1.0") + image)
        assert wire.reply().json()["predictions"][0]["label"] == "1"


def test_expecting_clients_are_told_to_continue_or_not(server: Server) -> None:
    with Wire(server.port) as wire:
        image = digit("three")
        wire.send(head(DIGITS, {"Content-Length": str(len(image)), "Expect": "100-continue"}))
        assert wire.reply().status == 100
        wire.send(image)
        assert wire.reply().json()["predictions"][0]["label"] == "3"
    with Wire(server.port) as wire:
        wire.send(head("/predictions/nobody", {"Content-Length": "1000", "Expect": "100-continue"}))
        refused(wire.reply(), 404)
