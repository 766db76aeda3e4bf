"""A class map over HTTP: whether a request asks for JSON or for a PNG, and how that is written.

What takes long here runs in a thread, in Pillow.
"""

from __future__ import annotations

from convoy.app.edge.class_map import SegmentedPicture, palette_png
from convoy.app.edge.http.compression import quality
from convoy.app.edge.http.hot_route import HttpHead
from convoy.app.edge.oip.answering import Wanted
from convoy.models.errors import InvalidRequest


def in_form(wanted: Wanted, head: HttpHead) -> Wanted:
    """A class map in the form that the request asks for. Raises InvalidRequest."""
    form = head.query.get("format", "")
    if form not in ("", "json", "png"):
        raise InvalidRequest(f"format must be json or png, got {form[:40]!r}")
    is_png = form == "png" or (not form and prefers_png(head.headers.get(b"accept", b"")))
    return wanted._replace(finish=as_png) if is_png else wanted


def prefers_png(accept: bytes) -> bool:
    """Whether an Accept header names PNG, and nothing that JSON would fit better."""
    weights: dict[bytes, float] = {}
    for entry in accept.lower().split(b","):
        kind, _, parameter = entry.partition(b";")
        weights[kind.strip()] = quality(parameter)
    png = weights.get(b"image/png", 0.0)
    return png > 0 and png >= weights.get(b"application/json", 0.0)


def as_png(found: SegmentedPicture) -> bytes:
    """The map alone; what was found beside it is in the pixels."""
    return palette_png(found.class_map)
