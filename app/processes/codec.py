"""Messages to frames of bytes and back: `json_bytes, tail_bytes, JSON, tail`, both lengths 64 bits.

One frame carries many messages, as one JSON array of arrays; what JSON cannot carry, the bytes of an answer of
unknown size, lies in the tail. JSON and not `struct`: orjson writes and reads a request in 3 us against 2.5 us,
which nobody can measure in the whole, and it needs no format of our own for what varies in length. Not pickle:
reading that would run whatever it says.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orjson

from convoy.app.batch import StageTimes
from convoy.app.processes.messages import (
    SLOTS_AT,
    AnswerAt,
    Cancel,
    CatalogUpdate,
    Ended,
    Extent,
    Hello,
    Left,
    Lent,
    Message,
    Refused,
    Released,
    Report,
    ServedVersion,
    Submit,
    UpdateApplied,
    Welcome,
)
from convoy.app.scheduling.request import ModelKey, Outcome, Request, Shape, TensorPlace
from convoy.app.submission.listing import Listing, ModelState
from convoy.models.records import from_jsonable
from convoy.models.spec import ModelSpec

_LENGTHS = struct.Struct("<QQ")
_Fields = list[Any]


class FrameError(ValueError):
    """The bytes are not a frame, or not of messages that we know. This is a bug on the other side."""


def write_frame(messages: Sequence[Message]) -> bytes:
    """All messages in one frame."""
    tail = bytearray()
    # orjson takes tuples, but hands named ones to `default`.
    body = orjson.dumps([_write(message, tail) for message in messages], default=tuple)
    return b"".join((_LENGTHS.pack(len(body), len(tail)), body, tail))


class FrameReader:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are whole now. Raises FrameError."""
        self._buffer += data
        begin = 0
        while len(self._buffer) - begin >= _LENGTHS.size:
            json_bytes, tail_bytes = _LENGTHS.unpack_from(self._buffer, begin)
            body = begin + _LENGTHS.size
            tail = body + json_bytes
            if len(self._buffer) < tail + tail_bytes:
                break
            begin = tail + tail_bytes
            yield from _read(bytes(self._buffer[body:tail]), bytes(self._buffer[tail:begin]))
        del self._buffer[:begin]


def _write(message: Any, tail: bytearray) -> _Fields:
    tag, write, _ = _FORMS[type(message)]
    return [tag, *(message if write is None else write(message, tail))]


def _read(body: bytes, tail: bytes) -> Iterator[Message]:
    try:
        for tag, *fields in orjson.loads(body):
            yield _READERS[tag](fields, tail)
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise FrameError(f"not a message that we know: {error!r}") from error


def _write_submit(one: Submit, _: bytearray) -> _Fields:
    request, extents = one
    return [*request[:SLOTS_AT], extents, *request[SLOTS_AT + 1 :]]


def _read_submit(fields: _Fields, _: bytes) -> Submit:
    own_id, key, samples, shapes, extents, inputs, wanted, outputs, arrival, priority, deadline, latest = fields
    return Submit(
        Request(
            own_id,
            ModelKey(*key),
            samples,
            tuple(map(tuple, shapes)),
            (),
            tuple(map(TensorPlace._make, inputs)),
            tuple(wanted),
            tuple([None if place is None else TensorPlace(*place) for place in outputs]),
            arrival,
            priority,
            deadline,
            latest,
        ),
        tuple(map(Extent._make, extents)),
    )


def _write_ended(one: Ended, tail: bytearray) -> _Fields:
    times = one.times
    stages = None if times is None else (times.copy_in_ns, times.compute_ns, times.copy_out_ns, times.waited_ns)
    answers = [_write_answer(answer, tail) for answer in one.answers]
    return [one.id, one.outcome.value, answers, stages, one.queue_ns, one.batch_samples, one.reason]


def _write_answer(answer: AnswerAt, tail: bytearray) -> _Fields:
    if answer.apart is None:
        return [answer.shape, answer.nbytes, None]
    tail += answer.apart
    return [answer.shape, answer.nbytes, len(tail) - len(answer.apart)]


def _read_ended(fields: _Fields, tail: bytes) -> Ended:
    own_id, outcome, answers, stages, queue_ns, batch_samples, reason = fields
    times = None if stages is None else StageTimes(*stages)
    return Ended(
        own_id,
        Outcome(outcome),
        tuple([_read_answer(answer, tail) for answer in answers]),
        times,
        queue_ns,
        batch_samples,
        reason,
    )


def _read_answer(fields: _Fields, tail: bytes) -> AnswerAt:
    sizes, nbytes, begin = fields
    shape: Shape = tuple(sizes)
    return AnswerAt(shape, nbytes, None if begin is None else tail[begin : begin + nbytes])


def _write_report(one: Report, _: bytearray) -> _Fields:
    stages = [(key, stage, values) for (key, stage), values in one.stages.items()]
    calls = [(key, protocol, outcome, values) for (key, protocol, outcome), values in one.calls.items()]
    return [stages, calls, one.rejected, one.used_bytes]


def _read_report(fields: _Fields, _: bytes) -> Report:
    stages, calls, rejected, used_bytes = fields
    return Report(
        {(ModelKey(*key), stage): values for key, stage, values in stages},
        {(_key(key), protocol, outcome): values for key, protocol, outcome, values in calls},
        rejected,
        used_bytes,
    )


def _read_catalog_update(fields: _Fields, _: bytes) -> CatalogUpdate:
    number, served, others, is_complete, pages_locked = fields
    versions = [
        ServedVersion(ModelKey(*key), from_jsonable(ModelSpec, spec, "spec"), text_only)
        for key, spec, text_only in served
    ]
    listings = [Listing(**one | {"state": ModelState(one["state"])}) for one in others]
    return CatalogUpdate(number, tuple(versions), tuple(listings), is_complete, pages_locked)


def _read_welcome(fields: _Fields, _: bytes) -> Welcome:
    version, lent = fields
    return Welcome(version, tuple(Lent(one, tuple(Extent(*extent) for extent in extents)) for one, extents in lent))


def _key(fields: _Fields | None) -> ModelKey | None:
    return None if fields is None else ModelKey(*fields)


def _reader_of(kind: Any) -> _Reader:
    return lambda fields, _: kind(*fields)


_Writer = Callable[[Any, bytearray], _Fields]
_Reader = Callable[[_Fields, bytes], Message]
# The tag of each message, and how it is written and read where it is not the tuple that it is, of plain values.
_FORMS: dict[type, tuple[str, _Writer | None, _Reader | None]] = {
    Hello: ("hello", None, None),
    Submit: ("s", _write_submit, _read_submit),
    Cancel: ("cancel", None, None),
    Left: ("left", None, lambda fields, _: Left(ModelKey(*fields[0]))),
    UpdateApplied: ("known", None, None),
    Report: ("report", _write_report, _read_report),
    Welcome: ("welcome", None, _read_welcome),
    CatalogUpdate: ("catalog", None, _read_catalog_update),
    Ended: ("e", _write_ended, _read_ended),
    Refused: ("refused", None, None),
    Released: ("released", None, None),
}
_READERS = {tag: read or _reader_of(kind) for kind, (tag, _, read) in _FORMS.items()}
