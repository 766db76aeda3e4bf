"""A chart as inline SVG: two axes, and lines, bands, dots and whiskers over them.

Knows scales, ticks and pixels. Colours and strokes are the style sheet's, by class, so that one drawing
serves light, dark and print; names stand in a legend below, where they cannot overlap.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from xml.etree.ElementTree import Element, SubElement

from convoy.export.report.markup import element, extend

Mark = Literal["line", "dashed", "dotted", "dot", "ring", "front"]
# So many the style sheet has.
COLOURS = 6
_WIDTH, _HEIGHT = 520.0, 300.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 62.0, 14.0, 12.0, 46.0
_DOT_PX = 5.0
_MOST_TICKS = 9


@dataclass(frozen=True, slots=True)
class Axis:
    """`label` carries the unit. A logarithmic axis needs `low` above 0. `ticks` None: round values."""

    label: str
    low: float
    high: float
    is_log: bool = False
    ticks: tuple[float, ...] | None = None

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def marked(self) -> tuple[float, ...]:
        """The values that get a line and a number."""
        if self.ticks is not None:
            return self.ticks
        return _log_ticks(self.low, self.high) if self.is_log else _round_ticks(self.low, self.high)


class Chart:
    """Draws in the order of the calls. `name` is unique on the page; `description` is for those who cannot see."""

    def __init__(self, name: str, description: str, x: Axis, y: Axis) -> None:
        self._x, self._y = x, y
        self._legend: list[Element] = []
        self._name = name
        key = re.sub("[^a-z0-9]+", "-", name.lower())
        title, text = f"name-{key}", f"about-{key}"
        self._svg = element(
            "svg",
            element("title", name, id=title),
            element("desc", description, id=text),
            viewBox=f"0 0 {_WIDTH:g} {_HEIGHT:g}",
            role="img",
            aria_labelledby=f"{title} {text}",
        )
        self._draw_axes()

    def line(self, points: Sequence[tuple[float, float]], colour: int, mark: Mark = "line") -> None:
        path = "M" + " L".join(f"{self._px(x):.1f} {self._py(y):.1f}" for x, y in points)
        SubElement(self._svg, "path", {"d": path, "class": f"{mark} c{colour}"})

    def band(self, points: Sequence[tuple[float, float, float]], colour: int) -> None:
        """Between a lower and an upper value at each x."""
        around = [(x, low) for x, low, _ in points] + [(x, high) for x, _, high in reversed(points)]
        corners = " ".join(f"{self._px(x):.1f},{self._py(y):.1f}" for x, y in around)
        SubElement(self._svg, "polygon", {"points": corners, "class": f"band c{colour}"})

    def whisker(self, x: float, low: float, high: float, colour: int) -> None:
        at, foot, top = self._px(x), self._py(low), self._py(high)
        path = f"M{at:.1f} {top:.1f} V{foot:.1f} M{at - 4:.1f} {foot:.1f} H{at + 4:.1f}"
        SubElement(self._svg, "path", {"d": path, "class": f"whisker c{colour}"})

    def dot(self, x: float, y: float, colour: int, says: str, mark: Mark = "dot") -> None:
        """A dot that says something when the mouse rests on it."""
        self._svg.append(
            element(
                "circle",
                element("title", says),
                cx=self._px(x),
                cy=self._py(y),
                r=_DOT_PX,
                class_=f"{mark} c{colour}",
            )
        )

    def explain(self, text: str, colour: int, mark: Mark = "dot") -> None:
        """One more entry of the legend."""
        is_round = mark in ("dot", "ring")
        sample = element("svg", viewBox="0 0 22 12", class_="key", aria_hidden="true")
        shape = {"cx": "11", "cy": "6", "r": "5"} if is_round else {"d": "M0 6 H22"}
        SubElement(sample, "circle" if is_round else "path", {**shape, "class": f"{mark} c{colour}"})
        self._legend.append(element("span", sample, text))

    def figure(self) -> Element:
        """The chart under its name, above its legend."""
        legend = element("div", *self._legend, class_="legend") if self._legend else None
        return element("figure", element("figcaption", self._name), self._svg, legend)

    def _px(self, value: float) -> float:
        return _LEFT + _inside(self._x.place(value)) * (_WIDTH - _LEFT - _RIGHT)

    def _py(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - _inside(self._y.place(value)) * (_HEIGHT - _TOP - _BOTTOM)

    def _draw_axes(self) -> None:
        floor, end = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
        for value in self._x.marked():
            at = self._px(value)
            SubElement(self._svg, "path", {"d": f"M{at:.1f} {_TOP} V{floor}", "class": "grid"})
            extend(self._svg, element("text", number(value), x=at, y=floor + 15, class_="tick middle"))
        for value in self._y.marked():
            at = self._py(value)
            SubElement(self._svg, "path", {"d": f"M{_LEFT} {at:.1f} H{end}", "class": "grid"})
            extend(self._svg, element("text", number(value), x=_LEFT - 6, y=at + 3.5, class_="tick end"))
        SubElement(self._svg, "path", {"d": f"M{_LEFT} {_TOP} V{floor} H{end}", "class": "axis"})
        middle = (_TOP + floor) / 2
        extend(
            self._svg,
            element("text", self._x.label, x=(_LEFT + end) / 2, y=_HEIGHT - 8, class_="label middle"),
            element(
                "text",
                self._y.label,
                x=14,
                y=middle,
                transform=f"rotate(-90 14 {middle:g})",
                class_="label middle",
            ),
        )


def number(value: float) -> str:
    """Three digits that count, thousands apart: 0.0123, 4.56, 78.9, 12,300."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "–"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _inside(place: float) -> float:
    return min(1.0, max(0.0, place))


def _round_ticks(low: float, high: float) -> tuple[float, ...]:
    """About five multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(index * step for index in range(first, last + 1))


def _log_ticks(low: float, high: float) -> tuple[float, ...]:
    """Powers of ten, with their doubles and fivefolds where there is room; thinned where there is not."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    inside: list[float] = []
    for factors in ((1, 2, 5), (1,)):
        ticks = [factor * 10.0**power for power in decades for factor in factors]
        inside = [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
        if len(inside) <= _MOST_TICKS:
            break
    return tuple(inside[:: 1 + len(inside) // _MOST_TICKS])
