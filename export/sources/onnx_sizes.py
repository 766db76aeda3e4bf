"""Sizes of a graph made elsewhere: its batch, and dynamic heights and widths.

A fixed batch of 1 is made dynamic only if the result is proved to answer every row of a batch as the original answers
that row alone. Heights and widths stay dynamic if the network takes several sizes; otherwise they are fixed in a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from convoy.app.engines.base import Signature
from convoy.app.engines.cpu import cpu_budget
from convoy.app.engines.dimensions import (
    TRIED_PX,
    Size,
    check_rows,
    is_free_image,
    size_of,
    sizes_that_run,
    with_examples,
)
from convoy.app.engines.onnxruntime import open_session, read_signature
from convoy.export.sources import onnx_file
from convoy.export.sources.preprocess import AskedInput
from convoy.export.sources.torch_job import INPUT_NAME, TorchResult, one_line
from convoy.export.variants.onnx_graph import array, constants
from convoy.models.errors import BundleError, JobError, UsageError
from convoy.models.spec import ImageSpec, TensorSpec

# If the largest batch is not given.
PROVED_BATCH = 8


@dataclass(frozen=True, slots=True)
class Batching:
    """`reason` says why the graph is batched or why not."""

    batched: bool
    reason: str


def write_batched(original: Path, target: Path, size: Size | None = None, largest: int = PROVED_BATCH) -> Batching:
    """Write `original` to `target`, with a dynamic batch if that is proved to be right, otherwise unchanged.

    Batches are proved up to the `largest`. Dynamic heights and widths are tried at `size`. Raises JobError if the file
    is not ONNX or does not load, or if such a batch does not fit into memory.
    """
    model = onnx_file.read(original)
    signature = with_examples(
        original, read_signature(open_session(original, cpu_budget()), original), cpu_budget(), size
    )
    firsts = [spec.shape[:1] for spec in (*signature.inputs, *signature.outputs)]
    objection = "not every input and output has a first dimension that is dynamic or 1"
    if all(first == (-1,) for first in firsts):
        onnx_file.write(model, target)
        objection = check_rows(target, signature, cpu_budget(), largest=largest).objection
        if not objection:
            return Batching(True, "batched: each row of a batch equals the row run alone")
    elif all(first in ((-1,), (1,)) for first in firsts):
        for candidate in _freed(model):
            onnx_file.write(candidate, target)
            objection = _objection(original, target, signature, largest)
            if not objection:
                return Batching(True, "its batch of 1 was made dynamic: each row equals the original's answer")
    onnx_file.write(model, target)
    return Batching(False, f"not batched: {one_line(objection)}")


def _objection(original: Path, target: Path, signature: Signature, largest: int) -> str:
    try:
        freed = read_signature(open_session(target, cpu_budget()), target)
    except BundleError:
        return "with a dynamic first dimension the graph does not load"
    if any(a.shape[1:] != b.shape[1:] for a, b in zip(freed.outputs, signature.outputs, strict=True)):
        return "with a dynamic first dimension the outputs have other shapes"
    # Both run at the same sizes.
    examples = [spec.example for spec in signature.inputs]
    inputs = tuple(replace(spec, example=one) for spec, one in zip(freed.inputs, examples, strict=True))
    whole = replace(freed, inputs=inputs)
    return check_rows(target, whole, cpu_budget(), largest=largest, original=original).objection


def _freed(model: Any) -> Iterator[Any]:
    """The model with a dynamic first dimension: first otherwise unchanged, then with the 1 in its reshapes freed as
    well.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.value_info[:]  # their outputs declare 1, too
    initialized = {tensor.name for tensor in copy.graph.initializer}
    for value in (*copy.graph.input, *copy.graph.output):
        if value.name not in initialized:
            value.type.tensor_type.shape.dim[0].dim_param = "batch"
    yield copy
    if _free_reshapes(copy.graph):
        yield copy


def _free_reshapes(graph: Any) -> int:
    """Let every reshape to a constant [1, ...] keep its input's first dimension instead. Returns their number."""
    known = constants(graph)
    count = 0
    for node in graph.node:
        given = known.get(node.input[1]) if node.op_type == "Reshape" else None
        if given is None:
            continue
        shape = array(given)
        if shape.ndim != 1 or len(shape) < 2 or shape[0] != 1 or 0 in shape:
            continue
        # A 0 means the input's own size, unless the node says otherwise.
        kept = [attribute for attribute in node.attribute if attribute.name != "allowzero"]
        del node.attribute[:]
        node.attribute.extend(kept)
        # A new constant, because other nodes may read the old one.
        own = f"{node.input[1]}.freed{count}"
        graph.initializer.append(onnx.numpy_helper.from_array(np.array([0, *shape[1:]], np.int64), own))
        node.input[1] = own
        count += 1
    return count


