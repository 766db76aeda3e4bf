"""Inflating into memory that is too small, exactly large enough, or larger."""

from __future__ import annotations

import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.app.http.compression import _Inflater, compress, reply_encoding
from convoy.app.http.replies import Reply
from convoy.models.errors import InvalidRequest

SQUEEZE = {b"gzip": gzip.compress, b"deflate": zlib.compress}


def inflate_by(inflater: _Inflater, size: int, more: int) -> bytes:
    """As a request is inflated: into a slot that grows whenever it is full."""
    memory, filled = bytearray(size), 0
    while True:
        filled = inflater.fill(memoryview(memory), filled)
        if inflater.is_finished:
            return bytes(memory[:filled])
        assert filled == len(memory)
        memory = memory + bytearray(more)


@pytest.mark.parametrize("encoding", SQUEEZE)
@given(data=st.binary(max_size=300), size=st.integers(0, 310), more=st.integers(1, 50))
def test_whatever_the_room_the_body_is_the_same(encoding: bytes, data: bytes, size: int, more: int) -> None:
    squeezed = SQUEEZE[encoding](data)
    assert inflate_by(_Inflater(memoryview(squeezed), encoding), size, more) == data


@pytest.mark.parametrize("encoding", SQUEEZE)
@given(data=st.binary(min_size=1, max_size=100), cut=st.integers(0, 40))
def test_a_cut_body_is_never_taken_for_a_whole_one(encoding: bytes, data: bytes, cut: int) -> None:
    squeezed = SQUEEZE[encoding](data)
    shorter = squeezed[: min(cut, len(squeezed) - 1)]
    with pytest.raises(InvalidRequest, match="cut off"):
        inflate_by(_Inflater(memoryview(shorter), encoding), 200, 10)


@pytest.mark.parametrize("encoding", SQUEEZE)
def test_a_large_body_comes_in_pieces(encoding: bytes) -> None:
    data = bytes(range(256)) * 20_000
    squeezed = SQUEEZE[encoding](data)
    assert inflate_by(_Inflater(memoryview(squeezed), encoding), 1 << 20, 1 << 20) == data


@pytest.mark.parametrize("encoding", SQUEEZE)
def test_an_answer_in_pieces_is_one_stream(encoding: bytes) -> None:
    reply = Reply(200, (b"head" * 500, memoryview(b"tail" * 500)), headers=((b"x-own", b"1"),))
    assert reply_encoding({b"accept-encoding": encoding}, reply) == encoding
    squeezed = compress(reply, encoding)
    assert squeezed.headers == ((b"x-own", b"1"), (b"content-encoding", encoding))
    (body,) = squeezed.pieces
    assert inflate_by(_Inflater(memoryview(body), encoding), 4000, 1) == b"head" * 500 + b"tail" * 500
