"""Compressed bodies, in pieces of any size."""

from __future__ import annotations

import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.app.http.body import Inflater
from convoy.app.http.replies import Reply, compress, reply_encoding
from convoy.models.errors import InvalidRequest

SQUEEZE = {b"gzip": gzip.compress, b"deflate": zlib.compress}


def inflated(squeezed: bytes | memoryview, encoding: bytes, most: int) -> bytes:
    inflater, plain = Inflater(memoryview(squeezed), encoding), b""
    while not inflater.is_finished:
        piece = inflater.next(most)
        assert len(piece) == most or inflater.is_finished
        plain += piece
    return plain


@pytest.mark.parametrize("encoding", SQUEEZE)
@given(data=st.binary(max_size=300), most=st.integers(1, 310))
def test_the_body_is_the_same_in_pieces_of_any_size(encoding: bytes, data: bytes, most: int) -> None:
    assert inflated(SQUEEZE[encoding](data), encoding, most) == data


@pytest.mark.parametrize("encoding", SQUEEZE)
@given(data=st.binary(min_size=1, max_size=100), cut=st.integers(0, 40))
def test_a_cut_body_is_never_taken_for_a_whole_one(encoding: bytes, data: bytes, cut: int) -> None:
    squeezed = SQUEEZE[encoding](data)
    shorter = squeezed[: min(cut, len(squeezed) - 1)]
    with pytest.raises(InvalidRequest, match="cut off"):
        inflated(shorter, encoding, 50)


@pytest.mark.parametrize("encoding", SQUEEZE)
def test_a_large_body_comes_in_pieces(encoding: bytes) -> None:
    data = bytes(range(256)) * 20_000
    assert inflated(SQUEEZE[encoding](data), encoding, 1 << 20) == data


@pytest.mark.parametrize("encoding", SQUEEZE)
def test_an_answer_in_pieces_is_one_stream(encoding: bytes) -> None:
    reply = Reply(200, (b"head" * 500, memoryview(b"tail" * 500)), headers=((b"x-own", b"1"),))
    assert reply_encoding({b"accept-encoding": encoding}, reply) == encoding
    squeezed = compress(reply, encoding)
    assert squeezed.headers == ((b"x-own", b"1"), (b"content-encoding", encoding))
    (body,) = squeezed.pieces
    assert inflated(body, encoding, 4000) == b"head" * 500 + b"tail" * 500
