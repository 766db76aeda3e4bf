"""Asks for every route, and every error and header of the suite that is not about tensors or images."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

from tests.e2e import test_bad_input as bad
from tests.oracle.book import Book, request
from tests.support.stores import digit
from tests.support.wire import chunk

DIGITS, SIMPLE = bad.DIGITS, bad.SIMPLE
_MODELS = ("digits", "simple", "nonzero", "nobody")
_GETS = ("", "/ready", "/config")
_CHANGING = ("PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "GET", "POST", "TRACE")
_HEADERS: tuple[dict[str, str], ...] = (
    {"X-Request-Id": "mine"},
    {"X-Request-Id": "not fit for a log"},
    {"X-Request-Id": "x" * 200},
    {"X-Request-Id": ""},
    {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
    {"Accept-Encoding": "gzip"},
    {"Accept-Encoding": "deflate"},
    {"Accept-Encoding": "gzip;q=0, deflate;q=0.5"},
    {"Accept-Encoding": "br, *"},
    {"Authorization": "Bearer nobody asked"},
    {"Expect": "more"},
    {"Range": "bytes=0-3"},
    {"Content-Type": "text/plain"},
    {"Accept": "text/html"},
    {"Origin": "http://elsewhere.example"},
)


def table(function: Any, position: int = 0) -> list[tuple[Any, ...]]:
    """The cases that a test of the suite is run with."""
    marks = [mark for mark in function.pytestmark if mark.name == "parametrize"]
    cases = [getattr(case, "values", case) for case in marks[position].args[1]]
    return [case if isinstance(case, tuple) else (case,) for case in cases]


def routes() -> Book:
    """What the server says of itself and of its models, and what is not there."""
    book = Book()
    for path in (
        "/",
        "/ping",
        "/v2",
        "/v2/",
        "/v2/health/live",
        "/v2/health/ready",
        "/openapi.json",
        "/docs",
        "/models",
        "/store",
    ):
        book.get(path)
    for model in _MODELS:
        for version in ("", "/versions/1", "/versions/7", "/versions/x"):
            for rest in _GETS:
                book.get(f"/v2/models/{model}{version}{rest}")
        for rest in ("", "/1", "/7", "/all"):
            book.get(f"/models/{model}{rest}")
    for query in ("limit=2", "limit=2&next_page_token=2", "limit=0", "limit=many", "next_page_token=-1", "limit="):
        book.get(f"/models?{query}")
    for path in (
        *("/v2/trace/setting", "/v2/models/simple/trace/setting", "/v2/models/simple/versions/1/trace/setting"),
        *("/v2/logging", "/v2/cudasharedmemory/status", "/v2/cudasharedmemory/region/r/status"),
        *("/v2/systemsharedmemory/status", "/v2/systemsharedmemory/region/r/status"),
    ):
        book.get(path)
        book.post_json(path, {})
    for path in (
        *("/v2/cudasharedmemory/region/r/register", "/v2/cudasharedmemory/region/r/unregister"),
        *("/v2/cudasharedmemory/unregister", "/v2/systemsharedmemory/unregister"),
        *("/v2/systemsharedmemory/region/r/unregister", "/v2/repository/x/index"),
        *("/v2/repository/x/models/simple/load", "/v2/repository/x/models/simple/unload"),
        *("/v2/repository/models/simple/load", "/v2/repository/models/simple/unload"),
    ):
        book.post_json(path, {})
        book.get(path)
    for body in (b"", b"{}", b'{"ready": true}', b'{"ready": "yes"}', b"[1", b"[]", b"\xff", b" " * (2 << 20)):
        book.post("/v2/repository/index", body)
    for path, _ in table(bad.test_what_is_not_there_is_a_404):
        book.post(path, b"x" * 1000)
        book.get(path)
    for method in _CHANGING:
        for path in (DIGITS, SIMPLE, "/v2", "/v2/health/ready", "/v2/repository/index", "/", "/nowhere"):
            book.ask(method, path, b"", "by any verb")
    return book


def headers() -> Book:
    """One good request of each kind, with every header that means something."""
    book = Book()
    for given in _HEADERS:
        ((name, value),) = given.items()
        what = f"with {name}: {value[:30]}"
        book.get("/v2", what, given)
        book.post("/v2/models/nobody/infer", b"{}", what, given)
        book.post(SIMPLE, bad.simple(), what, given)
        book.post(DIGITS, digit("seven"), what, given)
    large = bad.simple({"shape": [32, 16], "data": [7] * 512}).replace(b"[1, 16]", b"[32, 16]")
    for accepted in ("gzip", "deflate", "gzip;q=0.5, deflate", "identity", "*"):
        for path, body in (("/openapi.json", b""), (SIMPLE, large), ("/v2/models/digits/config", b"")):
            book.ask("POST" if body else "GET", path, body, f"accepting {accepted}", {"Accept-Encoding": accepted})
    return book


def framing() -> Book:
    """The same requests cut into packets and chunks, in a row, compressed; and what is no HTTP at all."""
    book = Book()
    good = (("digits", DIGITS, digit("seven")), ("simple", SIMPLE, bad.simple()))
    for what, path, body in good:
        whole = request("POST", path, body)
        head = len(whole) - len(body)
        book.raw(f"POST {path} on a fresh connection", whole, connection="fresh")
        for name, cuts in (("head and body", (head,)), ("three", (10, head - 2)), ("body", (head + 5, head + 20))):
            pieces = [whole[start:end] for start, end in zip((0, *cuts), (*cuts, len(whole)), strict=True)]
            book.raw(f"POST {path} {what} in packets, cut at {name}", *pieces, connection="fresh")
        for size in (1, 7, 1000):
            pieces = [chunk(body[start : start + size]) for start in range(0, len(body), size)]
            data = request("POST", path, b"".join(pieces) + chunk(b""), {"Transfer-Encoding": "chunked"})
            book.raw(f"POST {path} {what} in chunks of {size}", data)
        trailing = chunk(body) + b"0\r\nX-Trailer: value\r\n\r\n"
        book.raw(
            f"POST {path} {what} with a trailer", request("POST", path, trailing, {"Transfer-Encoding": "chunked"})
        )
        book.raw(f"POST {path} {what} three in a row", whole * 3, replies=3, connection="fresh")
        book.raw(
            f"POST {path} {what} and the end", request("POST", path, body, {"Connection": "close"}), connection="fresh"
        )
        expecting = {"Expect": "100-continue", "Content-Length": str(len(body))}
        book.raw(f"POST {path} {what} expecting", request("POST", path, b"", expecting), body, connection="fresh")
        old = whole.replace(b"HTTP/1.1", b"HTTP/1.0")
        book.raw(f"POST {path} {what} as HTTP/1.0", old, connection="fresh")
        for encoding, squeeze in bad.SQUEEZE.items():
            book.post(path, squeeze(body), f"{what} in {encoding}", {"Content-Encoding": encoding})
            for number, (spoil, _) in enumerate(table(bad.test_a_broken_compressed_body_is_a_400, 0)):
                book.post(path, spoil(squeeze(body)), f"{what} in {encoding} {number}", {"Content-Encoding": encoding})
            bomb = squeeze(bytes(20 << 20))
            book.post(path, bomb, f"{what} a bomb in {encoding}", {"Content-Encoding": encoding})
        for (encoding,) in table(bad.test_an_unknown_compression_is_a_501_that_names_the_known_ones):
            book.post(path, body, f"{what} in {encoding}", {"Content-Encoding": encoding})
    mixed = [
        request("POST", DIGITS, digit("one")),
        request("POST", "/predictions/nobody"),
        request("POST", SIMPLE, bad.simple()),
        request("GET", "/v2/health/live"),
        request("POST", SIMPLE, b"{"),
        request("HEAD", "/v2"),
        request("POST", DIGITS, b"no image"),
    ]
    book.raw("POST /predictions/ among others in a row", b"".join(mixed[:5]), replies=5, connection="fresh")
    book.raw(
        "POST /predictions/ among others in a row and packets",
        mixed[0] + mixed[1][:20],
        mixed[1][20:] + mixed[6],
        replies=3,
        connection="fresh",
    )
    for number, (garbage,) in enumerate(table(bad.test_what_is_not_http_is_a_400_and_the_end_of_the_connection)):
        book.broken(f"no HTTP {number}", garbage)
    for number, (beginning,) in enumerate(table(bad.test_headers_that_are_too_long_are_a_431)):
        book.broken(f"too long {number}", beginning)
    large = {"Content-Length": str(100 << 20)}
    book.broken("POST too large, before it is sent", request("POST", DIGITS, b"", large))
    book.broken(
        "POST too large, in chunks", request("POST", DIGITS, chunk(b"x" * (5 << 20)), {"Transfer-Encoding": "chunked"})
    )
    return book


def tables_of_errors() -> Book:
    """Every wrong body, tensor, query and form that the suite has a table of."""
    book = Book()
    for first, _ in table(bad.test_a_wrong_tensor_is_a_400_that_names_it):
        book.post(SIMPLE, bad.simple(first), f"with {json.dumps(first)[:60]}")
    for more, _ in table(bad.test_a_wrong_field_is_a_400_that_names_it):
        book.post(SIMPLE, bad.simple(**more), f"with {json.dumps(more)[:60]}")
    for body, _ in table(bad.test_json_that_cannot_be_read_is_a_400):
        book.post(SIMPLE, body, "no JSON")
    for size, tail, _ in table(bad.test_binary_data_of_the_wrong_size_is_a_400):
        body, given = bad.binary(size, tail)
        book.post(SIMPLE, body, f"binary size {size!r} of {len(tail)}", given)
    for (length,) in table(bad.test_a_wrong_header_length_is_a_400):
        body, _ = bad.binary(64, b"\0" * 64)
        given = {"Inference-Header-Content-Length": length.encode().decode("latin-1")}
        book.post(SIMPLE, body, f"header length {length!r}", given)
    for query, _ in table(bad.test_a_query_out_of_range_is_a_400):
        book.post(f"{DIGITS}?{query}", digit("seven"))
        book.post(f"{SIMPLE}?{query}", bad.simple())
    for query in ("top_k=1", "top_k=1000", "top_k=2&top_k=3", "timeout_ms=0.001", "timeout_ms=60000", "other=1"):
        book.post(f"{DIGITS}?{query}", digit("seven"))
        book.post(f"{SIMPLE}?{query}", bad.simple())
    for given, body, _ in table(bad.test_a_form_without_a_sound_file_is_a_400):
        book.post(DIGITS, body, "a form", given)
    for (data,) in table(bad.test_a_bool_tensor_takes_only_booleans):
        one = {"name": "x", "shape": [1, len(data)], "datatype": "BOOL", "data": data}
        book.post_json("/v2/models/identity_bool/infer", {"inputs": [one]}, f"with {data}")
    batch = {"shape": [33, 16], "data": [0] * 33 * 16}
    book.post_json(SIMPLE, {"inputs": [bad.tensor("INPUT0", **batch), bad.tensor("INPUT1", **batch)]}, "33 rows")
    book.post(SIMPLE, bad.simple({"shape": [2, 16], "data": [0] * 32}), "of different batches")
    book.post_json(SIMPLE, {"inputs": [bad.tensor("INPUT0")]}, "an input missing")
    for field in ("name", "datatype", "shape", "data", "parameters", "id"):
        nested = bad.simple({field: "@"}) if field != "id" else bad.simple(id="@")
        book.post(SIMPLE, nested.replace(b'"@"', b"[" * 900 + b"]" * 900), f"nested {field}")
    book.post("/predictions/simple", digit("seven"), "no images here")
    for form in ("FP32", "UINT8"):
        other = {"name": "images", "shape": [1, 3, 32, 32], "datatype": form, "data": [0] * 3072}
        book.post_json("/v2/models/digits/infer", {"inputs": [other]}, f"other form {form}")
    book.post_json("/v2/models/picky/infer", {"inputs": [_row([1.0, 2.0, 3.0])]}, "the model itself fails")
    book.post_json("/v2/models/picky/infer", {"inputs": [_row([1.0, 2.0, 3.0, 4.0])]}, "it does not")
    raw = {"Inference-Header-Content-Length": "0"}
    book.post(SIMPLE, bytes(128), "raw for two inputs", raw)
    return book


def squeezed(data: bytes, encoding: str) -> bytes:
    return gzip.compress(data, mtime=0) if encoding == "gzip" else zlib.compress(data)


def _row(values: list[float]) -> dict[str, Any]:
    return {"name": "x", "shape": [1, len(values)], "datatype": "FP32", "data": values}
