"""The infer request's parser remembers headers: what it says from memory is what it would say anew."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.app.edge.http.body import Body
from convoy.app.edge.http.infer_request import RequestParser, parse_infer
from convoy.app.scheduling.request import ModelKey
from convoy.app.scheduling.slab import Slab
from convoy.app.submission.shared_memory import SharedMemory
from convoy.models.errors import InvalidRequest
from convoy.models.spec import ModelSpec, TensorSpec

MEMORY = SharedMemory(is_allowed=False)
SLAB = Slab(1 << 20)


def served(name: str = "m", dtype: str = "FP32", max_batch_size: int = 4) -> Any:
    spec = ModelSpec(
        name, (TensorSpec("x", dtype, (2,)),), (TensorSpec("y", "FP32", (2,)),), max_batch_size, None, "none", ()
    )
    return SimpleNamespace(
        key=ModelKey(name, 1, 1),
        spec=spec,
        text_only=True,
        first=SimpleNamespace(engine=SimpleNamespace(text_only=True)),
    )


def body_of(header: bytes, tail: bytes) -> Body:
    slot = SLAB.reserve(len(header) + len(tail))
    assert slot is not None
    slot.view[:] = header + tail
    return Body(slot, len(slot.view))


def header_of(samples: int, nbytes: int, **more: Any) -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": [samples, 2], "parameters": {"binary_data_size": nbytes}}
    return json.dumps({"inputs": [tensor], **more}).encode()


@given(st.lists(st.tuples(st.integers(0, 6), st.sampled_from([8, 16, 24]), st.sampled_from(["a", "b"])), max_size=30))
def test_from_memory_it_says_what_it_would_say_anew(requests: list[tuple[int, int, str]]) -> None:
    parser = RequestParser()
    for samples, nbytes, name in requests:
        header = header_of(samples, nbytes, id=f"{samples}")
        one, other = body_of(header, b"\1" * nbytes), body_of(header, b"\2" * nbytes)
        for body in (one, other):
            outcomes = []
            for parse in (parser.parse, parse_infer):
                try:
                    outcomes.append(parse(body, len(header), served(name), MEMORY))
                except InvalidRequest as error:
                    outcomes.append(str(error))
            assert outcomes[0] == outcomes[1]
        SLAB.free(one.slot.ref)
        SLAB.free(other.slot.ref)


def test_the_same_header_with_fewer_bytes_behind_it_is_refused() -> None:
    parser, header = RequestParser(), header_of(2, 16)
    parser.parse(body_of(header, b"\0" * 16), len(header), served(), MEMORY)
    with pytest.raises(InvalidRequest, match="expecting 8 additional bytes"):
        parser.parse(body_of(header, b"\0" * 8), len(header), served(), MEMORY)


def test_strings_are_looked_at_every_time() -> None:
    parser = RequestParser()
    tensor = {"name": "x", "datatype": "BYTES", "shape": [1, 2], "parameters": {"binary_data_size": 10}}
    header = json.dumps({"inputs": [tensor]}).encode()
    good, bad = b"\1\0\0\0a\1\0\0\0b", b"\1\0\0\0a\x09\0\0\0b"
    parser.parse(body_of(header, good), len(header), served(dtype="BYTES"), MEMORY)
    with pytest.raises(InvalidRequest):
        parser.parse(body_of(header, bad), len(header), served(dtype="BYTES"), MEMORY)


def test_memory_is_bounded() -> None:
    parser = RequestParser()
    for number in range(1000):
        header = header_of(1, 8, id=str(number))
        body = body_of(header, b"\0" * 8)
        parser.parse(body, len(header), served(), MEMORY)
        SLAB.free(body.slot.ref)
    assert len(parser._known) <= 256


# JSON with numbers in it


def parsed(parse: Callable[..., Any], text: bytes, dtype: str = "FP32") -> Any:
    """What it says, or what it says against it; arrays as bytes, so that they can be compared."""
    body = body_of(text, b"")
    try:
        request = parse(body, None, served(dtype=dtype), MEMORY)
    except InvalidRequest as error:
        return str(error)
    finally:
        SLAB.free(body.slot.ref)
    (values,) = request.tensors
    assert isinstance(values, np.ndarray)
    return request._replace(tensors=(str(values.dtype), values.size, values.tobytes()))


def text_of(numbers: str, *, before: str = "", after: str = "", dtype: str = "FP32", samples: int = 1) -> bytes:
    tensor = f'"name": "x", "shape": [{samples}, 2], "datatype": "{dtype}"'
    return f'{{{before} "inputs": [{{{tensor}, "data" : {numbers} {after}}}] }}'.encode()


numbers_of_any_form = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.integers(-(1 << 70), 1 << 70).map(str),
    st.sampled_from(
        ["1e39", "-0", "1E5", "true", "null", '"1"', "[1]", "NaN", "1]", "01", '1], "id": "x", "y": [2', ""]
    ),
)
lists = st.lists(numbers_of_any_form, min_size=1, max_size=4).map(lambda one: f"[{', '.join(one)}]")


@given(
    st.lists(
        st.tuples(
            lists,
            st.sampled_from(["", '"id": "a",', '"id": "b",', '"id": "[",', '"id": "\\"data\\"",']),
            st.sampled_from(["", ', "parameters": {}', ', "data": [7, 8]', "]"]),
            st.sampled_from(["FP32", "FP64", "INT32"]),
        ),
        max_size=20,
    )
)
def test_numbers_between_known_words_are_what_they_would_be_anew(
    requests: list[tuple[str, str, str, str]],
) -> None:
    parser = RequestParser()
    for dtype in ("FP32", "FP64", "INT32"):  # so that there is something to remember
        parsed(parser.parse, text_of("[1, 2]", dtype=dtype), dtype)
    for numbers, before, after, dtype in requests:
        text = text_of(numbers, before=before, after=after, dtype=dtype)
        for _ in range(2):
            assert parsed(parser.parse, text, dtype) == parsed(parse_infer, text, dtype)


def test_known_words_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = RequestParser()
    first = parsed(parser.parse, text_of("[1, 2]"))
    monkeypatch.setattr("convoy.app.edge.http.infer_request.parse_infer", None)
    again = parsed(parser.parse, text_of("[3.5, -4]"))
    assert again == first._replace(tensors=("float32", 2, np.array([3.5, -4], np.float32).tobytes()))


def test_words_that_never_come_again_are_not_kept_for_ever() -> None:
    parser = RequestParser()
    for number in range(100):
        parsed(parser.parse, text_of("[1, 2]", before=f'"id": "{number}",'))
    assert sum(map(len, parser._forms.values())) <= 16
    for number in range(100):
        body = body_of(text_of("[1, 2]"), b"")
        parser.parse(body, None, served(f"m{number}"), MEMORY)
    assert len(parser._forms) <= 16
