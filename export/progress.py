"""How long work reports its progress. `convoy.export.terminal` draws it; by default it is not shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Step:
    """One step under way, which is not shown."""

    def advance(self, count: int = 1) -> None:
        """`count` more of the step's units are done."""

    def expect(self, total: int) -> None:
        """The step has `total` units, which was not known when it was entered."""


class Progress:
    """A sequence of named steps, which is not shown."""

    def say(self, line: str) -> None:
        """Show a line of text."""

    @contextmanager
    def step(self, name: str, total: int | None = None) -> Iterator[Step]:
        """Enter a step of `total` units, or of unknown length."""
        yield IGNORED


IGNORED = Step()
SILENT = Progress()
