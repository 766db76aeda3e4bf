"""The experiments' half of the page: every question with its verdict on every GPU, and the figures behind it.

What was not run stands there as not run. Knows Markdown, the table and the books; judges nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.gpu.proof import parts
from tests.gpu.proof.book import Book, Outcome
from tests.gpu.proof.markdown import table

_NOT_RUN = "not run"


def questions(books: Sequence[Book]) -> str:
    """All experiments, part by part, with a column for each GPU."""
    gpus = [book.gpu for book in books] or ["any GPU"]
    tables = []
    for part, title in parts.TITLES.items():
        rows = [
            (one.name, one.question, one.expected, *(_verdicts(one.name, books) or (_NOT_RUN,)))
            for one in parts.of_part(part)
        ]
        tables.append(table(f"Part {part}: {title}", ("experiment", "question", "expected", *gpus), rows))
    return "\n".join(["## What is asked\n", *tables])


def _verdicts(name: str, books: Sequence[Book]) -> tuple[str, ...]:
    found = [book.of(name) for book in books]
    return tuple(_NOT_RUN if one is None else f"**{one.verdict}**" for one in found)


def answers(book: Book) -> str:
    """What one GPU answered: a sentence each, and then all figures."""
    order = {one.name: index for index, one in enumerate(parts.EXPERIMENTS)}
    known = sorted(book.outcomes, key=lambda one: order.get(one.experiment, len(order)))
    rows = [(one.experiment, one.verdict, one.told, _ended(one), one.at) for one in known]
    missing = [one.name for one in parts.EXPERIMENTS if book.of(one.name) is None]
    blocks = [
        table("Experiments", ("experiment", "verdict", "what came of it", "ended", "when"), rows),
        f"Not run: {', '.join(missing)}.\n" if missing else "Everything was run.\n",
        *(_details(one) for one in known),
    ]
    return "\n".join(block for block in blocks if block)


def _ended(one: Outcome) -> str:
    return f"{one.ended} in {one.seconds:.0f} s"


def _details(one: Outcome) -> str:
    if not one.figures and not one.facts:
        return ""
    told = [f"{name} = {_number(value)}" for name, value in one.figures.items()]
    told += [f"{name}: {value}" for name, value in one.facts.items()]
    lines = [f"<details><summary>{one.experiment}</summary>", "", *(f"- {line}" for line in told), "", "</details>", ""]
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:.4g}"
