"""ONNX files that others made: read safely, written whole or in two files.

Knows protobufs and external data. An ONNX file may name other files as its weights; one that names a file
outside its own folder is refused, for it would put somebody's secrets into the graph. Pools with a ceiling are
written with their padding, because ONNX Runtime's blocked kernels count one window more than its plain ones.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from convoy.app.engines.free_sizes import Size
from convoy.export.sources.torch_job import EXTERNAL_DATA, one_line
from convoy.models.errors import JobError

# Pools whose last window reaches beyond the padding, with that padding written out. What a runtime makes of
# `ceil_mode` differs: ONNX Runtime's blocked kernels count one window more than its plain ones, where that window
# would begin in the padding.


def write_out_ceil(model: Any) -> None:
    """Change every such pool of known sizes, in place; what is not known stays as it is."""
    graph = model.graph
    found = [node for node in graph.node if node.op_type in ("MaxPool", "AveragePool") and _value(node, "ceil_mode", 0)]
    if not found:
        return
    shapes = _shapes(model)
    for node in found:
        size = shapes.get(node.input[0], [])[2:]
        if not size or not all(size) or _value(node, "auto_pad", b"NOTSET") != b"NOTSET":
            continue
        rank = len(size)
        kernel = list(_value(node, "kernel_shape", [1] * rank))
        steps, holes = (list(_value(node, name, [1] * rank)) for name in ("strides", "dilations"))
        pads = list(_value(node, "pads", [0] * 2 * rank))
        spans = [hole * (length - 1) + 1 for hole, length in zip(holes, kernel, strict=True)]
        ends, counts = list(pads[rank:]), []
        for axis in range(rank):
            whole = size[axis] + pads[axis] + pads[rank + axis]
            windows = -(-(whole - spans[axis]) // steps[axis]) + 1
            if (windows - 1) * steps[axis] >= size[axis] + pads[axis]:
                windows -= 1
            ends[axis] += max(0, (windows - 1) * steps[axis] + spans[axis] - whole)
            starts = np.arange(windows) * steps[axis]
            counts.append(np.minimum(starts + spans[axis], whole) - starts)
        is_longer = ends != pads[rank:]
        is_counted = node.op_type == "AveragePool" and bool(_value(node, "count_include_pad", 0))
        if is_longer and is_counted and any(hole != 1 for hole in holes):
            continue
        kept = [one for one in node.attribute if one.name not in ("ceil_mode", "pads")]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute("pads", [*pads[:rank], *ends])])
        if is_longer and is_counted:
            # What is beyond the padding must not count: each mean is of fewer values than the kernel has.
            factors = np.ones([1, 1, *[1] * rank])
            for axis, own in enumerate(counts):
                factors = factors * (kernel[axis] / own).reshape([-1 if i == axis + 2 else 1 for i in range(rank + 2)])
            output, name = node.output[0], f"{node.output[0]}.counts"
            graph.initializer.append(numpy_helper.from_array(factors.astype(np.float32), name))
            node.output[0] = f"{output}.means"
            product = helper.make_node("Mul", [node.output[0], name], [output], f"{node.name or output}.counted")
            graph.node.insert(list(graph.node).index(node) + 1, product)


def _value(node: Any, name: str, default: Any) -> Any:
    return next((onnx.helper.get_attribute_value(one) for one in node.attribute if one.name == name), default)


def _shapes(model: Any) -> dict[str, list[int]]:
    """Of every tensor whose shape is known or inferred, with 0 for what is free."""
    with suppress(Exception):  # larger than a protobuf may be, or with operators that onnx does not know
        model = onnx.shape_inference.infer_shapes(model)
    declared = (*model.graph.input, *model.graph.value_info, *model.graph.output)
    return {one.name: [dim.dim_value for dim in one.type.tensor_type.shape.dim] for one in declared}


# Tensors below this stay in the graph, where shape inference can read them.
_SMALL_BYTES = 1024
# A side that metadata name is tried up to so many pixels, whatever memory that takes.
_MOST_PX = 4096


def read(path: Path) -> Any:
    """The model with all of its weights in memory. Raises JobError for what is not ONNX, or reaches outside."""
    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:  # protobuf's errors share no base class with onnx's
        raise JobError(f"{path.name} cannot be read as ONNX ({one_line(str(error))}); export it again") from error
    if not model.graph.node:
        raise JobError(f"{path.name} has no nodes; it is not an ONNX model, or an empty one")
    for location in sorted({_location(tensor) for tensor in tensors(model.graph) if tensor.external_data}):
        _check_location(path, location)
    try:
        onnx.load_external_data_for_model(model, str(path.parent))
    except Exception as error:
        raise JobError(f"the weights beside {path.name} cannot be read ({one_line(str(error))})") from error
    return model


def stated_size(model: Any) -> Size | None:
    """Of images, as the file's own metadata have it: `imgsz`, a side or [height, width], which Ultralytics writes."""
    said = next((entry.value for entry in model.metadata_props if entry.key == "imgsz"), "")
    try:
        sides = json.loads(said)
        height, width = (sides, sides) if isinstance(sides, int) else sides
        size = Size(operator.index(height), operator.index(width))
    except (ValueError, TypeError):
        return None
    return size if 0 < min(size.height, size.width) <= max(size.height, size.width) <= _MOST_PX else None


