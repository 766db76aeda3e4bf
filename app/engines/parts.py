"""The requests' shares of a batch, and how they come into one memory. The same for every library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Shapes = tuple[tuple[int, ...], ...]


@dataclass(slots=True, eq=False)
class Part:
    """One request's share of a batch: views of its bytes, nothing owned. BYTES are in their packed form.

    `shapes` are the inputs' whole shapes, batch dimension included where the model has one.
    `wanted` are indices into the model's outputs; `destinations` has one writable view for each, of
    exactly the right size, or None where the size is known only after the run.
    """

    samples: int
    shapes: Shapes
    inputs: tuple[memoryview, ...]
    wanted: tuple[int, ...]
    destinations: tuple[memoryview | None, ...]


def joined(parts: Sequence[Part], *, batched: bool) -> tuple[int, Shapes]:
    """How many samples they are, and the inputs' whole shapes of all together: the parts agree in all else."""
    samples, shapes = sum([part.samples for part in parts]), parts[0].shapes
    if batched:
        # Through a list: a tuple made of a generator leaves its interpreter one more spare tuple each time.
        shapes = tuple([(samples, *shape[1:]) for shape in shapes])
    return samples, shapes


def gather(parts: Sequence[Part], index: int, room: memoryview) -> int:
    """Copy one input of every request into `room`, one behind the other; how many bytes they are.

    Nothing is copied where they are more than there is room for.
    """
    sources = [part.inputs[index] for part in parts]
    nbytes = sum([source.nbytes for source in sources])
    if nbytes > len(room):
        return nbytes
    offset = 0
    for source in sources:
        end = offset + source.nbytes
        room[offset:end] = source
        offset = end
    return nbytes