# How many sizes prove that a network takes any.
_PROOF_SIZES = 3


@dataclass(frozen=True, slots=True)
class FreeInput:
    """`file` is the graph to continue with, `size` where it is run and measured, None if no image is dynamic.

    `sizes` are those to prove it at, that one first; empty if height and width are fixed. `remark` is for people.
    """

    file: Path
    size: Size | None = None
    sizes: tuple[Size, ...] = ()
    remark: str = ""


def settle(original: Path, asked: AskedInput | None, folder: Path) -> FreeInput:
    """Decide about the file's dynamic heights and widths; a copy with fixed ones is written to `folder`.

    Raises UsageError if `asked` does not fit the file, and JobError if the file runs at no size that is tried.
    """
    model = onnx_file.read(original)  # which first makes sure that no library reads a forbidden file
    signature = read_signature(open_session(original, cpu_budget()), original)
    images = [spec for spec in signature.inputs if is_free_image(spec)]
    if asked is not None:
        _check(original, signature, images, asked)
    if not images:
        return FreeInput(original)
    wanted = None if asked is None or asked.size is None else asked.size
    found, example = signature, None
    for size in [wanted] if wanted else [onnx_file.stated_size(model), None]:
        if example is None:
            found = with_examples(original, signature, cpu_budget(), size)
            example = next((spec for spec in found.inputs if is_free_image(spec) and spec.example), None)
    if example is None:
        tried = str(wanted) if wanted else ", ".join(f"{px}x{px}" for px in TRIED_PX)
        raise JobError(
            f"{original.name} leaves height and width of {images[0].name!r} free, {list(images[0].shape)}, and runs at "
            f"none of {tried}; pass a size that it takes, such as --input 3x320x480"
        )
    size = size_of(example)
    if asked is not None and not asked.is_free:
        fixed = _fix(model, found, folder)
        return FreeInput(fixed, size, remark=f"height and width are fixed at {size} by --input")
    sizes = sizes_that_run(original, found, cpu_budget(), _PROOF_SIZES - 1)
    if len(sizes) < _PROOF_SIZES:
        fixed = _fix(model, found, folder)
        why = f"the file leaves them free, and runs at {size}, but hardly at any other size"
        return FreeInput(fixed, size, remark=f"height and width are fixed at {size}: {why}")
    return FreeInput(original, size, sizes)


def _check(original: Path, signature: Signature, images: list[TensorSpec], asked: AskedInput) -> None:
    takes = ", ".join(f"{spec.name} {list(spec.shape)}" for spec in signature.inputs)
    if not images:
        raise UsageError(
            f"--input sets the height and width of images, and {original.name} has fixed sizes ({takes}); "
            "leave it out, or pass --preprocess"
        )
    for spec in images:
        if spec.shape[1] != asked.channels and spec.shape[-1] != asked.channels:
            raise UsageError(
                f"--input has {asked.channels} channels, and {original.name} takes {takes}; change --input"
            )


def _fix(model: Any, found: Signature, folder: Path) -> Path:
    """Write the model with the examples' sizes declared, for inputs and outputs."""
    # In its own folder, because external data has a fixed name.
    target = folder / "fixed/model.onnx"
    target.parent.mkdir()
    del model.graph.value_info[:]  # they name dynamic sizes
    for declared, specs in ((model.graph.input, found.inputs), (model.graph.output, found.outputs)):
        examples = {spec.name: spec.example for spec in specs if spec.example}
        for value in declared:
            dims = value.type.tensor_type.shape.dim
            for axis, size in enumerate(examples.get(value.name, ())):
                if axis and not dims[axis].HasField("dim_value"):
                    dims[axis].dim_value = size
    onnx_file.write(model, target)
    return target


def listed(sizes: Sequence[Size]) -> str:
    """The sizes as text."""
    *others, last = map(str, sizes)
    return f"{', '.join(others)} and {last}" if others else last


def free_sizes(image: ImageSpec | None, torch: TorchResult) -> tuple[Size, ...]:
    """The sizes at which a graph of images was compared with its original, the pictures' size first. Empty if fixed."""
    if not torch.elsewhere or image is None:
        return ()
    first = 1 if image.front == "uint8_nhwc" else 2
    others = (Size(*one.samples[INPUT_NAME].shape[first : first + 2]) for one in torch.elsewhere)
    return (Size(image.height, image.width), *others)
