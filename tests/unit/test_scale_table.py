"""The table of what Convoy costs behind Ray Serve."""

from __future__ import annotations

from convoy.loadtest.scale.__main__ import scale_table
from convoy.loadtest.scale.measure import ScalePair, ScaleTrial


def trial(form: str, connections: int, cpu_us: float) -> ScaleTrial:
    return ScaleTrial(form, connections, 1e6 / cpu_us, cpu_us, 1.0, 2.0)


def test_a_form_is_compared_with_what_was_measured_beside_it() -> None:
    pairs = [ScalePair(trial("plain", 16, plain), trial("lean", 16, lean)) for plain, lean in ((50, 100), (60, 90))]
    pairs.append(ScalePair(trial("plain", 16, 100), trial("lean", 16, 300)))
    rows = scale_table(pairs).splitlines()
    assert len(rows) == 2 + 2
    assert "| `convoy serve` | 16 |" in rows[2]
    assert "| 60 µs | 1.00 |" in rows[2]
    assert "| 100 µs | 2.00 |" in rows[3]  # the median of 2, 1.5 and 3, and not of medians
