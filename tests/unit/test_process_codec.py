"""What edges and the core say to each other: every message survives the wire, however it is cut; nonsense does not."""

from __future__ import annotations

from collections.abc import Iterable

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.app.batch import StageTimes
from convoy.app.processes.codec import FrameError, FrameReader, write_frame
from convoy.app.processes.messages import (
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
from convoy.app.scheduling.request import ModelKey, Outcome, Request, SlotRef, TensorPlace
from convoy.app.submission.listing import Listing, ModelState
from convoy.models.spec import ImageSpec, ModelSpec, TensorSpec

number = st.integers(0, (1 << 63) - 1)
small = st.integers(0, 1 << 20)
text = st.text(max_size=30).filter(lambda value: value.isprintable())
key = st.builds(ModelKey, text, small, small)
extent = st.builds(Extent, number, number)
place = st.builds(TensorPlace, small, number, number)
shape = st.lists(small, max_size=4).map(tuple)


def some(strategy: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(strategy, max_size=4).map(tuple)


request = st.builds(
    Request,
    id=number,
    key=key,
    samples=small,
    shapes=some(shape),
    slots=st.just(()),
    inputs=some(place),
    wanted=some(small),
    outputs=some(st.none() | place),
    arrival_ns=number,
    priority=number,
    deadline_ns=st.none() | number,
    latest_start_ns=st.none() | number,
)
submit = st.builds(Submit, request, some(extent))
apart = st.binary(max_size=50).flatmap(lambda data: st.builds(AnswerAt, shape, st.just(len(data)), st.just(data)))
answer = apart | st.builds(AnswerAt, shape, number, st.none())
times = st.builds(StageTimes, number, number, number, number)
ended = st.builds(Ended, number, st.sampled_from(Outcome), some(answer), st.none() | times, number, small, text)
report = st.builds(
    Report,
    st.dictionaries(st.tuples(key, text), st.lists(number, max_size=3), max_size=3),
    st.dictionaries(st.tuples(st.none() | key, text, text), st.lists(number, max_size=3), max_size=3),
    small,
    number,
)
image = ImageSpec(8, 8, 3, "exact", 8, "nearest", False, (0.0,) * 3, (1.0,) * 3, "uint8_nhwc")
specs = st.sampled_from(
    (
        ModelSpec(
            "m",
            (TensorSpec("images", "UINT8", (8, 8, 3)),),
            (TensorSpec("y", "FP32", (2,)),),
            4,
            image,
            "softmax",
            ("a", "b"),
        ),
        ModelSpec("n", (TensorSpec("x", "BYTES", (-1,)),), (TensorSpec("y", "BF16", ()),), 0, None, "none", ()),
    )
)
update = st.builds(
    CatalogUpdate,
    small,
    some(st.builds(ServedVersion, key, specs, st.booleans())),
    some(st.builds(Listing, text, small, st.sampled_from(ModelState), text)),
    st.booleans(),
    st.booleans(),
)
message = st.one_of(
    *(st.builds(Hello, small, small, small), submit, st.builds(Cancel, number, text), st.builds(Left, key), report),
    st.builds(UpdateApplied, small),
    *(st.builds(Welcome, small, some(st.builds(Lent, number, some(extent)))), update, ended),
    *(st.builds(Refused, number, text, text, text, st.floats(0, 1e6)), st.builds(Released, number)),
)


def read(pieces: Iterable[bytes]) -> list[Message]:
    reader = FrameReader()
    return [one for piece in pieces for one in reader.feed(piece)]


@given(st.lists(st.lists(message, min_size=1, max_size=3), max_size=3), st.lists(st.integers(1, 200), max_size=20))
def test_messages_survive_however_the_bytes_are_cut(frames: list[list[Message]], cuts: list[int]) -> None:
    data = b"".join(map(write_frame, frames))
    pieces = []
    for size in cuts:
        pieces.append(data[:size])
        data = data[size:]
    known, sent = read([*pieces, data]), [one for frame in frames for one in frame]
    assert [(type(one), one) for one in known] == [(type(one), one) for one in sent]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-5, 5) | text, lambda inner: st.lists(inner, max_size=4), max_leaves=20
    )
)
def test_json_that_is_no_message_is_refused(document: object) -> None:
    body = orjson.dumps([["s", document], ["ended", document], [document]])
    with pytest.raises(FrameError):
        read([len(body).to_bytes(8, "little") + bytes(8) + body])


@given(submit)
def test_the_edges_names_of_its_memory_mean_nothing_elsewhere(one: Submit) -> None:
    named = one._replace(request=one.request._replace(slots=(SlotRef(5), SlotRef(7))))
    assert read([write_frame([named])]) == [one]


def test_what_is_not_whole_waits() -> None:
    frame = write_frame([Released(7)])
    assert read([frame[:-1]]) == []
    assert read([frame[:-1], frame[-1:]]) == [Released(7)]
