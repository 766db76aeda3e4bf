"""An FP16 file's arithmetic on a machine that has none.

ONNX Runtime runs FP16 nodes on a CPU in FP32 and takes the casts between them out, so that neither rounding nor
overflow shows: 70,000 passes through such a node unharmed, where a GPU gives infinity. Here every result of an
FP16 node is rounded by a cast that is written into the graph, which it must obey. Sums are taken in FP32, as
tensor cores do. Knows graphs; the twin is for measuring only and never part of a bundle.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from export.variants.onnx_graph import array, tidy

# What these give is exactly one of the values they take; and behind a dequantisation the kernel works on integers.
_EXACT = frozenset(
    {"Relu", "Clip", "MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Split"}
    | {"Concat", "Gather", "Identity", "Pad", "QuantizeLinear", "DequantizeLinear", "Cast", "Constant"}
)


def write_rounding_twin(path: Path, target: Path) -> Path:
    """Write to `target` the FP32 graph that computes what the FP16 nodes of `path` would; returns `target`."""
    import onnx

    model = onnx.load(str(path))
    half = _half_tensors(model)
    _widen(model.graph)
    for node in list(model.graph.node):
        if node.op_type not in _EXACT:
            _round_results(model.graph, node, half)
    tidy(model.graph)
    onnx.save(model, str(target))
    return target


def _half_tensors(model: Any) -> set[str]:
    """The names of all FP16 tensors."""
    import onnx

    inferred = onnx.shape_inference.infer_shapes(model).graph
    return {
        info.name
        for info in (*inferred.value_info, *inferred.output)
        if info.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16
    }


def _widen(graph: Any) -> None:
    """Make FP32 of every FP16 constant and cast; a cast to FP16 becomes one there and back."""
    from onnx import TensorProto, helper, numpy_helper

    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.FLOAT16:
            tensor.CopyFrom(numpy_helper.from_array(array(tensor).astype(np.float32), tensor.name))
    for node in list(graph.node):
        for attribute in node.attribute:
            if attribute.name == "value" and attribute.t.data_type == TensorProto.FLOAT16:
                attribute.t.CopyFrom(numpy_helper.from_array(array(attribute.t).astype(np.float32)))
        if node.op_type == "Cast" and any(a.name == "to" and a.i == TensorProto.FLOAT16 for a in node.attribute):
            inner = f"{node.output[0]}_in_half"
            graph.node.append(helper.make_node("Cast", [inner], [node.output[0]], to=TensorProto.FLOAT))
            node.output[0] = inner
    del graph.value_info[:]


def _round_results(graph: Any, node: Any, half: set[str]) -> None:
    from onnx import TensorProto, helper

    for index, name in enumerate(node.output):
        if name not in half:
            continue
        exact, rounded = f"{name}_exact", f"{name}_rounded"
        node.output[index] = exact
        graph.node.append(helper.make_node("Cast", [exact], [rounded], to=TensorProto.FLOAT16))
        graph.node.append(helper.make_node("Cast", [rounded], [name], to=TensorProto.FLOAT))
