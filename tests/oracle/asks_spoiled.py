"""Requests that are almost right, thousands of them from a seed, by the suite's own fuzzer."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.oracle.session import Ask, broken, post, raw, region
from tests.support.fuzz import Fuzzer

REGION_BYTES = 4096
_SHOTS = 3000
_REQUEST_LINE = re.compile(rb"^([A-Z]+ \S+)")
# Their answers depend on what went before, and on when; `books` asks for them in an order of its own.
_BOOKS = re.compile(r"/(metrics|stats)\b")


def spoiled(name: str) -> Iterator[Ask]:
    """The region of this name exists, and is registered again and again because shots unregister it."""
    fuzzer = Fuzzer(1, name)
    for number in range(_SHOTS):
        if number % 250 == 0:
            document = {"key": f"/{name}", "offset": 0, "byte_size": REGION_BYTES}
            yield post(f"/v2/systemsharedmemory/region/{name}/register", document, "register")
        shot = fuzzer.shot(number)
        line = _REQUEST_LINE.match(shot.data)
        shown = line[1].decode("latin-1")[:60] if line else ""
        # Of those that are broken each costs a wait, because the server waits for its rest.
        if not _BOOKS.search(shown) and (shot.is_whole or number % 3 == 0):
            way = raw if shot.is_whole else broken
            yield way(f"{shown} shot {number} ({shot.what})", shot.data)
    yield region(name, "at last")
