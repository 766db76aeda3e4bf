"""What every page is made of: axes, numbers, charts and escaped text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.models.page.axis import Axis, number, spanning
from convoy.models.page.chart import Chart

kinds = st.sampled_from(["linear", "log"])


@given(kinds, st.floats(0.001, 1e6), st.floats(1.01, 1e9), st.floats(0, 1))
def test_an_axis_keeps_order_and_its_numbers_lie_on_it(kind, low, factor, share):
    axis = Axis("x", low, low * factor, kind)
    value = low + share * (low * factor - low)
    assert 0 <= axis.place(value) <= 1
    assert axis.place(low) <= axis.place(value) <= axis.place(low * factor)
    assert all(low * 0.99 <= tick <= low * factor * 1.01 for tick in axis.ticks())
    assert axis.ticks() == sorted(axis.ticks())
    assert len(axis.ticks()) <= 11


@given(kinds, st.floats(0.001, 1e6), st.floats(2, 1e4), st.booleans())
def test_the_title_of_the_y_axis_is_clear_of_its_numbers(kind, low, factor, from_zero):
    y = Axis("images per second", 0 if from_zero and kind == "linear" else low, low * factor, kind)
    chart = Chart("Name", "about", Axis("x", 0, 1), y)
    title = next(one for one in chart.svg.iter("text") if one.text == y.label)
    title_ends_px = float(title.get("x", "")) + 4  # turned, with what hangs below its line on the right
    numbers = [one for one in chart.svg.iter("text") if one.get("class") == "tick end"]
    assert numbers or not y.ticks()
    # Of the usual fonts none has wider figures than seven pixels at this size.
    begin_px = [float(one.get("x", "")) - 7 * len(one.text or "") for one in numbers]
    assert all(px > title_ends_px for px in begin_px)
    # What is drawn begins at the axis, wherever that is.
    chart.line([(0, y.low), (1, y.high)], "line")
    axis = next(one for one in chart.svg.iter("path") if one.get("class") == "axis")
    line = next(one for one in chart.svg.iter("path") if one.get("class") == "line")
    assert float(axis.get("d", "").split()[0][1:]) == pytest.approx(float(line.get("d", "").split()[0][1:]), abs=0.1)


def test_each_further_nine_takes_the_same_room():
    axis = Axis("share", 0, 0.9999, "tail")
    places = [axis.place(share) for share in (0, 0.9, 0.99, 0.999, 0.9999)]
    assert np.diff(places) == pytest.approx([0.25] * 4)
    assert [axis.says(tick) for tick in axis.ticks()] == ["50 %", "90 %", "99 %", "99.9 %", "99.99 %"]


def test_a_wide_span_is_logarithmic_where_zero_may_be_left_out():
    assert spanning("x", [1, 100], from_zero=False).kind == "log"
    assert spanning("x", [1, 100]).kind == "linear"
    assert spanning("x", []).high > 0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.01234, "0.0123"),
        (4.5, "4.5"),
        (4.56, "4.56"),
        (100, "100"),
        (78.94, "78.9"),
        (12345, "12,345"),
        (1e6, "1,000,000"),
        (float("inf"), "–"),
    ],
)
def test_numbers_have_three_digits_that_count(value, text):
    assert number(value) == text
