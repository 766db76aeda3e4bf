"""Sizes that a graph leaves open beside its batch: found out by running it, because its file only names them.

Height and width of a fully convolutional network are examples. The size at which a graph runs becomes the example of
its tensors (`TensorSpec.example`), at which engines warm up and are measured. Used by the server for models that come
without a manifest, and by export for graphs made elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from convoy.app.engines.base import Signature
from convoy.app.engines.batch import EngineFailure
from convoy.app.engines.onnxruntime import open_session, run_arrays_on
from convoy.models.spec import TensorSpec, fits
from convoy.models.tensors import random_values

# What strides of 32 divide, and networks for images are trained at. The first that runs is taken: it is the cheapest.
TRIED_PX = (32, 64, 96, 128, 224, 256, 384, 512)


@dataclass(frozen=True, slots=True)
class Size:
    """Height and width, in pixels."""

    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.height}x{self.width}"


def is_free(spec: TensorSpec) -> bool:
    """Whether a size behind the first dimension is open. `spec` has the whole shape."""
    return -1 in spec.shape[1:]


def is_free_image(spec: TensorSpec) -> bool:
    """Whether that can be the height or the width of images."""
    return is_free(spec) and len(spec.shape) >= 4  # a batch of [channels, height, width]


def with_examples(path: Path, signature: Signature, threads: int, wanted: Size | None = None) -> Signature:
    """The signature with examples of its free tensors, at `wanted` or the first of several sizes at which it runs.

    Shapes are whole ones, first dimensions included; of an example a free first dimension is 1. The same signature
    where nothing is free, or the graph runs at none of them: then nothing is known. Raises BundleError for a file that
    does not load.
    """
    if not any(map(is_free, signature.inputs)):
        return signature
    session = open_session(path, threads, quiet=True)
    for inputs in _candidates(signature.inputs, wanted):
        shapes = _run(session, signature, inputs)
        if shapes is not None:
            return Signature(inputs, tuple(map(_with_example, signature.outputs, shapes)))
    return signature


def _with_example(spec: TensorSpec, shape: tuple[int, ...]) -> TensorSpec:
    # What a file declares of its outputs may be wrong, of which only a warning of the library tells.
    return replace(spec, example=shape) if is_free(spec) and fits(shape, spec.shape) else spec


def at_size(specs: tuple[TensorSpec, ...], size: Size) -> tuple[TensorSpec, ...]:
    """The specs, where they are free images with an example of this size: the last free one is the width."""
    return tuple(replace(spec, example=_sized(spec, size)) if is_free_image(spec) else spec for spec in specs)


def sizes_that_run(path: Path, signature: Signature, threads: int, more: int = 2) -> tuple[Size, ...]:
    """The size of the signature's examples, and up to `more` others that the graph runs at, beginning with oblong ones.

    Empty where no image is free, or the signature has no examples.
    """
    images = [spec for spec in signature.inputs if is_free_image(spec) and spec.example]
    if not images:
        return ()
    first, session, found = size_of(images[0]), open_session(path, threads, quiet=True), list[Size]()
    is_one = sum(size < 0 for size in images[0].shape[1:]) == 1
    for size in other_sizes(first)[2 * is_one :]:
        if len(found) < more and _run(session, signature, at_size(signature.inputs, size)) is not None:
            found.append(size)
    return (first, *found)


def size_of(spec: TensorSpec) -> Size:
    """Height and width of a free image's example, where both are free; one alone is both."""
    free = [example for size, example in zip(spec.shape[1:], spec.example[1:], strict=True) if size < 0]
    return Size(free[0], free[-1])


def other_sizes(first: Size) -> tuple[Size, ...]:
    """Higher, wider, and for networks of squares alone also those; each a multiple of 32 away, as strides want it."""
    height, width = first.height, first.width
    oblong = Size(height + 32, width), Size(height, width + 64)
    return (*oblong, Size(height + 32, width + 32), Size(height + 64, width + 64))


def _candidates(specs: tuple[TensorSpec, ...], wanted: Size | None) -> Iterator[tuple[TensorSpec, ...]]:
    """The inputs with examples, the likely ones first: images of some size, and what is no image of one element."""
    ones, *squares = (
        tuple(replace(spec, example=_sized(spec, Size(px, px))) if is_free(spec) else spec for spec in specs)
        for px in (1, *TRIED_PX)
    )
    if any(map(is_free_image, specs)):
        for size in [wanted] if wanted is not None else [Size(px, px) for px in TRIED_PX]:
            yield at_size(ones, size)
    if wanted is None:
        yield from (ones, *squares)


def _sized(spec: TensorSpec, size: Size) -> tuple[int, ...]:
    """The shape with every free size as high, and the last of them as wide."""
    example = [abs(spec.shape[0]), *(size.height if own < 0 else own for own in spec.shape[1:])]
    example[max(axis for axis, own in enumerate(spec.shape) if own < 0)] = size.width
    return tuple(example)


def _run(session: Any, signature: Signature, inputs: tuple[TensorSpec, ...]) -> list[tuple[int, ...]] | None:
    """The shapes of the outputs for inputs of these examples, or None where the graph does not run at them."""
    generator = np.random.default_rng(3)
    arrays = {spec.name: random_values(generator, spec, spec.drawn_shape) for spec in inputs}
    try:
        outputs = run_arrays_on(session, arrays)
    except EngineFailure:
        return None
    shapes = [tuple(outputs[spec.name].shape) for spec in signature.outputs]
    # An output that is empty tells nothing of a network: its input was smaller than its kernels.
    return shapes if all(map(all, shapes)) else None
