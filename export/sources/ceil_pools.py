"""Pools whose last window reaches beyond the padding, with that padding written out.

What a runtime makes of `ceil_mode` differs: ONNX Runtime's blocked kernels count one window more than its plain ones,
where that window would begin in the padding. Knows onnx's protobufs; heights and widths must be known.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np


def write_out_ceil(model: Any) -> None:
    """Change every such pool of known sizes, in place; what is not known stays as it is."""
    from onnx import helper, numpy_helper

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
    import onnx

    return next((onnx.helper.get_attribute_value(one) for one in node.attribute if one.name == name), default)


def _shapes(model: Any) -> dict[str, list[int]]:
    """Of every tensor whose shape is known or inferred, with 0 for what is free."""
    import onnx

    with suppress(Exception):  # larger than a protobuf may be, or with operators that onnx does not know
        model = onnx.shape_inference.infer_shapes(model)
    declared = (*model.graph.input, *model.graph.value_info, *model.graph.output)
    return {one.name: [dim.dim_value for dim in one.type.tensor_type.shape.dim] for one in declared}
