"""A class map over HTTP: which form a request asks for, and how it is written.

Not compiled: what takes long here runs in a thread, in numpy and in Pillow.
"""

from __future__ import annotations

from dataclasses import asdict

import orjson

from convoy.app.edge.class_map import SegmentedPicture, palette_png, run_lengths
from convoy.app.edge.http.compression import quality
from convoy.app.edge.http.hot_route import HttpHead
from convoy.app.edge.oip.answering import CLASS_MAP, Wanted
from convoy.app.submission.inference import ServedLike
from convoy.models.errors import InvalidRequest


def wanted_map(head: HttpHead, served: ServedLike) -> Wanted:
    """Raises InvalidRequest."""
    query = head.query()
    for word in ("top_k", "threshold"):
        if word in query:
            name = served.key.model
            raise InvalidRequest(f"{word} is for classes and boxes, and '{name}' gives a class map; leave it away")
    form = query.get("format", [""])[-1]
    if form not in ("", "json", "png"):
        raise InvalidRequest(f"format must be json or png, got {form[:40]!r}")
    is_png = form == "png" or (not form and prefers_png(head.headers.get(b"accept", b"")))
    return Wanted(CLASS_MAP, finish=as_png if is_png else _as_json)


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


def _as_json(found: SegmentedPicture) -> orjson.Fragment:
    """Written by itself, so that the event loop has only to put it into the rest of the answer."""
    height, width = found.class_map.shape
    counts = run_lengths(found.class_map, [one.class_id for one in found.classes])
    classes = [
        {**asdict(one), "rle": {"size": [height, width], "counts": runs}}
        for one, runs in zip(found.classes, counts, strict=True)
    ]
    document = {"height": height, "width": width, "unseen_share": found.unseen_share, "classes": classes}
    return orjson.Fragment(orjson.dumps(document))
