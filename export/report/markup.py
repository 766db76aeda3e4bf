"""HTML and SVG as trees, so that every text and every attribute is escaped by construction.

Knows elements, tables and figures. Knows nothing of what they show.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.etree.ElementTree import Element, SubElement, tostring

Content = Element | str | None


def element(tag: str, *content: Content, **attributes: str | float) -> Element:
    """An element with its content in order; None is left out. `class_` is `class`, `stroke_width` `stroke-width`."""
    made = Element(tag, {name.rstrip("_").replace("_", "-"): _text(value) for name, value in attributes.items()})
    return extend(made, *content)


def extend(parent: Element, *content: Content) -> Element:
    """The parent, with more at its end."""
    for one in content:
        if isinstance(one, Element):
            parent.append(one)
        elif one:
            # ElementTree hangs text that follows an element on that element.
            if len(parent):
                parent[-1].tail = (parent[-1].tail or "") + one
            else:
                parent.text = (parent.text or "") + one
    return parent


def table(headings: Sequence[str], rows: Iterable[Iterable[Content]], *, class_: str = "figures") -> Element:
    """A table whose first column names the rows; it scrolls by itself where the page is narrower."""
    made = element("table", class_=class_)
    if any(headings):
        head = SubElement(SubElement(made, "thead"), "tr")
        for heading in headings:
            head.append(element("th", heading, scope="col"))
    body = SubElement(made, "tbody")
    for row in rows:
        line = SubElement(body, "tr")
        for index, cell in enumerate(row):
            line.append(element("td", cell) if index else element("th", cell, scope="row"))
    return element("div", made, class_="scroll")


def rendered(tree: Element) -> str:
    """The tree as HTML."""
    return tostring(tree, encoding="unicode", method="html")


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
