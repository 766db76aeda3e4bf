"""How long work reports how far it is, without knowing who listens: `convoy.export.terminal` draws it on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Step:
    """One step under way. This one is not shown to anybody."""

    def advance(self, count: int = 1) -> None:
        """So many more of the step's units are done."""

    def expect(self, total: int) -> None:
        """The step has so many units, which was not known when it was entered."""


class Progress:
    """A sequence of named steps. This one is not shown to anybody."""

    @contextmanager
    def step(self, name: str, total: int | None = None) -> Iterator[Step]:
        """Enter a step of `total` units, or of unknown length."""
        yield IGNORED


IGNORED = Step()
SILENT = Progress()
