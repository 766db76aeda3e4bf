"""Figures of a training as text, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Sequence

from convoy.models.page.axis import number
from convoy.models.training.epochs import EpochRecord

NOT_KNOWN = "not known"
_MEBI, _GIBI = 1 << 20, 1 << 30


def percent(share: float | None) -> str:
    """A fraction in percent."""
    return "–" if share is None else f"{100 * share:.2f} %"


def memory(size_bytes: int | None) -> str:
    """In MiB or GiB."""
    if size_bytes is None:
        return NOT_KNOWN
    return f"{size_bytes / _GIBI:.2f} GiB" if size_bytes >= _GIBI else f"{size_bytes / _MEBI:.0f} MiB"


def energy(energy_j: float | None) -> str:
    """In joules or kilojoules."""
    if energy_j is None:
        return NOT_KNOWN
    return f"{number(energy_j / 1000)} kJ" if energy_j >= 1000 else f"{number(energy_j)} J"


def total_energy_j(epochs: Sequence[EpochRecord]) -> float | None:
    """Of all epochs, or None if one of them is unknown."""
    known = [one.energy_j for one in epochs if one.energy_j is not None]
    return sum(known) if len(known) == len(epochs) else None


def peak_memory_bytes(epochs: Sequence[EpochRecord]) -> int | None:
    """The peak over all epochs."""
    return max((one.peak_memory_bytes for one in epochs if one.peak_memory_bytes is not None), default=None)
