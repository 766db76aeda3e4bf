"""Requests that are almost right, thousands of them from a seed, by the suite's own fuzzer."""

from __future__ import annotations

import re

from tests.oracle.session import Session
from tests.support.fuzz import Fuzzer

REGION_BYTES = 4096
_SHOTS = 3000
_REQUEST_LINE = re.compile(rb"^([A-Z]+ \S+)")
# Their answers depend on what went before, and on when; `books` asks for them in an order of its own.
_BOOKS = re.compile(r"/(metrics|stats)\b")


def spoiled(session: Session, region: str) -> None:
    """The region exists, and is registered again and again because shots unregister it."""
    fuzzer = Fuzzer(1, region)
    for number in range(_SHOTS):
        if number % 250 == 0:
            document = {"key": f"/{region}", "offset": 0, "byte_size": REGION_BYTES}
            session.post(f"/v2/systemsharedmemory/region/{region}/register", document, "register")
        shot = fuzzer.shot(number)
        line = _REQUEST_LINE.match(shot.data)
        shown = line[1].decode("latin-1")[:60] if line else ""
        name = f"{shown} shot {number} ({shot.what})"
        if _BOOKS.search(shown):
            continue
        if shot.is_whole:
            session.raw(name, shot.data)
        elif number % 3 == 0:  # the others cost a wait each, because the server waits for their rest
            session.broken(name, shot.data)
    session.region(region, "at last")
