"""Which settings are measured, in the order of what they are worth: the whole grid for one network, one factor at a
time for the others. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from convoy.models.bundle import Precision
from tests.gpu.proof.records import Setting

SIZES = (1, 8, 32, 128)
SLOTS = (2, 1)


@dataclass(frozen=True, slots=True)
class Opening:
    """What an engine is opened with; it then runs every batch size."""

    network: str
    engine: str
    precision: Precision
    graphs: bool
    slots: int

    def at(self, batch_size: int) -> Setting:
        return Setting(self.network, self.engine, self.precision, batch_size, self.graphs, self.slots)

    @property
    def deviations(self) -> int:
        """How many factors are not what a server would choose."""
        return (self.precision != "fp16") + (not self.graphs) + (self.slots != SLOTS[0])


@dataclass(frozen=True, slots=True)
class Course:
    """One engine to open, and the batch sizes to measure it at."""

    opening: Opening
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Extent:
    """How much of the grid a network gets: all of it, or one factor at a time around `base_size`."""

    network: str
    base_size: int
    whole: bool


def courses(
    extents: Iterable[Extent], engine: str, precisions: Sequence[Precision], sizes: tuple[int, ...]
) -> list[Course]:
    """What to open and measure, the most telling first; what a target needs differs in one factor at most."""
    found = [
        Course(opening, sizes if extent.whole or not opening.deviations else (extent.base_size,))
        for extent in extents
        for precision, graphs, slots in product(precisions, (True, False), SLOTS)
        for opening in [Opening(extent.network, engine, precision, graphs, slots)]
        if extent.whole or opening.deviations <= 1
    ]
    return sorted(found, key=lambda course: course.opening.deviations)


def request_sizes(batch_size: int, most: int = 32) -> tuple[int, ...]:
    """Of how many images the core's requests are: as many as fit, at most what clients send; and single ones."""
    return tuple(dict.fromkeys((min(batch_size, most), 1)))