def tensors(graph: Any) -> Iterator[Any]:
    """Every tensor with values in the graph: initializers, attributes, and those of graphs inside."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from tensors(inner)


def _location(tensor: Any) -> str:
    return next((str(entry.value) for entry in tensor.external_data if entry.key == "location"), "")


def _check_location(path: Path, location: str) -> None:
    folder = path.parent.resolve()
    named = (folder / location).resolve()
    if Path(location).is_absolute() or not named.is_relative_to(folder):
        raise JobError(
            f"{path.name} takes weights from outside its folder ({one_line(location)!r}); do not use it, "
            "or save it again with its weights beside it"
        )
    if not named.is_file():
        raise JobError(f"{path.name} needs its weights in {location!r}, which is not beside it; copy that file, too")


def write(model: Any, path: Path, inline_bytes: int) -> None:
    """Write the model, with weights of more than `inline_bytes` in `EXTERNAL_DATA` beside it."""
    portable(model)
    if sum(len(tensor.raw_data) for tensor in tensors(model.graph)) <= inline_bytes:
        path.write_bytes(model.SerializeToString())
        return
    # Saving appends to a file that is there already.
    (path.parent / EXTERNAL_DATA).unlink(missing_ok=True)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)  # saving moves the weights out of the model that it is given
    onnx.save_model(copy, str(path), save_as_external_data=True, location=EXTERNAL_DATA, size_threshold=_SMALL_BYTES)


def portable(model: Any) -> Any:
    """The model, changed in place, without what tells of its maker and in words that every runtime takes.

    Exporters note source lines with their paths on every node: nobody else's business, and bulk.
    """
    write_out_ceil(model)
    graph = model.graph
    for item in (model, graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        item.ClearField("metadata_props")
        item.ClearField("doc_string")
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "Einsum" and attribute.name == "equation":
                attribute.s = _in_small_letters(attribute.s.decode()).encode()
    return model


def _in_small_letters(equation: str) -> str:
    """The same product of tensors: TensorRT refuses capitals, which ONNX allows and torchvision's MaxViT has."""
    letters = list(dict.fromkeys(filter(str.isalpha, equation)))
    # Without an arrow the result's order is that of the letters; and there are only so many small ones.
    if equation.islower() or "->" not in equation or len(letters) > len(ascii_lowercase):
        return equation
    return equation.translate(str.maketrans("".join(letters), ascii_lowercase[: len(letters)]))
