"""Samples and answers as arrays by tensor name, the sample first: what goes into a network, and what comes out of it.

A network with one input is no special case anywhere but where people say what they have. Noise of both signs
holds two graphs against each other where no picture at hand reaches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from convoy.models.spec import ImageSpec, TensorSpec

Rows = Mapping[str, np.ndarray]


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


# Noise of both signs to hold two graphs against each other: it reaches values that no picture at hand may reach. What
# only few pictures show, such as a wrong edge where values are below zero, it shows at once; of accuracy it says
# nothing.


def noise_of_both_signs(inputs: Sequence[TensorSpec], image: ImageSpec | None = None) -> dict[str, np.ndarray]:
    """The same samples each time, [n, ...] by input; free sizes are those of the examples.

    Fine noise, noise in blocks of some pixels, which survives the means that convolutions take, and even samples from
    one end of the range to the other. Bytes take their whole range, floats both signs and sizes beyond 1. Other whole
    numbers are 0 or 1, which are the numbers of something in most networks that take any.
    """
    sample_bytes = sum(int(np.prod(spec.drawn_shape)) * spec.numpy_dtype.itemsize for spec in inputs)
    # Of each kind. All together they are a small part of what a proof compares.
    count = max(1, min(4, (16 << 20) // (3 * max(1, sample_bytes))))
    generator = np.random.default_rng(1)
    # Height and width of a batch.
    axes = () if image is None else (1, 2) if image.front == "uint8_nhwc" else (2, 3)
    return {spec.name: _drawn(generator, spec, count, axes) for spec in inputs}


def _drawn(generator: np.random.Generator, spec: TensorSpec, count: int, axes: tuple[int, ...]) -> np.ndarray:
    shape = (count, *spec.drawn_shape)
    if spec.numpy_dtype.kind not in "f" and spec.numpy_dtype != np.uint8:
        return generator.integers(0, 2, (3 * count, *shape[1:])).astype(spec.numpy_dtype)
    fine = generator.standard_normal(shape)
    blocks = 2 * _in_blocks(generator, shape, axes)
    even = np.broadcast_to(np.linspace(-2, 2, count).reshape(-1, *[1] * (len(shape) - 1)), shape)
    values = np.concatenate([fine, blocks, even])
    if spec.numpy_dtype == np.uint8:
        # A standard deviation is a quarter of the range, so that both ends are reached.
        whole: np.ndarray = np.clip(128 + values * 64, 0, 255).astype(np.uint8)
        return whole
    return values.astype(spec.numpy_dtype)


def _in_blocks(generator: np.random.Generator, shape: tuple[int, ...], axes: tuple[int, ...]) -> np.ndarray:
    block_px = 8
    small = tuple(-(-size // block_px) if axis in axes else size for axis, size in enumerate(shape))
    blocks = generator.standard_normal(small)
    for axis in axes:
        blocks = np.repeat(blocks, block_px, axis)
    return blocks[tuple(slice(size) for size in shape)]
