"""The tables of overload: which rate counts as the peak, and what is compared with it."""

from __future__ import annotations

import io

from PIL import Image

from convoy.loadtest.overload.__main__ import overload_tables
from convoy.loadtest.overload.measure import Company, Offered, Overload
from convoy.loadtest.overload.mix import KINDS, mixed


def offered(rate: float, good_rps: float, *, refused: int = 0, lost: int = 0) -> Offered:
    return Offered(rate, good_rps, int(10 * rate), refused, lost, 1e6 / good_rps)


def test_what_is_left_is_held_against_the_best_rate() -> None:
    found = Overload((offered(80, 80), offered(100, 96), offered(125, 90)), offered(300, 72, refused=2280, lost=1))
    assert found.peak.rate == 100
    assert found.share == 0.75
    text = overload_tables([found], [])
    assert "| where most are good | 100 | 96 | 0 % | 0 | 10,417 |" in text
    assert "| 3 times as many | 300 | 72 | 76 % | 1 | 13,889 |" in text
    assert "Of the highest goodput is left: **0.75** (0.75 to 0.75)." in text
    assert "small" not in text


def test_small_pictures_are_held_against_themselves() -> None:
    text = overload_tables([], [Company(1.0, 4.0, 2.0, 6.0, 7.25), Company(1.0, 4.0, 2.0, 10.0, 7.75)])
    assert "| alone | 1.00 | 4.00 |" in text
    assert "| beside 7.5 large ones a second | 2.00 | 8.00 |" in text
    assert "Their p99 is **2.00** (1.50 to 2.50) times that of alone." in text


def test_the_mix_has_all_sizes_in_one_order() -> None:
    pictures = mixed()
    sizes = [Image.open(io.BytesIO(one)).size for one in pictures]
    for kind in KINDS:
        assert sizes.count(kind.size or (20, 20)) == kind.share
    assert sizes[:20] != sorted(sizes[:20])
    assert 900 < min(map(len, pictures)) < 1500
    assert max(map(len, pictures)) > 1_000_000
    assert pictures == mixed()
