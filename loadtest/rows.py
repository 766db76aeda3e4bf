"""Where each request's row lies in memory that a generator writes and the parent reads meanwhile.

Columns of plain integers: a Python object per request would cost more than the request, and what one process
writes the other reads as it stands, without a copy, and also when the writer has died. Rows are begun in
order; `begun` of the header counts them. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

PENDING = -1
GOOD = 0

TIME_BYTES = 8
OUTCOME_BYTES = 2
HEADER_BYTES = 64
TIME_COLUMNS = ("intended_ns", "taken_ns", "finished_ns")


def size_bytes(capacity: int) -> int:
    """How much memory `capacity` rows take."""
    return HEADER_BYTES + capacity * (len(TIME_COLUMNS) * TIME_BYTES + OUTCOME_BYTES)


@dataclass(slots=True)
class Rows:
    """Views of one block of memory. `header` holds how many rows are begun, good and failed."""

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
        """Lets the memory be unmapped."""
        for view in (self.header, self.intended_ns, self.taken_ns, self.finished_ns, self.outcome):
            view.release()
