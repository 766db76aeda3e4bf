"""Requests that are almost right: good ones with something wrong in their JSON, bytes, headers or framing.

Every shot is made from its seed and number alone, so that one that did harm can be fired again."""

from __future__ import annotations

import gzip
import json
import random
import socket
import zlib
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from convoy.models.spec import NUMPY_DTYPES
from tests.support.stores import digit
from tests.support.wire import Wire, WireReply, chunk, head
from tests.support.wire_forms import extremes

_JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 1.5, 1e308, -0.0, float("nan"), float("inf"), 1 << 31, 1 << 53),
    *(1 << 63, 1 << 64, -(1 << 63), 10**40, "", "x", "y", "FP32", "BYTES", "BF16", "\ud800", "\0", "é😀" * 50),
    *([], {}, [[]], [{}], {"x": []}, [1, "a"], [None], {"": ""}, "x" * 70_000, list(range(500))),
)

# Headers that mean something to the server or its framework, and values that nobody should send.
_HEADERS = {
    "Content-Length": ["-1", "abc", "99999999999999999999", "0", "1", "+5", "5, 6", "0x10", "", "1e3", "4294967296"],
    "Inference-Header-Content-Length": ["0", "1", "-1", "x", "999999", "18446744073709551616", "", "1.5", "٣"],
    "Content-Encoding": ["gzip", "deflate", "br", "identity", "", "gzip, deflate", "\xff", "GZIP "],
    "Accept-Encoding": ["gzip", "deflate;q=0.1, gzip;q=0", "*;q=1", ";;;", "gzip;q=" + "9" * 400, "," * 500],
    "Content-Type": ["application/json", "multipart/form-data", "multipart/form-data; boundary=x", "\xff/\xfe", ""],
    "Transfer-Encoding": ["chunked", "gzip, chunked", "identity", "chunked, chunked"],
    "X-Request-Id": ["", "a b", "x" * 5000, "\xff", "id"],
    "Authorization": ["Bearer", "Basic eA==", "\xff" * 100],
    "Expect": ["100-continue", "more"],
    "Connection": ["close", "upgrade", "keep-alive, close"],
    "Upgrade": ["websocket", "h2c"],
    "Host": ["", "a" * 3000, "[::1"],
    "traceparent": ["00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 300],
    "Range": ["bytes=0-1", "bytes=-1,-2"],
}


def spoil_value(document: Any, chance: random.Random) -> None:
    """Replace, remove, repeat or add one value somewhere in the document."""
    holder: Any = document
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not keys:
            break
        key = chance.choice(keys)
        inner = holder[key]
        if isinstance(inner, dict | list) and inner and chance.random() < 0.7:
            holder = inner
            continue
        action = chance.randrange(6)
        if action == 0:
            del holder[key]
        elif action == 1 and isinstance(holder, list):
            holder.append(deepcopy(inner))
        elif action == 2 and isinstance(holder, dict):
            holder[chance.choice(("data", "parameters", "shape", "name", "triton_x", "", "binary_data_size"))] = (
                deepcopy(inner)
            )
        elif action == 3 and type(inner) is int:
            holder[key] = inner + chance.choice((-1, 1, 1 << 32, -(1 << 31)))
        else:
            holder[key] = deepcopy(chance.choice(_JUNK))
        return


def spoil_bytes(data: bytes, chance: random.Random) -> bytes:
    """A few bits flipped, and pieces removed, inserted and repeated."""
    spoiled = bytearray(data)
    for _ in range(chance.choice((1, 1, 3, 20))):
        at, action = chance.randrange(len(spoiled) + 1), chance.randrange(4)
        if action == 0 and at < len(spoiled):
            spoiled[at] ^= 1 << chance.randrange(8)
        elif action == 1:
            del spoiled[at : at + chance.choice((1, 4, 100, 5000))]
        elif action == 2:
            spoiled[at:at] = chance.randbytes(chance.choice((1, 4, 100)))
        else:
            spoiled[at:at] = spoiled[: chance.choice((1, 64, 1000))]
    return bytes(spoiled)


_PATHS = (
    *("/", "//", "/v2", "/v2/", "/v2/models", "/v2/models//infer", "/v2/models/%00/infer", "/v2/models/%FF%FE/infer"),
    *("/v2/models/digits/versions/1/infer", "/v2/models/digits/versions/x/infer", "/v2/models/../../etc/passwd"),
    *("/v2/models/digits/versions/99999999999999999999/infer", "/predictions/digits/1", "/predictions/%2e%2e"),
    *("/v2/models/digits/config", "/v2/models/digits/stats", "/v2/models/stats", "/v2/repository/index", "/models"),
    *("/models/digits", "/v2/systemsharedmemory/status", "/v2/systemsharedmemory/unregister", "/metrics", "/stats"),
    *("/v2/cudasharedmemory/unregister", "/v2/logging", "/v2/trace/setting", "/openapi.json", "/docs", "/%"),
    *("/v2/repository/x/index", "/v2/health/ready", "/" + "a" * 5000, "/v2/models/" + "%41" * 900, "/ping?x=%zz"),
)
_QUERIES = (
    "timeout_ms=",
    "timeout_ms=0.001",
    "timeout_ms=1e9",
    "top_k=0",
    "top_k=99999999999",
    "top_k=2&top_k=x",
    "%&&==",
)
_MODELS = tuple(f"identity_{dtype.lower()}" for dtype in NUMPY_DTYPES)
_BOMB_BYTES = 20 << 20
_ANSWER_S = 20.0
# 403: a Host that is not this machine; 501: what is not offered; 504: a deadline that was drawn short.
_DOCUMENTED = {200, 400, 403, 404, 405, 408, 413, 415, 429, 431, 501, 504}


@dataclass(frozen=True, slots=True)
class Shot:
    """Bytes to send. `is_whole`: one request that deserves one answer, after which the connection goes on.

    Otherwise the framing itself may be broken: the sender then says that nothing more will come, and what
    comes back, if anything, is an answer and the end of the connection.
    """

    data: bytes
    is_whole: bool
    what: str


@dataclass
class _Request:
    """A request while it is being spoiled."""

    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    method: str = "POST"
    is_chunked: bool = False


class Fuzzer:
    """Shots from a seed. `region` is a shared memory region that the server knows."""

    def __init__(self, seed: int, region: str) -> None:
        self._seed, self._region = seed, region
        self._digit = digit("seven")
        self._samples = {model: extremes(model.partition("_")[2].upper(), text=True) for model in _MODELS}
        zeros = bytes(_BOMB_BYTES)
        self._bombs = {"gzip": gzip.compress(zeros, mtime=0), "deflate": zlib.compress(zeros)}

    def shot(self, number: int) -> Shot:
        chance = random.Random(self._seed * 1_000_003 + number)
        spoil = chance.choices(_SPOILERS, _WEIGHTS)[0]
        return spoil(self, chance)

    def document(self, chance: random.Random) -> tuple[str, dict[str, Any], bytes]:
        """A model, a good request for it, and the bytes behind the JSON."""
        model = chance.choice(_MODELS)
        sample = self._samples[model]
        tensor: dict[str, Any] = {"name": "x", "shape": list(sample.shape), "datatype": sample.dtype}
        tail, form = b"", chance.choice(("json", "binary", "binary", "shared"))
        if form == "json" and sample.dtype not in ("FP16", "BF16"):
            tensor["data"] = sample.values
        elif form == "shared":
            place = {"shared_memory_region": self._region, "shared_memory_byte_size": len(sample.data)}
            tensor["parameters"] = place | (
                {"shared_memory_offset": chance.randrange(40)} if chance.random() < 0.3 else {}
            )
        else:
            tensor["parameters"], tail = {"binary_data_size": len(sample.data)}, sample.data
        wanted = chance.choice(
            (
                {"binary_data": True},
                {"binary_data": chance.random() < 0.5},
                {"classification": chance.randrange(5)},
                {"shared_memory_region": self._region, "shared_memory_byte_size": 1 << chance.randrange(13)},
            )
        )
        document: dict[str, Any] = {"inputs": [tensor], "outputs": [{"name": "y", "parameters": wanted}]}
        if chance.random() < 0.3:
            document |= {"id": "id", "parameters": {"priority": 1, "timeout": 10**7, "mine": "text"}}
        return model, document, tail

    def good(self, chance: random.Random) -> _Request:
        if chance.random() < 0.25:
            return _Request("/predictions/digits", self._digit)
        return self.written(*self.document(chance))

    def written(self, model: str, document: Any, tail: bytes) -> _Request:
        text = _dumps(document)
        headers = {"Inference-Header-Content-Length": str(len(text))} if tail else {}
        return _Request(f"/v2/models/{model}/infer", text + tail, headers)

    def wrong_json(self, chance: random.Random) -> Shot:
        model, document, tail = self.document(chance)
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            spoil_value(document, chance)
        return _shot(self.written(model, document, tail), "JSON")

    def nested(self, chance: random.Random) -> Shot:
        model, document, _ = self.document(chance)
        depth = chance.choice((10, 99, 101, 1000, 30_000))
        opening, closing = chance.choice((("[", "]"), ('{"a":', "}"), ("[[", "]]"), ('[{"data":', "}]")))
        text = _dumps({**document, "id": "@"}).decode("latin-1")
        deep = opening * depth + chance.choice(("1", "", '"x"')) + closing * chance.choice((depth, depth - 1, 0))
        return _shot(_Request(f"/v2/models/{model}/infer", text.replace('"@"', deep).encode("latin-1")), "nesting")

    def wrong_bytes(self, chance: random.Random) -> Shot:
        request = self.good(chance)
        request.body = spoil_bytes(request.body, chance)
        return _shot(request, "bytes")

    def wrong_header(self, chance: random.Random) -> Shot:
        request = self.good(chance)
        for _ in range(chance.choice((1, 1, 2, 5))):
            name = chance.choice(tuple(_HEADERS))
            request.headers[name] = chance.choice(_HEADERS[name])
        framing = {"Content-Length", "Transfer-Encoding", "Expect", "Connection", "Upgrade"} & set(request.headers)
        return _shot(request, "framing headers" if framing else "headers", is_whole=not framing)

    def wrong_path(self, chance: random.Random) -> Shot:
        request = self.good(chance)
        request.path = chance.choice(_PATHS) if chance.random() < 0.7 else f"{request.path}?{chance.choice(_QUERIES)}"
        request.method = chance.choice(("POST", "POST", "GET", "PUT", "DELETE", "PATCH", "OPTIONS"))
        return _shot(request, "path")

    def compressed(self, chance: random.Random) -> Shot:
        request, encoding = self.good(chance), chance.choice(("gzip", "deflate"))
        request.body = gzip.compress(request.body, mtime=0) if encoding == "gzip" else zlib.compress(request.body)
        if chance.random() < 0.02:
            request.body = self._bombs[encoding]
        elif chance.random() < 0.7:
            request.body = spoil_bytes(request.body, chance)
        request.headers["Content-Encoding"] = encoding
        request.headers["Accept-Encoding"] = chance.choice(("gzip", "deflate"))
        return _shot(request, "compression")

    def chunked(self, chance: random.Random) -> Shot:
        request = self.good(chance)
        request.is_chunked = True
        if chance.random() < 0.5:
            return _shot(request, "chunks")
        data = bytearray(_bytes_of(request, chance))
        first = data.find(b"\r\n\r\n") + 4
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(first, len(data))
            data[at : at + chance.randrange(3)] = chance.choice(
                (b"\r\n", b"zz", b"-1\r\n", b"\0", b"ffffffffffffffff\r\n", b";")
            )
        return Shot(bytes(data), is_whole=False, what="chunk garbage")

    def cut(self, chance: random.Random) -> Shot:
        data = _bytes_of(self.good(chance), chance)
        return Shot(data[: chance.randrange(1, len(data))], is_whole=False, what="cut off")

    def noise(self, chance: random.Random) -> Shot:
        data = spoil_bytes(_bytes_of(self.good(chance), chance)[:400], chance)
        return Shot(chance.choice((data, chance.randbytes(chance.randrange(1, 300)))), is_whole=False, what="noise")

    def control(self, chance: random.Random) -> Shot:
        path = chance.choice(
            (
                "/v2/systemsharedmemory/region/fuzz/register",
                "/v2/systemsharedmemory/region/fuzz/unregister",
                "/v2/repository/index",
                "/v2/cudasharedmemory/region/fuzz/register",
            )
        )
        document: Any = {"key": f"/{self._region}", "offset": 0, "byte_size": 64, "ready": True}
        spoil_value(document, chance)
        return _shot(_Request(path, _dumps(document)), "control")


class Range:
    """Fires shots over one connection as long as it holds, and judges what comes back."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._wire: Wire | None = None
        self.statuses: Counter[int | None] = Counter()

    def fire(self, shot: Shot) -> None:
        if shot.is_whole:
            self._judge(self._asked(shot.data), shot)
        else:
            self._fire_broken(shot)

    def fire_good(self) -> None:
        """A good request must be answered rightly on the very connection that has seen the bad ones."""
        wire = self._connection()
        reply = wire.ask("/predictions/digits", digit("seven"))
        assert reply.status == 200, reply
        assert reply.json()["predictions"][0]["label"] == "7"

    def close(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    def _asked(self, data: bytes) -> WireReply:
        wire = self._connection()
        wire.send(data)
        reply = wire.reply()
        if reply.headers.get("connection") == "close":
            self.close()
        return reply

    def _fire_broken(self, shot: Shot) -> None:
        with Wire(self._port, timeout_s=_ANSWER_S) as wire:
            try:
                wire.send(shot.data)
                wire.socket.shutdown(socket.SHUT_WR)
                reply = wire.reply()
                if reply.status == 100:
                    reply = wire.reply()
            except TimeoutError as error:
                raise AssertionError("the server neither answered nor closed the connection") from error
            except (ConnectionError, OSError):
                self.statuses[None] += 1
                return
            self._judge(reply, shot)

    def _judge(self, reply: WireReply, shot: Shot) -> None:
        self.statuses[reply.status] += 1
        is_refused = reply.status == 503 and b"/v2/repository/models/" in shot.data
        assert reply.status in _DOCUMENTED or is_refused, reply
        if reply.status >= 400:
            assert reply.error
            assert len(reply.body) < 2000

    def _connection(self) -> Wire:
        if self._wire is None:
            self._wire = Wire(self._port, timeout_s=_ANSWER_S)
        return self._wire


_SPOILERS = (
    Fuzzer.wrong_json,
    Fuzzer.nested,
    Fuzzer.wrong_bytes,
    Fuzzer.wrong_header,
    Fuzzer.wrong_path,
    Fuzzer.compressed,
    Fuzzer.chunked,
    Fuzzer.cut,
    Fuzzer.noise,
    Fuzzer.control,
)
_WEIGHTS = (30, 4, 15, 15, 8, 10, 6, 4, 4, 4)


def _shot(request: _Request, what: str, *, is_whole: bool = True) -> Shot:
    return Shot(_bytes_of(request, random.Random(len(request.body))), is_whole, what)


def _bytes_of(request: _Request, chance: random.Random) -> bytes:
    if not request.is_chunked:
        headers = {"Content-Length": str(len(request.body))} | request.headers
        return _head(request, headers) + request.body
    pieces, start = [], 0
    while start < len(request.body):
        end = start + chance.randrange(1, 4000)
        pieces.append(chunk(request.body[start:end]))
        start = end
    return _head(request, {"Transfer-Encoding": "chunked", **request.headers}) + b"".join(pieces) + chunk(b"")


def _head(request: _Request, headers: dict[str, str]) -> bytes:
    writable = {name: value.encode("utf-8").decode("latin-1") for name, value in headers.items()}
    return head(request.path, writable, request.method)


def _dumps(document: Any) -> bytes:
    return json.dumps(document).encode()
