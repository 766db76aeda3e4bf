"""A message is known again only where it differs from an earlier one in nothing but an id's letters and its tensors."""

from __future__ import annotations

from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from convoy.app.edge.grpc.known_messages import Outline

MESSAGE = service_pb2.ModelInferRequest
# Few letters, so that two of them are often alike.
NAMES = st.text("ab\x00é", max_size=3)
TENSORS = st.lists(st.sampled_from([b"", b"\x00" * 4, b"abcd", b"\xff" * 200]), max_size=3)


@st.composite
def messages(draw: st.DrawFn) -> Any:
    tensors = draw(TENSORS)
    inputs = [
        MESSAGE.InferInputTensor(name=draw(NAMES), datatype=draw(st.sampled_from(["FP32", "INT8"])), shape=[size])
        for size in draw(st.lists(st.integers(0, 300), min_size=len(tensors), max_size=len(tensors)))
    ]
    message = MESSAGE(model_name=draw(NAMES), id=draw(NAMES), inputs=inputs, raw_input_contents=tensors)
    if draw(st.booleans()):
        message.parameters["priority"].int64_param = draw(st.integers(0, 2))
    return message


def without_tensors(message: Any) -> Any:
    rest = MESSAGE()
    rest.CopyFrom(message)
    rest.ClearField("id")
    rest.ClearField("raw_input_contents")
    return rest


@given(messages(), messages(), st.booleans())
def test_what_is_known_again_says_the_same(first: Any, other: Any, same: bool) -> None:
    if same:  # but for its id and its tensors
        tensors, own_id = [bytes(reversed(one)) for one in first.raw_input_contents], "".join(reversed(first.id))
        other.CopyFrom(first)
        other.ClearField("raw_input_contents")
        other.raw_input_contents.extend(tensors)
        other.id = own_id
    known, data = Outline.of(first.SerializeToString(), len(first.inputs)), other.SerializeToString()
    assume(known is not None and len(data) == known.place.nbytes)
    assert known is not None
    if not known.fits(data):
        assert not same or not other.id.isascii()
        return
    assert without_tensors(other) == without_tensors(first)
    assert known.id_in(data) == other.id
    assert [data[one.offset :][: one.nbytes] for one in known.inputs] == list(other.raw_input_contents)


@given(st.binary(max_size=60))
def test_any_bytes_at_all(data: bytes) -> None:
    known = Outline.of(data, 1)
    if known is not None:
        covered = [(at, at + len(part)) for at, part in known.fixed] + [known.id]
        covered += [(one.offset, one.offset + one.nbytes) for one in known.inputs]
        assert sum(end - start for start, end in covered) == len(data)
        assert known.fits(data) == data[slice(*known.id)].isascii()
