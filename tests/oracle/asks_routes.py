"""Requests to every route, and every wrong request of the suite that is not about images or single dtypes."""

from __future__ import annotations

from typing import Any

from tests.e2e import test_bad_input as bad
from tests.oracle.session import Session, request
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
_CHUNKED = {"Transfer-Encoding": "chunked"}


def table(function: Any) -> list[tuple[Any, ...]]:
    """The cases that a test of the suite is run with."""
    marks = [mark for mark in function.pytestmark if mark.name == "parametrize"]
    cases = [getattr(case, "values", case) for case in marks[0].args[1]]
    return [case if isinstance(case, tuple) else (case,) for case in cases]


def routes(session: Session) -> None:
    """What the server says of itself and of its models, and what is not there."""
    for path in (
        *("/", "/ping", "/v2", "/v2/", "/v2/health/live", "/v2/health/ready", "/openapi.json", "/docs", "/store"),
        *("/models", "/models?limit=2", "/models?limit=2&next_page_token=2", "/models?limit=0", "/models?limit=many"),
        *("/models?next_page_token=-1", "/models?limit="),
    ):
        session.get(path)
    for model in ("digits", "simple", "nobody"):
        for version in ("", "/versions/1", "/versions/7", "/versions/x"):
            for rest in ("", "/ready", "/config"):
                session.get(f"/v2/models/{model}{version}{rest}")
        for rest in ("", "/1", "/7", "/all"):
            session.get(f"/models/{model}{rest}")
    for path in (
        *("/v2/trace/setting", "/v2/models/simple/trace/setting", "/v2/models/simple/versions/1/trace/setting"),
        *("/v2/logging", "/v2/cudasharedmemory/status", "/v2/cudasharedmemory/region/r/status"),
        *("/v2/systemsharedmemory/status", "/v2/systemsharedmemory/region/r/status"),
        *("/v2/cudasharedmemory/region/r/register", "/v2/cudasharedmemory/region/r/unregister"),
        *("/v2/cudasharedmemory/unregister", "/v2/systemsharedmemory/unregister"),
        *("/v2/systemsharedmemory/region/r/unregister", "/v2/repository/x/index"),
        *("/v2/repository/x/models/simple/load", "/v2/repository/x/models/simple/unload"),
        *("/v2/repository/models/simple/load", "/v2/repository/models/simple/unload"),
    ):
        session.post(path, {})
        session.get(path)
    for body in (b"", b"{}", b'{"ready": true}', b'{"ready": "yes"}', b"[1", b"[]", b"\xff", b" " * (2 << 20)):
        session.post("/v2/repository/index", body)
    for path, _ in table(bad.test_what_is_not_there_is_a_404):
        session.post(path, b"x" * 1000)
        session.get(path)
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "GET", "POST", "TRACE"):
        for path in (DIGITS, SIMPLE, "/v2", "/v2/health/ready", "/v2/repository/index", "/", "/nowhere"):
            session.ask(method, path, b"", "by any verb")


def headers(session: Session) -> None:
    """One good request of each kind, with every header that means something."""
    for name, value in _HEADERS:
        what, given = f"with {name}: {value[:30]}", {name: value}
        session.get("/v2", what, given)
        session.post("/v2/models/nobody/infer", b"{}", what, given)
        session.post(SIMPLE, bad.simple(), what, given)
        session.post(DIGITS, digit("seven"), what, given)
    large = bad.simple({"shape": [32, 16], "data": [7] * 512}).replace(b"[1, 16]", b"[32, 16]")
    for accepted in ("gzip", "deflate", "identity"):
        session.get("/openapi.json", f"accepting {accepted}", {"Accept-Encoding": accepted})
        session.post(SIMPLE, large, f"accepting {accepted}", {"Accept-Encoding": accepted})


