"""The requests' shares of a batch, and how they come into one memory. The same for every library.

Every batch comes here, and compiled a loop is cheaper than `sum` of a list.
"""

from __future__ import annotations

from collections.abc import Sequence

Shapes = tuple[tuple[int, ...], ...]


class Part:
    """One request's share of a batch: views of its bytes, nothing owned. BYTES are in their packed form.

    `shapes` are the inputs' whole shapes, batch dimension included where the model has one.
    `wanted` are indices into the model's outputs; `destinations` has one writable view for each, of
    exactly the right size, or None where the size is known only after the run.
    """

    __slots__ = ("destinations", "inputs", "samples", "shapes", "wanted")

    def __init__(
        self,
        samples: int,
        shapes: Shapes,
        inputs: tuple[memoryview, ...],
        wanted: tuple[int, ...],
        destinations: tuple[memoryview | None, ...],
    ) -> None:
        self.samples = samples
        self.shapes = shapes
        self.inputs = inputs
        self.wanted = wanted
        self.destinations = destinations


def joined(parts: Sequence[Part], *, batched: bool) -> tuple[int, Shapes]:
    """How many samples they are, and the inputs' whole shapes of all together: the parts agree in all else."""
    samples = 0
    for part in parts:
        samples += part.samples
    shapes = parts[0].shapes
    if batched:
        # Through a list: a tuple made of a generator leaves its interpreter one more spare tuple each time.
        shapes = tuple([(samples, *shape[1:]) for shape in shapes])
    return samples, shapes


def gather(parts: Sequence[Part], index: int, room: memoryview) -> int:
    """Copy one input of every request into `room`, one behind the other; how many bytes they are.

    Nothing is copied where they are more than there is room for.
    """
    nbytes = 0
    for part in parts:
        nbytes += part.inputs[index].nbytes
    if nbytes > len(room):
        return nbytes
    offset = 0
    for part in parts:
        source = part.inputs[index]
        end = offset + source.nbytes
        room[offset:end] = source
        offset = end
    return nbytes
