"""What was found out a moment ago: the last few hundred, and never more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from convoy.app.edge.oip.recent import Recent

MOST = 256


@given(st.lists(st.integers(0, 600), max_size=2000))
def test_it_keeps_the_last_and_no_more_than_a_few_hundred(keys: list[int]) -> None:
    recent, newest = Recent[int, int](), dict[int, int]()
    for time, key in enumerate(keys):
        recent.keep(key, time)
        newest[key] = time
        assert recent.find(key) == time
    found = {key: value for key in range(601) if (value := recent.find(key)) is not None}
    assert len(found) <= MOST
    assert found.items() <= newest.items(), "something is found that another has taken the place of"
    if len(newest) <= MOST:
        assert found == newest


def test_another_value_for_what_is_kept_forgets_nothing() -> None:
    recent = Recent[int, str]()
    for key in range(MOST):
        recent.keep(key, "old")
    recent.keep(0, "new")
    assert [recent.find(key) for key in (0, 1, MOST - 1)] == ["new", "old", "old"]
