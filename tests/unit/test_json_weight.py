"""What is told of a request's JSON before it is read holds for all that may be in it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.app.http.json_documents import Weight, check_weight, needed_bytes, weigh
from convoy.app.scheduling.request import ModelKey
from convoy.models.errors import InvalidRequest
from convoy.models.spec import TensorSpec

BESIDE = 1 << 16
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=4)),
    max_leaves=20,
)


def served(*shapes: tuple[int, ...], batch: int = 4, dtype: str = "UINT8") -> Any:
    inputs = tuple(TensorSpec(f"in{number}", dtype, shape) for number, shape in enumerate(shapes))
    return SimpleNamespace(key=ModelKey("model", 1), spec=SimpleNamespace(inputs=inputs, max_batch_size=batch))


def count(value: Any) -> tuple[int, int]:
    """So many values that are no lists, and so many lists and objects."""
    if not isinstance(value, list | dict):
        return 1, 0
    inside = [count(one) for one in (value.values() if isinstance(value, dict) else value)]
    return sum(values for values, _ in inside), 1 + sum(lists for _, lists in inside)


@given(anything)
def test_no_document_has_more_than_its_weight(document: Any) -> None:
    text = json.dumps(document).encode()
    weight, (values, lists) = weigh(memoryview(text)), count(document)
    assert weight.nbytes == len(text)
    assert weight.values >= values
    assert weight.lists >= lists


@pytest.mark.parametrize("nbytes", [0, 1, (64 << 10) - 1, 64 << 10, (64 << 10) + 1, 200_000])
def test_every_byte_is_looked_at_once(nbytes: int) -> None:
    for character, weight in ((",", (nbytes + 1, 0)), ("[", (1, nbytes)), ("{", (1, nbytes)), ("]", (1, 0))):
        assert weigh(memoryview(character.encode() * nbytes)) == (nbytes, *weight)
    assert weigh(memoryview(bytes(range(256)) * 300)) == (256 * 300, 301, 600)


@pytest.mark.parametrize("batch", [0, 1, 4])
def test_what_the_inputs_hold_flat_or_nested_is_let_in(batch: int) -> None:
    model = served((300, 100, 3), (50, 50), batch=batch)
    samples = max(batch, 1)
    first = [[[[0] * 3] * 100] * 300] * samples
    second = [[[0] * 50] * 50] * samples
    weight = weigh(memoryview(json.dumps([first, second]).encode()))
    check_weight(weight, model)
    check_weight(weight._replace(values=weight.values + BESIDE - 10, lists=weight.lists + BESIDE - 10), model)
    with pytest.raises(InvalidRequest, match=r"in0, in1.* hold .* at most, in a batch of \d"):
        check_weight(weight._replace(values=weight.values + BESIDE + 10), model)
    with pytest.raises(InvalidRequest, match=r"nesting like .*in0, in1.* flat lists"):
        check_weight(weight._replace(lists=weight.lists + BESIDE + 10), model)


@pytest.mark.parametrize("model", [served((-1, 3)), served((3,), (-1,)), served((3,), dtype="BYTES")])
def test_where_the_model_sets_no_bound_there_is_none(model: Any) -> None:
    check_weight(Weight(1 << 40, 1 << 40, 1 << 40), model)


def test_strings_and_lists_take_more_memory() -> None:
    weight = Weight(1000, 100, 10)
    numbers, strings = (needed_bytes(weight, served((3,), dtype=dtype)) for dtype in ("UINT8", "BYTES"))
    assert 1000 + 100 * 64 < numbers < strings
    assert needed_bytes(weight._replace(lists=11), served((3,))) > numbers
