"""What was found out a moment ago: the last few hundred, and never more."""

from __future__ import annotations

from convoy.app.edge.oip.recent import Recent

MOST = 256


def test_it_keeps_the_last_and_no_more_than_a_few_hundred() -> None:
    recent = Recent[int, int]()
    for key in range(10 * MOST):
        recent.keep(key, -key)
        assert recent.find(key) == -key
    kept = [key for key in range(10 * MOST) if recent.find(key) is not None]
    assert 1 <= len(kept) <= MOST
    assert kept == list(range(kept[0], 10 * MOST)), "what is kept is what came last"
    assert all(recent.find(key) == -key for key in kept)


def test_another_value_for_what_is_kept_forgets_nothing() -> None:
    recent = Recent[int, str]()
    for key in range(MOST):
        recent.keep(key, "old")
    recent.keep(0, "new")
    assert [recent.find(key) for key in (0, 1, MOST - 1)] == ["new", "old", "old"]
