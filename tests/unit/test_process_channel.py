"""What edges and the core say to each other: every message survives the wire, however it is cut; nonsense does not."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import struct
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct, msgpack

from convoy.app.processes.channel import Channel
from convoy.app.processes.messages import Cancel, Message, Released
from convoy.models.spec import ImageSpec, ModelSpec, TensorSpec
from tests.support.pipes import join

text = st.text(max_size=30).filter(lambda value: value.isprintable())
image = ImageSpec(8, 8, 3, "exact", 8, "nearest", False, (0.0,) * 3, (1.0,) * 3, "uint8_nhwc")
tensors = (TensorSpec("images", "UINT8", (8, 8, 3)),), (TensorSpec("y", "FP32", (2,)),)
specs = st.sampled_from(
    (
        ModelSpec("m", *tensors, 4, image, "softmax", ("a", "b")),
        ModelSpec("n", (TensorSpec("x", "BYTES", (-1,)),), (TensorSpec("y", "BF16", ()),), 0, None, "none", ()),
    )
)


def any_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type as the fields of messages have it."""
    known: dict[Any, st.SearchStrategy[Any]] = {
        **{
            bool: st.booleans(),
            memoryview: st.binary(max_size=50).map(memoryview),
            float: st.floats(0, 1e6),
            str: text,
        },
        **{int: st.integers(0, (1 << 63) - 1), type(None): st.none(), ModelSpec: specs},
    }
    inner = typing.get_args(kind)
    match typing.get_origin(kind):
        case typing.Union | types.UnionType:
            return st.one_of(*map(any_of, inner))
        case origin if origin is tuple and inner[1:] != (...,):
            return st.tuples(*map(any_of, inner))
        case origin if origin in (tuple, list):
            return st.lists(any_of(inner[0]), max_size=4).map(origin)
        case origin if origin is dict:
            return st.dictionaries(*map(any_of, inner), max_size=3)
    kind = getattr(kind, "__supertype__", kind)
    if kind in known:
        return known[kind]
    if issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    assert dataclasses.is_dataclass(kind) or issubclass(kind, (tuple, Struct)), kind
    return st.builds(kind, **{name: any_of(of) for name, of in typing.get_type_hints(kind).items()})


def framed(document: object) -> bytes:
    """What is written for a document, in the place of a list of messages."""
    body = msgpack.encode(document)
    return struct.pack("<Q", len(body)) + body


class Ends:
    """What comes out at the other end of a channel, whether that end has hung up, and the bytes in between."""

    def __init__(self, runner: asyncio.Runner, cuts: Iterable[int] = ()) -> None:
        self.runner, self.heard, self.hung_up = runner, [], []
        self.runner.run(self._open(cuts))

    async def _open(self, cuts: Iterable[int]) -> None:
        self.near = Channel(lambda message: None, lambda: self.hung_up.append("near"))
        self.far = Channel(self.heard.append, lambda: self.hung_up.append("far"))
        self.way, _ = join(self.near, self.far, cuts)

    def say(self, *messages: Message) -> bytes:
        """What is written for messages that are said in one turn."""
        before = len(self.way.written)

        self._do(lambda: [self.near.send(message) for message in messages])
        return bytes(self.way.written[before:])

    def send(self, data: bytes) -> None:
        """Bytes of ours."""
        self._do(lambda: self.way.write(data))

    def _do(self, something: Callable[[], object]) -> None:
        """Until the other end has heard of it."""

        async def turns() -> None:
            something()
            for _ in range(3):
                await asyncio.sleep(0)

        self.runner.run(turns())


@pytest.fixture(scope="module")
def runner() -> Iterable[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@given(
    st.lists(st.lists(any_of(Message), min_size=1, max_size=3), max_size=3),
    st.lists(st.integers(1, 200), max_size=20),
)
def test_messages_survive_however_the_bytes_are_cut(
    runner: asyncio.Runner, turns: Sequence[Sequence[Message]], cuts: list[int]
) -> None:
    ends = Ends(runner, cuts)
    for messages in turns:
        ends.say(*messages)
    assert [(type(one), one) for one in ends.heard] == [(type(one), one) for messages in turns for one in messages]
    assert not ends.hung_up


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-5, 5) | text | st.binary(max_size=5),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=3),
        max_leaves=20,
    ),
    st.sampled_from((["Submit"], ["Ended"], ["ended"], [])),
)
def test_a_document_that_is_no_message_is_refused(runner: asyncio.Runner, document: object, kind: list[str]) -> None:
    assert framed([["Cancel", 7, "late"]]) == Ends(runner).say(Cancel(7, "late"))
    for frame in (framed([[*kind, document]]), framed([*kind, document])):
        ends = Ends(runner)
        ends.send(frame)
        assert sorted(ends.hung_up) == ["far", "near"]
        assert ends.heard == []


@given(any_of(Message), st.lists(st.tuples(st.integers(min_value=0), st.integers(0, 255)), min_size=1, max_size=3))
def test_spoilt_bytes_are_a_message_or_refused(
    runner: asyncio.Runner, message: Message, changes: list[tuple[int, int]]
) -> None:
    frame = bytearray(Ends(runner).say(message))
    head = len(framed([])) - len(msgpack.encode([]))
    for at, byte in changes:
        frame[head + at % (len(frame) - head)] = byte
    ends = Ends(runner)
    ends.send(bytes(frame))
    assert [isinstance(one, Message) for one in ends.heard] == [True] or sorted(ends.hung_up) == ["far", "near"]


def test_what_cannot_be_written_ends_the_connection(runner: asyncio.Runner) -> None:
    ends = Ends(runner)
    assert ends.say(Cancel(0, "\ud800")) == b""
    assert sorted(ends.hung_up) == ["far", "near"], "or whoever waits for an answer would wait for ever"


def test_what_is_not_whole_waits(runner: asyncio.Runner) -> None:
    frame = Ends(runner).say(Released(7))
    ends = Ends(runner)
    ends.send(frame[:-1])
    assert ends.heard == []
    ends.send(frame[-1:])
    assert ends.heard == [Released(7)]
