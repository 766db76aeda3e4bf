"""Writes down what happens to every request, while it happens.

Knows rows and distinct problems. Draws no conclusions: that is statistics'.
"""

from __future__ import annotations

from convoy.loadtest.problems import Problem
from convoy.loadtest.rows import GOOD, PENDING, Rows

MAX_PROBLEMS = 64  # distinct error texts kept; a server may put a number into each of a million


class Recorder:
    """A ticket is a row's number. An outcome is PENDING, GOOD, or 1 + an index into `problems`."""

    def __init__(self, rows: Rows) -> None:
        self._header = rows.header
        self._intended_ns = rows.intended_ns
        self._taken_ns = rows.taken_ns
        self._finished_ns = rows.finished_ns
        self._outcome = rows.outcome
        self._begun = 0
        self._codes: dict[Problem, int] = {}
        self.problems: list[Problem] = []
        self.capacity = len(rows.outcome)
        self.good = 0
        self.failed = 0

    def begin(self, intended_ns: int, taken_ns: int) -> int:
        """A request was due at `intended_ns` and the generator took it up at `taken_ns`."""
        ticket = self._begun
        self._intended_ns[ticket] = intended_ns
        self._taken_ns[ticket] = taken_ns
        self._outcome[ticket] = PENDING
        self._begun = ticket + 1
        return ticket

    def intended_ns(self, ticket: int) -> int:
        return int(self._intended_ns[ticket])

    def finish(self, ticket: int, now_ns: int, problem: Problem | None) -> None:
        """A request ended; `problem` None: with a good answer."""
        self._finished_ns[ticket] = now_ns
        if problem is None:
            self._outcome[ticket] = GOOD
            self.good += 1
        else:
            self._outcome[ticket] = self._code(problem)
            self.failed += 1

    def fail_pending(self, now_ns: int, problem: Problem) -> None:
        """Ends every row that has no end yet."""
        for ticket in range(self._begun):
            if self._outcome[ticket] == PENDING:
                self.finish(ticket, now_ns, problem)

    def publish(self) -> None:
        """Tells those who share the memory how far it is written. Now and then, and at the end."""
        self._header[1], self._header[2] = self.good, self.failed
        self._header[0] = self._begun  # last: no row is counted before it is there

    def _code(self, problem: Problem) -> int:
        if problem not in self._codes:
            if len(self.problems) >= MAX_PROBLEMS:
                problem = Problem(problem.fault, "(further texts)", problem.status)
            if problem not in self._codes:
                self.problems.append(problem)
                self._codes[problem] = len(self.problems)
        return self._codes[problem]
