"""Records: what is written is what is read, and nothing else is accepted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.models.records import RecordError, from_jsonable, to_jsonable


@dataclass(frozen=True)
class Inner:
    name: str
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Outer:
    kind: Literal["a", "b", 1]
    share: float
    inner: Inner | None
    by_name: dict[str, Inner]
    added_later: bool = False


inners = st.builds(Inner, st.text(), st.lists(st.integers()).map(tuple))
outers = st.builds(
    Outer,
    st.sampled_from(["a", "b", 1]),
    st.floats(allow_nan=False),
    st.none() | inners,
    st.dictionaries(st.text(), inners),
    st.booleans(),
)


@given(outers)
def test_a_record_comes_back_as_it_was(record: Outer) -> None:
    assert from_jsonable(Outer, to_jsonable(record), "r") == record


GOOD: dict[str, Any] = {"kind": "a", "share": 1, "inner": None, "by_name": {}}


def test_a_field_that_was_added_later_may_be_missing() -> None:
    assert from_jsonable(Outer, GOOD, "r") == Outer("a", 1.0, None, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "c"}, r"r\.kind: expected one of"),
        ({"kind": True}, r"r\.kind: expected one of"),
        ({"share": "1"}, r"r\.share: expected float"),
        ({"share": True}, r"r\.share: expected float"),
        ({"inner": {"name": "x"}}, r"r\.inner\.sizes: missing"),
        ({"inner": {"name": "x", "sizes": [1, "2"]}}, r"r\.inner\.sizes\[1\]: expected int"),
        ({"inner": {"name": "x", "sizes": 3}}, r"r\.inner\.sizes: expected a list"),
        ({"by_name": []}, r"r\.by_name: expected an object"),
        ({"by_name": {"k": 1}}, r"r\.by_name\.k: expected an object"),
        ({"typo": 1}, r"r\.typo: unknown field"),
    ],
)
def test_anything_else_names_the_path(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        from_jsonable(Outer, {**GOOD, **change}, "r")
