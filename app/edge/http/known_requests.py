"""What the JSON before binary tensors has meant: a client sends the same, but for its id, before every one of them.

What such a header means depends on its bytes, the version and the body's length, and on nothing else as long as all
inputs are numbers in the body. Its id may be another each time, because what is around an id settles all the rest.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import orjson

from convoy.app.edge.oip.inference import InferRequest, has_numbers_alone
from convoy.app.edge.oip.packing import Pattern
from convoy.app.edge.oip.recent import Recent
from convoy.app.edge.oip.tensors import TensorRef
from convoy.app.scheduling.request import ModelKey, Request
from convoy.models.spec import ModelSpec

_LONGEST_BYTES = 4 << 10
# Without an escape or a character of several bytes: such a text stands for itself wherever it stands.
_PLAIN = re.compile(rb"[\x20\x21\x23-\x5b\x5d-\x7e]*")
_ID = re.compile(rb'"id"\s*:\s*"(%b)"' % _PLAIN.pattern)


class Known(NamedTuple):
    """What a header meant, and what became of it.

    `request` is one, of which the first slot was the body's and the second, of `room_bytes`, the outputs'; `pattern` is
    for one whose body has no slot yet. `answer` is the JSON of its answer without an id, None where that may be another
    the next time.
    """

    meaning: InferRequest
    request: Request
    room_bytes: int
    pattern: Pattern
    answer: bytes | None

    @classmethod
    def of(cls, meaning: InferRequest, request: Request, body_bytes: int, answer: bytes | None) -> Known:
        """What is known of a request that has been answered."""
        sizes = [None if place is None else place.nbytes for place in request.outputs]
        room_bytes = sum([size for size in sizes if size is not None])
        return cls(meaning, request, room_bytes, Pattern.of(request, request.inputs, body_bytes, sizes), answer)

    def with_id(self, own_id: bytes) -> Known:
        return self._replace(meaning=self.meaning._replace(id=own_id.decode()))


class _Place(NamedTuple):
    """What settles a meaning; `before` and `after` is the header around the id."""

    key: ModelKey
    nbytes: int
    header_length: int
    before: bytes
    after: bytes


class KnownRequests:
    """The last few hundred. Belongs to the event loop."""

    def __init__(self) -> None:
        self._known = Recent[_Place, Known]()

    def find(self, key: ModelKey, header: bytes, nbytes: int) -> Known | None:
        """What was known of a body of `nbytes` that begins with this header, with this one's id."""
        place, own_id = _read(key, header, nbytes)
        known = self._known.find(place)
        return known if known is None or own_id is None else known.with_id(own_id)

    def learn(self, header: bytes, nbytes: int, spec: ModelSpec, known: Known) -> None:
        """For the next ones. Nothing is learned of a request that more than its header settles."""
        if len(header) > _LONGEST_BYTES or not _is_settled(known.meaning, spec):
            return
        place, own_id = _read(known.request.key, header, nbytes)
        if own_id is not None and not _is_the_id(place):
            return
        self._known.keep(place, known)


def id_in(header: bytes) -> tuple[int, int]:
    """Where the text is that may be the id: from here to there; two times the length where there is none."""
    found = _ID.search(header)
    return found.span(1) if found is not None else (len(header), len(header))


def is_plain(own_id: bytes) -> bool:
    """Whether it stands for itself in JSON."""
    return own_id.isalnum() or _PLAIN.fullmatch(own_id) is not None


def _read(key: ModelKey, header: bytes, nbytes: int) -> tuple[_Place, bytes | None]:
    start, end = id_in(header)
    place = _Place(key, nbytes, len(header), header[:start], header[end:])
    return place, header[start:end] if start < len(header) else None


def _is_the_id(place: _Place) -> bool:
    """Whether what may be another text is the request's own id, and not that of something else."""
    other = b"?" * (len(place.before) + len(place.after))  # longer than any id that stands around it
    try:
        return bool(orjson.loads(place.before + other + place.after)["id"] == other.decode())
    except (orjson.JSONDecodeError, KeyError):  # NaN, which the protocol allows, or an id deeper down
        return False


def _is_settled(meaning: InferRequest, spec: ModelSpec) -> bool:
    return all(isinstance(tensor, TensorRef) for tensor in meaning.tensors) and has_numbers_alone(meaning, spec)
