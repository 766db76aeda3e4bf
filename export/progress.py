"""Progress of long work. `convoy.export.terminal` draws it; by default it is not shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Step:
    """A running step that is not shown."""

    def advance(self, count: int = 1) -> None:
        """`count` more of the step's units are done."""

    def expect(self, total: int) -> None:
        """The step has `total` units, which was unknown when it began."""


class Progress:
    """A sequence of named steps that is not shown."""

    def say(self, line: str) -> None:
        """Show a line of text."""

    @contextmanager
    def step(self, name: str, total: int | None = None) -> Iterator[Step]:
        """Begin a step of `total` units, or of unknown length."""
        yield IGNORED


IGNORED = Step()
SILENT = Progress()
