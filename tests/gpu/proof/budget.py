"""How long the proof may take, and what it says meanwhile.

A lent machine is taken back at a fixed time, so that whatever was not written down by then is lost: every
step asks how much is left before it begins. Knows clocks; knows nothing of what takes the time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

PART_BUDGET_S = 480.0


class NoTimeLeft(Exception):
    """The step would not end in time; the message says what it wanted."""


class Budget:
    """`total_s` seconds from now on. A part of it, `share`, ends with its own limit or with the whole."""

    def __init__(self, total_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start_s = clock()
        self._end_s = self._start_s + total_s

    @property
    def spent_s(self) -> float:
        return self._clock() - self._start_s

    @property
    def left_s(self) -> float:
        return max(0.0, self._end_s - self._clock())

    def share(self, most_s: float) -> Budget:
        """At most so much of what is left."""
        return Budget(min(most_s, self.left_s), self._clock)

    def require(self, needed_s: float, what: str) -> None:
        """Raises NoTimeLeft where less than `needed_s` is left."""
        if self.left_s < needed_s:
            raise NoTimeLeft(f"no time left: {what} takes about {needed_s:.0f} s, {self.left_s:.0f} s remain")


class Journal:
    """Lines to stderr, each with the seconds since the start."""

    def __init__(self, budget: Budget, say: Callable[[str], None] | None = None) -> None:
        self._budget = budget
        self._say = say or (lambda line: print(line, file=sys.stderr, flush=True))

    def tell(self, text: str) -> None:
        self._say(f"[{self._budget.spent_s:6.1f} s] {text}")
