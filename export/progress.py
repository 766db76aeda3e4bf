"""How long work reports how far it is, without knowing who listens.

The pipeline takes a `Progress` and never prints; `convoy.export.terminal` draws it, tests and libraries pass `SILENT`.
What runs inside of a step is given a `Step`, or `IGNORED`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Step(Protocol):
    """One step under way."""

    def advance(self, count: int = 1) -> None:
        """So many more of the step's units are done."""

    def expect(self, total: int) -> None:
        """The step has so many units, which was not known when it was entered."""


class Progress(Protocol):
    """A sequence of named steps."""

    def step(self, name: str, total: int | None = None) -> AbstractContextManager[Step]:
        """Enter a step of `total` units, or of unknown length."""


class _SilentStep:
    def advance(self, count: int = 1) -> None:
        return None

    def expect(self, total: int) -> None:
        return None


class _Silent:
    @contextmanager
    def step(self, name: str, total: int | None = None) -> Iterator[Step]:
        yield IGNORED


IGNORED: Step = _SilentStep()
SILENT: Progress = _Silent()
