"""HTML and SVG as trees, so that every text and every attribute is escaped by construction.

Knows elements and tables. Knows nothing of what they show.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.etree.ElementTree import Element, tostring

Content = Element | str | None


def element(tag: str, *content: Content, **attributes: str | float) -> Element:
    """An element with its content in order; None is left out. `class_` is `class`, `stroke_width` `stroke-width`."""
    made = Element(tag, {name.rstrip("_").replace("_", "-"): _text(value) for name, value in attributes.items()})
    for one in content:
        add(made, one)
    return made


def add(parent: Element, one: Content) -> None:
    """One more piece of content; ElementTree hangs text that follows an element on that element."""
    if isinstance(one, Element):
        parent.append(one)
    elif one and len(parent):
        parent[-1].tail = (parent[-1].tail or "") + one
    elif one:
        parent.text = (parent.text or "") + one


def table(headings: Sequence[str], rows: Iterable[Sequence[Content]], *, class_: str = "figures") -> Element:
    """A table whose first column names the rows; it scrolls by itself where the page is narrower."""
    head = element("thead", element("tr", *(element("th", heading, scope="col") for heading in headings)))
    lines = [
        element("tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:])) for row in rows
    ]
    made = element("table", head if any(headings) else None, element("tbody", *lines), class_=class_)
    return element("div", made, class_="scroll")


def rendered(tree: Element) -> str:
    """The tree as HTML."""
    return tostring(tree, encoding="unicode", method="html")


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
