"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Nothing where there are no rows."""
    if not rows:
        return ""
    lines = [f"### {title}", "", _line(head), "|" + "---|" * len(head), *(_line(row) for row in rows), ""]
    return "\n".join(lines)


def _line(cells: Sequence[object]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |"
