"""How long work reports how far it is, without knowing who listens.

The pipeline takes a `Progress` and never prints; `convoy.export.terminal` draws it, tests and libraries pass `SILENT`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Step(Protocol):
    """One step under way."""

    def advance(self, count: int = 1) -> None:
        """So many more of the step's units are done."""


class Progress(Protocol):
    """A sequence of named steps."""

    def step(self, name: str, total: int | None = None) -> AbstractContextManager[Step]:
        """Enter a step of `total` units, or of unknown length."""


class _SilentStep:
    def advance(self, count: int = 1) -> None:
        return None


class _Silent:
    @contextmanager
    def step(self, name: str, total: int | None = None) -> Iterator[Step]:
        yield _SilentStep()


SILENT: Progress = _Silent()
