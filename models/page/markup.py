"""HTML and SVG as trees, so that every text and attribute is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from string import Template
from xml.etree.ElementTree import Element, tostring

Content = Element | str | None
_FRAME = Path(__file__).with_name("page.html")
# Colours and strokes of charts, for light, dark and print.
CHART_STYLE = Path(__file__).with_name("chart.css").read_text(encoding="utf-8")


def page(title: str, body: Element, style: str = "") -> str:
    """A whole page with the common style; `style` is additional CSS."""
    frame = Template(_FRAME.read_text(encoding="utf-8"))
    return frame.substitute(title=html.escape(title), style=CHART_STYLE + style, body=rendered(body))


def section(title: str, *content: Element | None) -> list[Element]:
    """A heading and its contents; nothing if there are none."""
    there = [one for one in content if one is not None]
    return [element("h2", title), *there] if there else []


def card(name: str, figure: str, note: str) -> Element:
    """A key figure: its name, its value, and a note."""
    return element("div", element("span", name), element("b", figure), element("span", note), class_="card")


def element(tag: str, *content: Content, **attributes: str | float) -> Element:
    """An element with its content in order; None is left out. `class_` is `class`, `stroke_width` is `stroke-width`."""
    made = Element(tag, {name.rstrip("_").replace("_", "-"): _text(value) for name, value in attributes.items()})
    for one in content:
        add(made, one)
    return made


def add(parent: Element, one: Content) -> None:
    """Add content; in ElementTree, text after an element belongs to that element."""
    if isinstance(one, Element):
        parent.append(one)
    elif one and len(parent):
        parent[-1].tail = (parent[-1].tail or "") + one
    elif one:
        parent.text = (parent.text or "") + one


def table(headings: Sequence[str], rows: Iterable[Sequence[Content]], *, class_: str = "figures") -> Element:
    """A table whose first column names the rows; it scrolls on narrow pages."""
    head = element("thead", element("tr", *(element("th", heading, scope="col") for heading in headings)))
    lines = [element("tr", element("th", row[0], scope="row"), *map(_cell, row[1:])) for row in rows]
    made = element("table", head if any(headings) else None, element("tbody", *lines), class_=class_)
    return element("div", made, class_="scroll")


def spanning_cell(words: str, columns: int) -> Element:
    """One cell of a `table` that spans several columns, for a remark instead of figures."""
    return element("td", words, colspan=columns, class_="span")


def _cell(content: Content) -> Element:
    return content if isinstance(content, Element) and content.tag == "td" else element("td", content)


def rendered(tree: Element) -> str:
    """The tree as HTML."""
    return tostring(tree, encoding="unicode", method="html")


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
