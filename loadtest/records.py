"""What happened to every request: one row each, in columns.

Knows times (CLOCK_MONOTONIC nanoseconds) and kinds of failure. Draws no conclusions: that is statistics'.
Columns of plain integers, because a Python object per request would cost more than the request.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

PENDING = -1
GOOD = 0
MAX_PROBLEMS = 64  # distinct error texts kept; a server may put a number into each of a million
MAX_TEXT_CHARS = 200

Times = npt.NDArray[np.int64]


class Fault(StrEnum):
    """How a request can fail, as seen from the client."""

    HTTP = "http"  # an answer with a status other than 200
    REFUSED = "refused"  # nobody listens
    RESET = "reset"  # the connection ended before the answer did
    TIMEOUT = "timeout"
    GARBAGE = "garbage"  # not HTTP, or a 200 that is not an answer
    NETWORK = "network"  # anything else below HTTP


@dataclass(frozen=True, slots=True)
class Problem:
    """One kind of failure; `status` only for Fault.HTTP."""

    fault: Fault
    text: str
    status: int | None = None

    @property
    def title(self) -> str:
        """Short, for a table: `HTTP 429`, `connection refused`."""
        return TITLES[self.fault] if self.status is None else f"HTTP {self.status}"


TITLES = {
    Fault.HTTP: "HTTP error",
    Fault.REFUSED: "connection refused",
    Fault.RESET: "connection reset",
    Fault.TIMEOUT: "timeout",
    Fault.GARBAGE: "garbage",
    Fault.NETWORK: "network",
}


@dataclass(frozen=True, slots=True)
class Records:
    """A finished run's rows. Times in ns; `outcome` is PENDING, GOOD, or 1 + an index into `problems`."""

    intended_ns: Times
    taken_ns: Times
    finished_ns: Times
    outcome: npt.NDArray[np.int16]
    problems: tuple[Problem, ...]


class Recorder:
    """Collects rows while the run goes on. A ticket is a row's number."""

    def __init__(self) -> None:
        self._intended_ns = array("q")
        self._taken_ns = array("q")
        self._finished_ns = array("q")
        self._outcome = array("h")
        self._problems: list[Problem] = []
        self._codes: dict[Problem, int] = {}
        self.good = 0
        self.failed = 0

    def __len__(self) -> int:
        return len(self._outcome)

    def begin(self, intended_ns: int, taken_ns: int) -> int:
        """A request was due at `intended_ns` and the generator took it up at `taken_ns`."""
        self._intended_ns.append(intended_ns)
        self._taken_ns.append(taken_ns)
        self._finished_ns.append(0)
        self._outcome.append(PENDING)
        return len(self._outcome) - 1

    def intended_ns(self, ticket: int) -> int:
        return self._intended_ns[ticket]

    def succeed(self, ticket: int, now_ns: int) -> None:
        self._finished_ns[ticket] = now_ns
        self._outcome[ticket] = GOOD
        self.good += 1

    def fail(self, ticket: int, now_ns: int, problem: Problem) -> None:
        self._finished_ns[ticket] = now_ns
        self._outcome[ticket] = self._code(problem)
        self.failed += 1

    def fail_pending(self, now_ns: int, problem: Problem) -> None:
        """Ends every row that has no end yet."""
        for ticket, outcome in enumerate(self._outcome):
            if outcome == PENDING:
                self.fail(ticket, now_ns, problem)

    def _code(self, problem: Problem) -> int:
        if problem not in self._codes:
            if len(self._problems) >= MAX_PROBLEMS:
                problem = Problem(problem.fault, "(further texts)", problem.status)
            if problem not in self._codes:
                self._problems.append(problem)
                self._codes[problem] = len(self._problems)
        return self._codes[problem]

    def freeze(self) -> Records:
        """The rows so far, as a copy that later events do not touch."""
        return Records(
            intended_ns=np.array(self._intended_ns, dtype=np.int64),
            taken_ns=np.array(self._taken_ns, dtype=np.int64),
            finished_ns=np.array(self._finished_ns, dtype=np.int64),
            outcome=np.array(self._outcome, dtype=np.int16),
            problems=tuple(self._problems),
        )
