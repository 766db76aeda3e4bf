"""A tensor's bytes, to and from arrays; strings in every shape and state."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.models.spec import NUMPY_DTYPES, TensorSpec
from convoy.models.tensors import (
    MalformedStrings,
    as_numbers,
    from_bytes,
    objection_to_strings,
    pack,
    random_values,
    to_bytes,
    unpack,
)
from tests.support.fake_engine import blank

STRINGS = TensorSpec("x", "BYTES", (-1,))


@given(st.lists(st.binary(max_size=50), max_size=20))
def test_strings_survive_packing(strings: list[bytes]) -> None:
    packed = memoryview(pack(strings))
    assert unpack(packed) == strings
    assert objection_to_strings(packed, len(strings), "input 'x'", text_only=False) == ""
    assert from_bytes(packed, STRINGS, (len(strings),)).tolist() == strings


@given(st.binary(max_size=200), st.integers(0, 50))
def test_any_bytes_are_strings_or_are_refused(data: bytes, count: int) -> None:
    """What is found good can be read, and what cannot be read is found bad."""
    view = memoryview(data)
    objection = objection_to_strings(view, count, "input 'x'", text_only=False)
    if not objection:
        strings = unpack(view)
        assert len(strings) == count
        assert bytes(pack(strings)) == data
        return
    if "unexpected number" in objection:
        assert len(unpack(view)) != count
        return
    with pytest.raises(MalformedStrings) as caught:
        unpack(view)
    assert caught.value.detail in objection


@given(st.lists(st.binary(max_size=8), min_size=1, max_size=5))
def test_only_text_is_text(strings: list[bytes]) -> None:
    objection = objection_to_strings(memoryview(pack(strings)), len(strings), "input 'x'", text_only=True)
    try:
        b"\0".join(strings).decode()
    except UnicodeDecodeError:
        assert "is not UTF-8" in objection
    else:
        assert objection == ""


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
def test_every_dtype_goes_to_bytes_and_back(dtype: str, shape: tuple[int, ...]) -> None:
    spec = TensorSpec("x", dtype, shape)
    for array in (blank(spec, shape), random_values(np.random.default_rng(3), spec, shape)):
        assert (array.shape, array.dtype) == (shape, NUMPY_DTYPES[dtype])
        back = from_bytes(to_bytes(array, spec), spec, shape)
        assert back.shape == shape
        assert bytes(to_bytes(back, spec)) == bytes(to_bytes(array, spec))


def test_brain_floats_are_the_upper_half_of_floats() -> None:
    bits = np.array([0x3F80, 0xC000, 0x7F80, 0x0000], "<u2").view("V2")
    assert as_numbers(bits).tolist() == [1.0, -2.0, float("inf"), 0.0]
    drawn = random_values(np.random.default_rng(1), TensorSpec("x", "BF16", (100,)), (100,))
    numbers = as_numbers(drawn)
    assert ((numbers >= 0) & (numbers <= 100)).all()
    assert len(np.unique(numbers)) > 50
