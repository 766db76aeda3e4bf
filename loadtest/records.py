"""The records of all requests, merged over the generator processes: one row per request, stored in columns.

Times are CLOCK_MONOTONIC nanoseconds, the same clock in every process. `statistics` computes the figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from convoy.loadtest.problems import Fault, Problem
from convoy.loadtest.rows import GOOD, Rows

Times = npt.NDArray[np.int64]
Outcomes = npt.NDArray[np.int16]

UNTOLD = Problem(Fault.GENERATOR, "failed; the process that knew the reason has died")


@dataclass(frozen=True, slots=True)
class Records:
    """Rows in the order of their due times. `outcome` is PENDING, GOOD, or 1 + an index into `problems`."""

    intended_ns: Times
    taken_ns: Times
    finished_ns: Times
    outcome: Outcomes
    problems: tuple[Problem, ...]

    def __len__(self) -> int:
        return len(self.outcome)


@dataclass(frozen=True, slots=True)
class ProcessRecords:
    """The rows of one process, and the problems that its outcomes refer to; some are missing if it died."""

    rows: Rows
    problems: Sequence[Problem]


def merged(parts: Sequence[ProcessRecords]) -> Records:
    """A copy of all rows begun so far."""
    problems: list[Problem] = []
    outcomes = [_outcomes(part, problems) for part in parts]
    intended_ns = _column([part.rows.intended_ns for part in parts], parts)
    order = np.argsort(intended_ns, kind="stable")
    return Records(
        intended_ns=intended_ns[order],
        taken_ns=_column([part.rows.taken_ns for part in parts], parts)[order],
        finished_ns=_column([part.rows.finished_ns for part in parts], parts)[order],
        outcome=np.concatenate([np.empty(0, np.int16), *outcomes])[order],
        problems=tuple(problems),
    )


def _column(views: Sequence[memoryview], parts: Sequence[ProcessRecords]) -> Times:
    columns = [np.array(view[: part.rows.begun], dtype=np.int64) for view, part in zip(views, parts, strict=True)]
    return np.concatenate([np.empty(0, np.int64), *columns])


def _outcomes(part: ProcessRecords, problems: list[Problem]) -> Outcomes:
    """The outcomes as indices into the common list of problems. New problems of this part are added to the list."""
    own = np.array(part.rows.outcome[: part.rows.begun], dtype=np.int16)
    most = int(own.max(initial=GOOD))
    told = [*part.problems, *[UNTOLD] * (most - len(part.problems))]
    for problem in told:
        if problem not in problems:
            problems.append(problem)
    common = np.array([GOOD, *(1 + problems.index(problem) for problem in told)], dtype=np.int16)
    return np.where(own > GOOD, common[np.maximum(own, GOOD)], own)
