"""Memory that is used again: by one at a time, up to a bound, and not for ever."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.models.kept_memory import KeptMemory


def address(kept: KeptMemory, nbytes: int) -> int:
    with kept.begin_decode(nbytes) as memory:
        assert memory.shape == (nbytes,)
        memory[:] = 7
        return memory.ctypes.data


def test_what_is_given_back_is_lent_again_to_who_needs_no_more() -> None:
    kept = KeptMemory(1000)
    first = address(kept, 600)
    assert address(kept, 600) == first == address(kept, 10)
    assert kept.kept_bytes == 600


def test_two_at_once_never_have_the_same() -> None:
    kept = KeptMemory(1000)
    address(kept, 400)
    with kept.begin_decode(400) as one, kept.begin_decode(400) as other:
        one[:], other[:] = 1, 2
        assert set(one) == {1}
    assert kept.kept_bytes == 800


def test_an_error_in_the_block_gives_it_back_too() -> None:
    kept = KeptMemory(1000)
    with pytest.raises(ValueError, match="broken"), kept.begin_decode(300):
        raise ValueError("broken")
    assert kept.kept_bytes == 300


@given(st.lists(st.integers(0, 1500), max_size=30), st.integers(1, 5))
def test_no_more_is_kept_than_the_bound_and_the_largest_of_it(sizes: list[int], at_once: int) -> None:
    kept = KeptMemory(1000)
    for start in range(0, len(sizes), at_once):
        with ExitStack() as stack:
            for nbytes in sizes[start : start + at_once]:
                stack.enter_context(kept.begin_decode(nbytes))
        assert kept.kept_bytes <= 1000
    largest = max((nbytes for nbytes in sizes if nbytes <= 1000), default=0)
    assert kept.kept_bytes >= largest


def test_what_nobody_uses_goes_back_at_the_second_look() -> None:
    kept = KeptMemory(1000)
    address(kept, 500)
    with kept.begin_decode(100), kept.begin_decode(200):
        pass
    assert kept.give_back_unused() == 800 - 100, "500 for the first, and a piece for the second"
    address(kept, 200)
    assert kept.give_back_unused() == 200
    assert kept.give_back_unused() == 0 == kept.kept_bytes


def test_many_threads() -> None:
    kept = KeptMemory(1000)
    wrong = []

    def work(number: int) -> None:
        for _ in range(300):
            with kept.begin_decode(50 * number) as memory:
                memory[:] = number
                wrong.extend({number} ^ set(memory.tolist()))

    with ThreadPoolExecutor(5) as threads:
        list(threads.map(work, range(1, 6)))
    assert not wrong
    assert kept.kept_bytes <= 1000
