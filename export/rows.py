"""Samples and answers as arrays by tensor name, sample first: the inputs and outputs of a network.

A network with one input is not a special case. Noise of both signs compares two graphs where no available picture
reaches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from convoy.models.spec import ImageSpec, TensorSpec

Rows = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Chunk:
    """`inputs` by name, each [n, ...] as the spec says. `targets` [n, ...] are the expected outputs: for images int64
    [n], indices of the model's labels; for a file of arrays its values; None if there are none.

    `positions` int64 [n] are the samples' indices in their set, with gaps for those that do not decode.
    """

    inputs: Rows
    targets: np.ndarray | None
    positions: np.ndarray


def count_of(rows: Rows) -> int:
    """The number of samples."""
    return len(next(iter(rows.values())))


def picked(rows: Rows, index: slice | np.ndarray) -> dict[str, np.ndarray]:
    """The same for some of the samples."""
    return {name: array[index] for name, array in rows.items()}


def joined(parts: Sequence[Rows]) -> dict[str, np.ndarray]:
    """All samples of all parts, in order; there is at least one part."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def bytes_of(rows: Rows) -> int:
    """Of all samples together."""
    return sum(array.nbytes for array in rows.values())


# Noise of both signs to compare two graphs: it reaches values that available pictures may not reach. It immediately
# shows what only few pictures show, such as a wrong edge for values below zero; it says nothing about accuracy.


def noise_of_both_signs(inputs: Sequence[TensorSpec], image: ImageSpec | None = None) -> dict[str, np.ndarray]:
    """The same samples each time, [n, ...] by input; dynamic sizes are those of the examples.

    Fine noise, noise in blocks of some pixels, which survives the averaging of convolutions, and uniform samples from
    one end of the range to the other. Bytes take their whole range, floats both signs and magnitudes above 1. Other
    integers are 0 or 1, which are valid indices in most networks that take any.
    """
    sample_bytes = sum(int(np.prod(spec.drawn_shape)) * spec.numpy_dtype.itemsize for spec in inputs)
    # Of each kind. Together they are a small part of what a proof compares.
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
