"""Ways of making a good JSON document or a good body a little wrong."""

from __future__ import annotations

import random
from copy import deepcopy
from typing import Any

_JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 1.5, 1e308, -0.0, float("nan"), float("inf"), 1 << 31, 1 << 53),
    *(1 << 63, 1 << 64, -(1 << 63), 10**40, "", "x", "y", "FP32", "BYTES", "BF16", "\ud800", "\0", "é😀" * 50),
    *([], {}, [[]], [{}], {"x": []}, [1, "a"], [None], {"": ""}, "x" * 70_000, list(range(500))),
)

# Headers that mean something to the server or its framework, and values that nobody should send.
HEADERS = {
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
