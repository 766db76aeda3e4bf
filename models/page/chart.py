"""A chart as inline SVG: two axes, with lines, bands, bars, dots and areas.

Colours and strokes are in `chart.css`, by class, so one drawing serves light, dark and print. Names are in a legend
below, where they cannot overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from xml.etree.ElementTree import Element

from convoy.models.page.axis import Axis
from convoy.models.page.markup import add, element

WIDTH, HEIGHT = 560.0, 300.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 16.0, 12.0, 46.0
ROOM_PX = 32.0  # between two labels below the axis
DIGIT_PX = 7.0  # in the widest of the usual fonts
TITLE_PX = 18.0  # what the title of the y axis takes on the left
# What stands in the legend for a class that is drawn with another shape than a line.
_SAMPLES: dict[str, tuple[str, dict[str, str | float]]] = {
    **dict.fromkeys(("dot", "ring"), ("circle", {"cx": 11, "cy": 6, "r": 5})),
    **dict.fromkeys(("zone", "shade"), ("rect", {"x": 3, "y": 1, "width": 16, "height": 10})),
}

Point = tuple[float, float]


class Chart:
    """Draws in the order of the calls. `about` is the text for screen readers; `width` and `height` are pixels.

    `class_` is a class of `chart.css` with its colour: "line k0", "dashed bad", "dot k3". `means` is the text for the
    legend.
    """

    def __init__(
        self, name: str, about: str, x: Axis, y: Axis, *, width: float = WIDTH, height: float = HEIGHT
    ) -> None:
        self.name, self._x, self._y = name, x, y
        self._height, self._floor, self._end = height, height - BOTTOM, width - RIGHT
        self._left = left_of(y)
        self.legend: list[tuple[str, str]] = []
        self.svg = element("svg", viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=f"{name}. {about}")
        self._draw_axes()

    def line(self, points: Sequence[Point], class_: str, means: str = "") -> None:
        """Connect the points in order."""
        self.explain(means, class_)
        if points:
            path = "M" + " L".join(f"{self._px(x):.1f} {self._py(y):.1f}" for x, y in points)
            self._draw("path", d=path, class_=class_)

    def broken_line(self, points: Sequence[tuple[float, float | None]], class_: str) -> None:
        """Connect the points in order, with gaps where there is no value."""
        for there, group in groupby(points, lambda point: point[1] is not None):
            if there:
                self.line([(x, y) for x, y in group if y is not None], f"{class_} round")

    def band(self, points: Sequence[tuple[float, float, float]], class_: str) -> None:
        """Fill between a lower and an upper value at each x."""
        around = [(x, low) for x, low, _ in points] + [(x, high) for x, _, high in reversed(points)]
        corners = " ".join(f"{self._px(x):.1f},{self._py(y):.1f}" for x, y in around)
        self._draw("polygon", points=corners, class_=f"band {class_}")

    def whisker(self, x: float, low: float, high: float, class_: str) -> None:
        """An interval at one x."""
        at, foot, top = self._px(x), self._py(low), self._py(high)
        ends = f"M{at - 4:.1f} {foot:.1f} h8 M{at - 4:.1f} {top:.1f} h8"
        self._draw("path", d=f"M{at:.1f} {top:.1f} V{foot:.1f} {ends}", class_=f"whisker {class_}")

    def dot(self, x: float, y: float, says: str, class_: str, means: str = "") -> None:
        """A dot with a tooltip."""
        self.explain(means, class_)
        self._draw("circle", element("title", says), cx=self._px(x), cy=self._py(y), r=5, class_=class_)

    def bar(self, x_from: float, x_to: float, y: float, says: str, class_: str) -> None:
        """A bar from the floor up."""
        left, top = self._px(x_from), self._py(y)
        width = max(1.0, self._px(x_to) - left)
        shape = {"x": left, "y": top, "width": width, "height": self._floor - top}
        self._draw("rect", element("title", says), class_=f"bar {class_}", **shape)

    def area(self, x_from: float, x_to: float, says: str, class_: str) -> None:
        """Mark a range of the x axis with a text, from top to floor."""
        left = self._px(x_from)
        shape = {"x": left, "y": TOP, "width": self._px(x_to) - left, "height": self._floor - TOP}
        self._draw("rect", element("title", says), class_=class_, **shape)

    def level(self, y: float, class_: str, means: str = "") -> None:
        """A horizontal line from end to end."""
        self.explain(means, class_)
        if self._y.low < y <= self._y.high:
            self._draw("path", d=f"M{self._left} {self._py(y):.1f} H{self._end}", class_=class_)

    def upright(self, x: float, class_: str, means: str = "") -> None:
        """A vertical line from top to floor."""
        self.explain(means, class_)
        self._draw("path", d=f"M{self._px(x):.1f} {TOP} V{self._floor}", class_=class_)

    def words(self, x: float, y: float, text: str, class_: str = "tick") -> None:
        """A short text that begins a little to the right of x."""
        add(self.svg, element("text", text, x=self._px(x) + 3, y=self._py(y) + 3.5, class_=class_))

    def explain(self, text: str, class_: str) -> None:
        """Add an entry to the legend, if there is a text for it."""
        if text:
            self.legend.append((text, class_))

    def figure(self, note: str = "") -> Element:
        """The chart below its title and above its legend."""
        return element(
            "figure",
            element("figcaption", self.name),
            self.svg,
            element("div", *(_explained(*one) for one in self.legend), class_="legend") if self.legend else None,
            element("p", note, class_="note") if note else None,
        )

    def _draw(self, tag: str, *content: Element, **attributes: str | float) -> None:
        add(self.svg, element(tag, *content, **attributes))

    def _px(self, value: float) -> float:
        return self._left + self._x.place(value) * (self._end - self._left)

    def _py(self, value: float) -> float:
        return self._floor - self._y.place(value) * (self._floor - TOP)

    def _draw_axes(self) -> None:
        taken_px = 0.0
        for value in self._x.ticks():
            at = self._px(value)
            self._draw("path", d=f"M{at:.1f} {TOP} V{self._floor}", class_="grid")
            if at - taken_px >= ROOM_PX:
                add(self.svg, element("text", self._x.says(value), x=at, y=self._floor + 15, class_="tick middle"))
                taken_px = at
        for value in self._y.ticks():
            at = self._py(value)
            self._draw("path", d=f"M{self._left} {at:.1f} H{self._end}", class_="grid")
            add(self.svg, element("text", self._y.says(value), x=self._left - 6, y=at + 3.5, class_="tick end"))
        self._draw("path", d=f"M{self._left} {TOP} V{self._floor} H{self._end}", class_="axis")
        middle = (TOP + self._floor) / 2
        x_label = element(
            "text", self._x.label, x=(self._left + self._end) / 2, y=self._height - 8, class_="label middle"
        )
        turned = f"rotate(-90 11 {middle:g})"
        y_label = element("text", self._y.label, x=11, y=middle, transform=turned, class_="label middle")
        add(self.svg, x_label)
        add(self.svg, y_label)


def left_of(y: Axis) -> float:
    """The position of the y axis, which leaves room for its longest label and its title."""
    longest = max((len(y.says(value)) for value in y.ticks()), default=0)
    return max(LEFT, TITLE_PX + DIGIT_PX * longest + 6)


def _explained(text: str, class_: str) -> Element:
    """A sample of this class and its meaning."""
    shape, place = _SAMPLES.get(class_.partition(" ")[0], ("path", {"d": "M0 6 H22"}))
    sample = element(
        "svg", element(shape, class_=class_, **place), viewBox="0 0 22 12", class_="key", aria_hidden="true"
    )
    return element("span", sample, text)
