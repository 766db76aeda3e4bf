from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.app.http import uploads as multipart
from convoy.app.http.uploads import boundary_of, split_files
from convoy.models.errors import InvalidRequest

BOUNDARY = b"frontier"
CONTENT = st.one_of(
    st.binary(max_size=300),
    # Contents that nearly are a boundary, wherever the reading happens to be cut.
    st.lists(st.sampled_from([b"\r\n", b"\r\n--", b"--frontier", b"\r\n--frontie", b"x", b"\r"]), max_size=40).map(
        lambda pieces: b"".join(pieces).replace(b"\r\n--frontier", b"")
    ),
)


def form(parts: list[tuple[bool, bytes]]) -> bytearray:
    pieces = []
    for is_file, content in parts:
        name = b'name="f"; filename="f.png"' if is_file else b'name="filename"'
        pieces.append(b"--frontier\r\nContent-Disposition: form-data; " + name + b"\r\n\r\n" + content + b"\r\n")
    return bytearray(b"".join(pieces) + b"--frontier--\r\n")


@given(st.lists(st.tuples(st.booleans(), CONTENT), max_size=6), st.integers(1, 200))
def test_files_come_out_as_they_went_in_however_the_form_is_read(
    parts: list[tuple[bool, bytes]], read_bytes: int
) -> None:
    parts = [(is_file, content) for is_file, content in parts if b"\r\n--frontier" not in b"\r\n" + content]
    expected = [content for is_file, content in parts if is_file]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multipart, "_READ_BYTES", read_bytes)
        if expected:
            assert [bytes(file.content) for file in split_files(memoryview(form(parts)), BOUNDARY)] == expected
        else:
            with pytest.raises(InvalidRequest):
                split_files(memoryview(form(parts)), BOUNDARY)


@given(st.binary(max_size=400))
def test_any_bytes_are_files_or_a_refusal(data: bytes) -> None:
    with suppress(InvalidRequest):
        split_files(memoryview(bytearray(b"--frontier\r\n" + data)), BOUNDARY)


@pytest.mark.parametrize(
    ("content_type", "boundary"),
    [
        (b"multipart/form-data; boundary=abc", b"abc"),
        (b'Multipart/Form-Data; charset=utf-8; BOUNDARY="a b"', b"a b"),
        (b"multipart/form-data", b""),
        (b"multipart/form-data; boundary=", b""),
        (b"multipart/form-data; boundary*=utf-8''abc", b""),
        (b"multipart/mixed; boundary=abc", None),
        (b"image/png", None),
        (b"", None),
        (b"\xff\xfe;;=", None),
    ],
)
def test_the_boundary_is_read_from_the_content_type(content_type: bytes, boundary: bytes | None) -> None:
    assert boundary_of(content_type) == boundary
