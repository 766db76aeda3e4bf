"""Asks that are almost right, thousands of them from a seed: the suite's own fuzzer, written down."""

from __future__ import annotations

import re

from tests.oracle.book import Book
from tests.oracle.records import HttpAsk
from tests.support.fuzz import Fuzzer

_REQUEST_LINE = re.compile(rb"^([A-Z]+ \S+)")
# Their answers depend on what went before, and on when; `books` asks them in an order of its own.
_BOOKS = re.compile(r"/(metrics|stats)\b")
# Such a shot costs a wait, because the server waits for its rest: of these one in so many.
_BROKEN_ONE_IN = 3
_REGISTER_EVERY = 250


def spoiled(seed: int, region: str, nbytes: int, count: int) -> Book:
    """So many shots; the region exists and is registered again and again, as shots unregister it."""
    book = Book()
    fuzzer = Fuzzer(seed, region)
    for number in range(count):
        if number % _REGISTER_EVERY == 0:
            document = {"key": f"/{region}", "offset": 0, "byte_size": nbytes}
            book.post_json(f"/v2/systemsharedmemory/region/{region}/register", document, "register")
        shot = fuzzer.shot(number)
        line = _REQUEST_LINE.match(shot.data)
        shown = line[1].decode("latin-1")[:60] if line else ""
        if _BOOKS.search(shown) or not (shot.is_whole or number % _BROKEN_ONE_IN == 0):
            continue
        name = f"{shown} shot {number} ({shot.what})"
        if shot.is_whole:
            book.raw(name, shot.data)
        else:
            book.broken(name, shot.data)
        if number % _REGISTER_EVERY == _REGISTER_EVERY - 1:
            book.region(region, f"after shot {number}")
    assert all(isinstance(one, HttpAsk) for one in book.asks if "shot" in one.name and "region" not in one.name)
    return book
