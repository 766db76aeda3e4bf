"""The records of requests in shared memory: a generator process writes them, and the parent reads them meanwhile.

Columns of integers, because a Python object per request would cost more than the request. The parent reads them without
a copy, even if the generator has died. Rows are begun in order; `begun` in the header counts them. Times are
CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from convoy.loadtest.problems import Problem

PENDING = -1
GOOD = 0

TIME_BYTES = 8
OUTCOME_BYTES = 2
HEADER_BYTES = 64
TIME_COLUMNS = ("intended_ns", "taken_ns", "finished_ns")


def size_bytes(capacity: int) -> int:
    """The memory that `capacity` rows take."""
    return HEADER_BYTES + capacity * (len(TIME_COLUMNS) * TIME_BYTES + OUTCOME_BYTES)


@dataclass(slots=True)
class Rows:
    """Views of one block of memory. `header` counts the rows that are begun, good and failed."""

    header: memoryview
    intended_ns: memoryview
    taken_ns: memoryview
    finished_ns: memoryview
    outcome: memoryview

    @classmethod
    def over(cls, memory: memoryview, capacity: int) -> Rows:
        """`memory` is at least `size_bytes(capacity)` long."""
        times_bytes = capacity * TIME_BYTES
        starts = [HEADER_BYTES + index * times_bytes for index in range(len(TIME_COLUMNS) + 1)]
        intended, taken, finished = (memory[start : start + times_bytes].cast("q") for start in starts[:-1])
        outcome = memory[starts[-1] : starts[-1] + capacity * OUTCOME_BYTES].cast("h")
        return cls(memory[:HEADER_BYTES].cast("q"), intended, taken, finished, outcome)

    @property
    def begun(self) -> int:
        return int(self.header[0])

    def release(self) -> None:
        """Release the views, so that the memory can be unmapped."""
        for view in (self.header, self.intended_ns, self.taken_ns, self.finished_ns, self.outcome):
            view.release()


MAX_PROBLEMS = 64  # distinct error texts; a server may put a number into each of a million


class Recorder:
    """Writes the rows of one process.

    A ticket is the number of a row. An outcome is PENDING, GOOD, or 1 + an index into `problems`.
    """

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
        """Record a request that was due at `intended_ns` and taken up at `taken_ns`."""
        ticket = self._begun
        self._intended_ns[ticket] = intended_ns
        self._taken_ns[ticket] = taken_ns
        self._outcome[ticket] = PENDING
        self._begun = ticket + 1
        return ticket

    def intended_ns(self, ticket: int) -> int:
        return int(self._intended_ns[ticket])

    def finish(self, ticket: int, now_ns: int, problem: Problem | None) -> None:
        """Record the end of a request; `problem` None means success."""
        self._finished_ns[ticket] = now_ns
        if problem is None:
            self._outcome[ticket] = GOOD
            self.good += 1
        else:
            self._outcome[ticket] = self._code(problem)
            self.failed += 1

    def fail_pending(self, now_ns: int, problem: Problem) -> None:
        """End every row that has no end yet."""
        for ticket in range(self._begun):
            if self._outcome[ticket] == PENDING:
                self.finish(ticket, now_ns, problem)

    def publish(self) -> None:
        """Publish the counts to the parent. Called from time to time and at the end."""
        self._header[1], self._header[2] = self.good, self.failed
        self._header[0] = self._begun  # last, so that no row is counted before it is written

    def _code(self, problem: Problem) -> int:
        if problem not in self._codes:
            if len(self.problems) >= MAX_PROBLEMS:
                problem = Problem(problem.fault, "(further texts)", problem.status)
            if problem not in self._codes:
                self.problems.append(problem)
                self._codes[problem] = len(self.problems)
        return self._codes[problem]
