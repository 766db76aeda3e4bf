"""The rows of the table of hard networks, and the goal that each is held against, as records and as a file that grows.

Knows the fields, the goal and the JSON form. Knows nothing of how a network is trained, nor of how the page looks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from convoy.export.zoo_table.kept import placed, read_kept, write_kept
from convoy.models.bundle import Interval

# Of which at least so many networks are to reach the goal.
ENOUGH = 9
MOST_LOSS_POINTS = 1.0
LEAST_INT8_SHARE = 0.8
MOST_TRAINING_MINUTES = 30.0


@dataclass(frozen=True, slots=True)
class HardRow:
    """One network. `accuracy` is fp32's on `images` test images; loss and bound are in points of top-1, paired with it.

    `int8_share` is of the multiply-adds; `file` the INT8 file that the row is about, the fastest of those that lose
    little, in its `engine`; `speedup` how many times faster it is than fp32 in `fp32_engine`, the faster one of those
    that are here; `has_vnni` whether the CPU of this row has 8-bit dot products. None stands for what was not reached,
    and `why` says why.
    """

    network: str
    epochs: int
    training_minutes: float
    accuracy: float | None = None
    images: int = 0
    loss_points: float | None = None
    loss_bound_points: float | None = None
    int8_share: float | None = None
    speedup: Interval | None = None
    layers_kept: int = 0
    file: str = ""
    engine: str = ""
    fp32_engine: str = ""
    machine: str = ""
    has_vnni: bool = False
    versions: dict[str, str] | None = None
    why: str = ""

    def misses(self) -> tuple[str, ...]:
        """What of the goal the network does not reach, in words; nothing where it reaches all of it."""
        if self.loss_bound_points is None or self.int8_share is None:
            return (self.why or "there is no INT8 file",)
        found = []
        if self.loss_bound_points > MOST_LOSS_POINTS:
            found.append(f"loses up to {self.loss_bound_points:.2f} points")
        if self.int8_share < LEAST_INT8_SHARE:
            found.append(f"{100 * self.int8_share:.0f} % in INT8")
        if self.has_vnni and (self.speedup is None or self.speedup.median <= 1):
            found.append("not faster" if self.speedup is None else f"{self.speedup.median:.2f} times as fast")
        if self.training_minutes > MOST_TRAINING_MINUTES:
            found.append(f"trained for {self.training_minutes:.0f} minutes")
        return tuple(found)


@dataclass(frozen=True, slots=True)
class HardTable:
    """The rows so far."""

    rows: tuple[HardRow, ...] = ()

    def find(self, network: str) -> HardRow | None:
        """The network's row, if it has one."""
        return next((row for row in self.rows if row.network == network), None)

    def with_row(self, row: HardRow) -> HardTable:
        """The table with this row in the place of the network's former one, or at the end."""
        return replace(self, rows=placed(self.rows, row, lambda known: known.network))


def read_table(path: Path) -> HardTable:
    """The table in this file, an empty one where there is none. Raises RecordError for a broken file."""
    return read_kept(path, HardTable())


def write_table(table: HardTable, path: Path) -> None:
    """Raises JobError when the disk does not take it."""
    write_kept(path, table)
