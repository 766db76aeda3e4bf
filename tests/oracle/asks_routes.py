"""Requests to every route, and every wrong request of the suite that is not about images or single dtypes."""

from __future__ import annotations

from typing import Any

from tests.e2e import test_bad_input as bad
from tests.oracle.session import Ask, ask, broken, fresh, get, post, raw, request
from tests.support.stores import digit
from tests.support.wire import chunk

DIGITS, SIMPLE = bad.DIGITS, bad.SIMPLE
_HEADERS = (
    *(("X-Request-Id", "mine"), ("X-Request-Id", "not fit for a log"), ("X-Request-Id", "x" * 200)),
    ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    *(("Accept-Encoding", "gzip"), ("Accept-Encoding", "deflate"), ("Accept-Encoding", "br, *")),
    ("Accept-Encoding", "gzip;q=0, deflate;q=0.5"),
    *(("Authorization", "Bearer nobody asked"), ("Expect", "more"), ("Range", "bytes=0-3")),
    *(("Content-Type", "text/plain"), ("Accept", "text/html"), ("Origin", "http://elsewhere.example")),
)
_PAGES = (
    *("/", "/ping", "/v2", "/v2/", "/v2/health/live", "/v2/health/ready", "/openapi.json", "/docs", "/store"),
    *("/models", "/models?limit=2", "/models?limit=2&next_page_token=2", "/models?limit=0", "/models?limit=many"),
    *("/models?next_page_token=-1", "/models?limit="),
)
_EXTENSIONS = (
    *("/v2/trace/setting", "/v2/models/simple/trace/setting", "/v2/models/simple/versions/1/trace/setting"),
    *("/v2/logging", "/v2/cudasharedmemory/status", "/v2/cudasharedmemory/region/r/status"),
    *("/v2/systemsharedmemory/status", "/v2/systemsharedmemory/region/r/status"),
    *("/v2/cudasharedmemory/region/r/register", "/v2/cudasharedmemory/region/r/unregister"),
    *("/v2/cudasharedmemory/unregister", "/v2/systemsharedmemory/unregister"),
    *("/v2/systemsharedmemory/region/r/unregister", "/v2/repository/x/index"),
    *("/v2/repository/x/models/simple/load", "/v2/repository/x/models/simple/unload"),
    *("/v2/repository/models/simple/load", "/v2/repository/models/simple/unload"),
)
_INDEX_BODIES = (b"", b"{}", b'{"ready": true}', b'{"ready": "yes"}', b"[1", b"[]", b"\xff", b" " * (2 << 20))
_METHODS = ("PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "GET", "POST", "TRACE")
_CHUNKED = {"Transfer-Encoding": "chunked"}
_HEADER_LENGTH = "Inference-Header-Content-Length"


def table(function: Any) -> list[tuple[Any, ...]]:
    """The cases that a test of the suite is run with."""
    marks = [mark for mark in function.pytestmark if mark.name == "parametrize"]
    cases = [getattr(case, "values", case) for case in marks[0].args[1]]
    return [case if isinstance(case, tuple) else (case,) for case in cases]


def row(values: list[Any], dtype: str = "FP32") -> dict[str, Any]:
    """A request of one row for a model with an input x."""
    return {"inputs": [{"name": "x", "shape": [1, len(values)], "datatype": dtype, "data": values}]}


def routes() -> list[Ask]:
    """What the server says of itself and of its models, and what is not there."""
    return [
        *(get(path) for path in _PAGES),
        *(
            get(path)
            for model in ("digits", "simple", "nobody")
            for path in (
                *(
                    f"/v2/models/{model}{version}{rest}"
                    for version in ("", "/versions/1", "/versions/7", "/versions/x")
                    for rest in ("", "/ready", "/config")
                ),
                *(f"/models/{model}{rest}" for rest in ("", "/1", "/7", "/all")),
            )
        ),
        *(one for path in _EXTENSIONS for one in (post(path, {}), get(path))),
        *(post("/v2/repository/index", body) for body in _INDEX_BODIES),
        *(
            one
            for path, _ in table(bad.test_what_is_not_there_is_a_404)
            for one in (post(path, b"x" * 1000), get(path))
        ),
        *(
            ask(method, path, b"", "by any verb")
            for method in _METHODS
            for path in (DIGITS, SIMPLE, "/v2", "/v2/health/ready", "/v2/repository/index", "/", "/nowhere")
        ),
    ]


def headers() -> list[Ask]:
    """One good request of each kind, with every header that means something."""
    kinds = (("/v2/models/nobody/infer", b"{}"), (SIMPLE, bad.simple()), (DIGITS, digit("seven")))
    large = bad.simple({"shape": [32, 16], "data": [7] * 512}).replace(b"[1, 16]", b"[32, 16]")
    asks = []
    for name, value in _HEADERS:
        what, given = f"with {name}: {value[:30]}", {name: value}
        asks += [get("/v2", what, given), *(post(path, body, what, given) for path, body in kinds)]
    for accepted in ("gzip", "deflate", "identity"):
        what, given = f"accepting {accepted}", {"Accept-Encoding": accepted}
        asks += [get("/openapi.json", what, given), post(SIMPLE, large, what, given)]
    return asks


def framing() -> list[Ask]:
    """The same requests cut into packets and chunks, in a row, compressed; and what is no HTTP at all."""
    nobody, good = request("POST", "/predictions/nobody"), request("POST", DIGITS, digit("one"))
    others = (request("POST", SIMPLE, bad.simple()), request("GET", "/v2"), request("POST", SIMPLE, b"{"))
    too_large = request("POST", DIGITS, b"", {"Content-Length": str(100 << 20)})
    return [
        *_framed(DIGITS, digit("seven")),
        *_framed(SIMPLE, bad.simple()),
        fresh("POST /predictions/ among others in a row", b"".join((good, nobody, *others)), replies=5),
        fresh("POST /predictions/ in a row and packets", good + nobody[:20], nobody[20:] + good, replies=3),
        *(broken("no HTTP", garbage) for garbage in bad.NO_HTTP),
        *(broken("too long", beginning) for beginning in bad.TOO_LONG),
        broken("too large, before it is sent", too_large),
        # By one byte: the error says how much had come, which is as the system cut it where more is sent.
        broken("too large, in chunks", request("POST", DIGITS, chunk(b"x" * ((4 << 20) + 1)), _CHUNKED)),
    ]


def _framed(path: str, body: bytes) -> list[Ask]:
    """One good request in every frame."""
    name, whole = f"POST {path}", request("POST", path, body)
    head = len(whole) - len(body)
    trailing = chunk(body) + b"0\r\nX-Trailer: value\r\n\r\n"
    expecting = {"Expect": "100-continue", "Content-Length": str(len(body))}
    asks = [
        fresh(f"{name} on a fresh connection", whole),
        fresh(f"{name} in packets, cut in its head", whole[:10], whole[10 : head - 2], whole[head - 2 :]),
        fresh(f"{name} in packets, cut in its body", whole[: head + 5], whole[head + 5 :]),
        *(raw(f"{name} in chunks of {size}", in_chunks(path, body, size)) for size in (1, 1000)),
        raw(f"{name} with a trailer", request("POST", path, trailing, _CHUNKED)),
        fresh(f"{name} three in a row", whole * 3, replies=3),
        fresh(f"{name} and the end", request("POST", path, body, {"Connection": "close"})),
        fresh(f"{name} expecting", request("POST", path, b"", expecting), body),
        fresh(f"{name} as HTTP/1.0", whole.replace(b"HTTP/1.1", b"HTTP/1.0")),
    ]
    for encoding, squeeze in bad.SQUEEZE.items():
        given, squeezed = {"Content-Encoding": encoding}, squeeze(body)
        spoilers = [spoil for spoil, _ in bad.SPOILS]
        asks += [
            post(path, squeezed, f"in {encoding}", given),
            *(post(path, spoil(squeezed), f"broken in {encoding}", given) for spoil in spoilers),
            post(path, squeeze(bytes(20 << 20)), f"a bomb in {encoding}", given),
        ]
    unknown = table(bad.test_an_unknown_compression_is_a_501_that_names_the_known_ones)
    return asks + [post(path, body, f"in {encoding}", {"Content-Encoding": encoding}) for (encoding,) in unknown]


def in_chunks(path: str, body: bytes, size: int) -> bytes:
    """A request whose body travels in chunks of this size."""
    pieces = [chunk(body[start : start + size]) for start in range(0, len(body), size)]
    return request("POST", path, b"".join(pieces) + chunk(b""), _CHUNKED)


def errors() -> list[Ask]:
    """Every wrong body, tensor, query and form that the suite has a table of."""
    queries = (
        *(query for query, _ in table(bad.test_a_query_out_of_range_is_a_400)),
        *("top_k=1", "top_k=1000", "top_k=2&top_k=3", "timeout_ms=0.001", "timeout_ms=60000", "other=1"),
    )
    return [
        *(post(path, body, f"without {words}", given) for path, body, given, words in bad.WRONG),
        *(
            post(f"{path}?{query}", body)
            for query in queries
            for path, body in ((DIGITS, digit("seven")), (SIMPLE, bad.simple()))
        ),
        post("/predictions/simple", digit("seven"), "no images here"),
        post("/v2/models/picky/infer", row([1.0, 2.0, 3.0]), "the model itself fails"),
        post("/v2/models/picky/infer", row([1.0, 2.0, 3.0, 4.0]), "it does not"),
        post(SIMPLE, bytes(128), "raw for two inputs", {_HEADER_LENGTH: "0"}),
    ]
