"""Samples and answers as arrays by tensor name, the sample first: what goes into a network, and what comes out of it.

A network with one input is no special case anywhere but where people say what they have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

Rows = Mapping[str, np.ndarray]
NOTHING: Rows = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Chunk:
    """`inputs` by name, each [n, ...] as the spec says. `targets` [n, ...] are what should come out: of images int64
    [n], indices into the model's labels, of a file of arrays whatever it has; None where there are none.

    `positions` int64 [n] are the samples' places in their set, which has gaps where some do not decode.
    """

    inputs: Rows
    targets: np.ndarray | None
    positions: np.ndarray


def count_of(rows: Rows) -> int:
    """How many samples there are."""
    return len(next(iter(rows.values())))


def picked(rows: Rows, index: slice | np.ndarray) -> dict[str, np.ndarray]:
    """The same of some of the samples."""
    return {name: array[index] for name, array in rows.items()}


def joined(parts: Sequence[Rows]) -> dict[str, np.ndarray]:
    """All samples of all parts, in order; there is at least one part."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def bytes_of(rows: Rows) -> int:
    """Of all samples together."""
    return sum(array.nbytes for array in rows.values())