def framing(session: Session) -> None:
    """The same requests cut into packets and chunks, in a row, compressed; and what is no HTTP at all."""
    for path, body in ((DIGITS, digit("seven")), (SIMPLE, bad.simple())):
        name, whole = f"POST {path}", request("POST", path, body)
        head = len(whole) - len(body)
        session.fresh(f"{name} on a fresh connection", whole)
        session.fresh(f"{name} in packets, cut in its head", whole[:10], whole[10 : head - 2], whole[head - 2 :])
        session.fresh(f"{name} in packets, cut in its body", whole[: head + 5], whole[head + 5 :])
        for size in (1, 1000):
            chunks = b"".join(chunk(body[start : start + size]) for start in range(0, len(body), size))
            session.raw(f"{name} in chunks of {size}", request("POST", path, chunks + chunk(b""), _CHUNKED))
        trailing = chunk(body) + b"0\r\nX-Trailer: value\r\n\r\n"
        session.raw(f"{name} with a trailer", request("POST", path, trailing, _CHUNKED))
        session.fresh(f"{name} three in a row", whole * 3, replies=3)
        session.fresh(f"{name} and the end", request("POST", path, body, {"Connection": "close"}))
        expecting = {"Expect": "100-continue", "Content-Length": str(len(body))}
        session.fresh(f"{name} expecting", request("POST", path, b"", expecting), body)
        session.fresh(f"{name} as HTTP/1.0", whole.replace(b"HTTP/1.1", b"HTTP/1.0"))
        for encoding, squeeze in bad.SQUEEZE.items():
            given = {"Content-Encoding": encoding}
            session.post(path, squeeze(body), f"in {encoding}", given)
            for spoil, _ in bad.SPOILS:
                session.post(path, spoil(squeeze(body)), f"broken in {encoding}", given)
            session.post(path, squeeze(bytes(20 << 20)), f"a bomb in {encoding}", given)
        for (encoding,) in table(bad.test_an_unknown_compression_is_a_501_that_names_the_known_ones):
            session.post(path, body, f"in {encoding}", {"Content-Encoding": encoding})
    nobody = request("POST", "/predictions/nobody")
    good = request("POST", DIGITS, digit("one"))
    others = (
        good + nobody + request("POST", SIMPLE, bad.simple()) + request("GET", "/v2") + request("POST", SIMPLE, b"{")
    )
    session.fresh("POST /predictions/ among others in a row", others, replies=5)
    session.fresh("POST /predictions/ in a row and packets", good + nobody[:20], nobody[20:] + good, replies=3)
    for garbage in bad.NO_HTTP:
        session.broken("no HTTP", garbage)
    for beginning in bad.TOO_LONG:
        session.broken("too long", beginning)
    session.broken("too large, before it is sent", request("POST", DIGITS, b"", {"Content-Length": str(100 << 20)}))
    session.broken("too large, in chunks", request("POST", DIGITS, chunk(b"x" * (5 << 20)), _CHUNKED))


def errors(session: Session) -> None:
    """Every wrong body, tensor, query and form that the suite has a table of."""
    for path, body, given, words in bad.WRONG:
        session.post(path, body, f"without {words}", given)
    rest = ("top_k=1", "top_k=1000", "top_k=2&top_k=3", "timeout_ms=0.001", "timeout_ms=60000", "other=1")
    for query in (*(query for query, _ in table(bad.test_a_query_out_of_range_is_a_400)), *rest):
        session.post(f"{DIGITS}?{query}", digit("seven"))
        session.post(f"{SIMPLE}?{query}", bad.simple())
    session.post("/predictions/simple", digit("seven"), "no images here")
    session.post("/v2/models/picky/infer", row([1.0, 2.0, 3.0]), "the model itself fails")
    session.post("/v2/models/picky/infer", row([1.0, 2.0, 3.0, 4.0]), "it does not")
    session.post(SIMPLE, bytes(128), "raw for two inputs", {"Inference-Header-Content-Length": "0"})


def row(values: list[Any], dtype: str = "FP32") -> dict[str, Any]:
    """A request of one row for a model with an input x."""
    return {"inputs": [{"name": "x", "shape": [1, len(values)], "datatype": dtype, "data": values}]}
