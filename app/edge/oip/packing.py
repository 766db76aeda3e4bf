"""One slot for a whole request: what came, and behind it the room for its outputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from convoy.app.scheduling.request import TensorPlace
from convoy.app.scheduling.slab import aligned


class Packed(NamedTuple):
    """Where the outputs lie in a slot of `nbytes`; None for one whose size only the run knows."""

    outputs: tuple[TensorPlace | None, ...]
    nbytes: int


def packed_behind(nbytes: int, sizes: Iterable[int | None]) -> Packed:
    """Outputs of these sizes behind so many bytes."""
    outputs: list[TensorPlace | None] = []
    for size in sizes:
        if size is None:
            outputs.append(None)
            continue
        start = aligned(nbytes)
        outputs.append(TensorPlace(0, start, size))
        nbytes = start + size
    return Packed(tuple(outputs), nbytes)
