"""How long to wait before a process that died is started again, and when to give up. Knows no clock."""

from __future__ import annotations

from dataclasses import dataclass

_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 5.0
# A process that lived so long was well: what ends it now is another story.
_WELL_AFTER_S = 30.0
_MOST_IN_A_ROW = 8


@dataclass(slots=True)
class Restarts:
    """The deaths of one process and of those that came in its place."""

    in_a_row: int = 0

    def after(self, lived_s: float) -> float | None:
        """Seconds until it is started again; None after too many deaths, each of them soon after a start."""
        self.in_a_row = 1 if lived_s >= _WELL_AFTER_S else self.in_a_row + 1
        if self.in_a_row > _MOST_IN_A_ROW:
            return None
        if self.in_a_row == 1:
            return 0.0
        return float(min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2 ** (self.in_a_row - 2)))
