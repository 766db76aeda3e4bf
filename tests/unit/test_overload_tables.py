"""The tables of overload: which rate counts as the peak, and what is compared with it."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import cast

import pytest
from PIL import Image

from convoy.loadtest.overload.__main__ import overload_tables
from convoy.loadtest.overload.measure import TRIES, Company, Offered, Overload, on_time
from convoy.loadtest.overload.mix import KINDS, mixed
from convoy.loadtest.results import Result


def offered(rate: float, good_rps: float, *, refused: int = 0, lost: int = 0, late_ms: float = 0.5) -> Offered:
    return Offered(rate, good_rps, int(10 * rate), refused, lost, 1e6 / good_rps, late_ms)


def test_what_is_left_is_held_against_the_best_rate() -> None:
    over = offered(300, 72, refused=2280, lost=1, late_ms=2.0)
    found = Overload((offered(80, 80), offered(100, 96), offered(125, 90)), over, 234.5)
    assert found.peak.rate == 100
    assert found.share == 0.75
    text = overload_tables([found], [])
    assert "| where most are good | 100 | 96 | 0 % | 0 | 10,417 | 0.5 |" in text
    assert "| 3 times as many | 300 | 72 | 76 % | 1 | 13,889 | 2.0 |" in text
    assert "Of the highest goodput is left: **0.75** (0.75 to 0.75)." in text
    assert "A refusal costs 234 us of the server's CPU (234 to 234)" in text
    assert "small" not in text


def test_small_pictures_are_held_against_themselves() -> None:
    text = overload_tables(
        [], [Company(1.0, 4.0, 2.0, 6.0, 7.25, 0.5, 1.5), Company(1.0, 4.0, 2.0, 10.0, 7.75, 0.25, 2.5)]
    )
    assert "| alone | 1.00 | 4.00 | 0.5 |" in text
    assert "| beside 7.5 large ones a second | 2.00 | 8.00 | 2.5 |" in text
    assert "Their p99 is **2.00** (1.50 to 2.50) times that of alone." in text


@pytest.mark.parametrize(("late", "kept"), [(0, 0), (1, 1), (TRIES - 1, TRIES - 1), (9, TRIES - 1)])
def test_where_the_generator_was_late_it_is_sent_again_but_not_for_ever(late: int, kept: int) -> None:
    tries = iter(range(10))

    def send() -> tuple[Result, float]:
        number = next(tries)
        return cast(Result, SimpleNamespace(verdict=SimpleNamespace(void="late" if number < late else None))), number

    assert on_time(send)[1] == kept


@pytest.mark.long
def test_the_mix_has_all_sizes_in_one_order() -> None:
    pictures = mixed()
    sizes = [Image.open(io.BytesIO(one)).size for one in pictures]
    for kind in KINDS:
        assert sizes.count(kind.size or (20, 20)) == kind.share
    assert sizes[:20] != sorted(sizes[:20])
    assert 900 < min(map(len, pictures)) < 1500
    assert max(map(len, pictures)) > 1_000_000
    assert pictures == mixed()
