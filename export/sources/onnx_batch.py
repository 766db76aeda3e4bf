"""Batches for a graph that somebody else made: a first dimension that is proved to be one, or freed and proved.

Knows how a fixed batch of 1 is written into a graph, and takes it out only where the result is shown to answer
every row of a batch as the original answers that row alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from convoy.app.engines.batching import check_rows
from convoy.app.engines.free_sizes import Size, with_examples
from convoy.app.engines.onnxruntime import open_session, read_signature
from convoy.app.engines.signature import Signature
from convoy.export.sources import onnx_file
from convoy.export.sources.torch_job import one_line
from convoy.models.errors import BundleError

_BATCH = "batch"
# Where nobody says how large a batch will be.
PROVED_BATCH = 8


@dataclass(frozen=True, slots=True)
class Batching:
    """`reason` says why the graph is batched or why not, for people."""

    batched: bool
    reason: str


def write_batched(
    original: Path, target: Path, threads: int, inline_bytes: int, size: Size | None = None, largest: int = PROVED_BATCH
) -> Batching:
    """Write `original` to `target`, with a dynamic batch where that is proved to be right, else as it is.

    Batches are proved up to the `largest`. Free heights and widths are tried at `size`. Raises JobError for a file that
    is not ONNX or does not load, or of which such a batch does not fit into memory.
    """
    model = onnx_file.read(original)
    signature = with_examples(original, read_signature(open_session(original, threads), original), threads, size)
    firsts = [spec.shape[:1] for spec in (*signature.inputs, *signature.outputs)]
    objection = "not every input and output has a first dimension that is dynamic or 1"
    if all(first == (-1,) for first in firsts):
        onnx_file.write(model, target, inline_bytes)
        objection = check_rows(target, signature, threads, largest=largest).objection
        if not objection:
            return Batching(True, "batched: each row of a batch equals the row run alone")
    elif all(first in ((-1,), (1,)) for first in firsts):
        for candidate in _freed(model):
            onnx_file.write(candidate, target, inline_bytes)
            objection = _objection(original, target, signature, threads, largest)
            if not objection:
                return Batching(True, "its batch of 1 was made dynamic: each row equals the original's answer")
    onnx_file.write(model, target, inline_bytes)
    return Batching(False, f"not batched: {one_line(objection)}")


def _objection(original: Path, target: Path, signature: Signature, threads: int, largest: int) -> str:
    try:
        freed = read_signature(open_session(target, threads, quiet=True), target)
    except BundleError:
        return "with a dynamic first dimension the graph does not load"
    if any(a.shape[1:] != b.shape[1:] for a, b in zip(freed.outputs, signature.outputs, strict=True)):
        return "with a dynamic first dimension the outputs have other shapes"
    # Both are asked at the same sizes.
    examples = [spec.example for spec in signature.inputs]
    inputs = tuple(replace(spec, example=one) for spec, one in zip(freed.inputs, examples, strict=True))
    whole = replace(freed, inputs=inputs)
    return check_rows(target, whole, threads, largest=largest, original=original).objection


def _freed(model: Any) -> Iterator[Any]:
    """The model with a dynamic first dimension: as it is otherwise, then with the 1 in its reshapes freed as well."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.value_info[:]  # they say 1, too
    initialized = {tensor.name for tensor in copy.graph.initializer}
    for value in (*copy.graph.input, *copy.graph.output):
        if value.name not in initialized:
            value.type.tensor_type.shape.dim[0].dim_param = _BATCH
    yield copy
    if _free_reshapes(copy.graph):
        yield copy


def _free_reshapes(graph: Any) -> int:
    """Let every reshape to a constant [1, ...] keep its input's first dimension instead; returns how many."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    constants |= {
        node.output[0]: attribute.t
        for node in graph.node
        if node.op_type == "Constant"
        for attribute in node.attribute
        if attribute.name == "value"
    }
    count = 0
    for node in graph.node:
        if node.op_type != "Reshape" or node.input[1] not in constants:
            continue
        shape = numpy_helper.to_array(constants[node.input[1]])
        if shape.ndim != 1 or len(shape) < 2 or shape[0] != 1 or 0 in shape:
            continue
        # A 0 stands for the input's own size, unless the node says that it means none at all.
        kept = [attribute for attribute in node.attribute if attribute.name != "allowzero"]
        del node.attribute[:]
        node.attribute.extend(kept)
        # A name of its own: others may read the same constant.
        own = f"{node.input[1]}.freed{count}"
        graph.initializer.append(numpy_helper.from_array(np.array([0, *shape[1:]], np.int64), own))
        node.input[1] = own
        count += 1
    return count
