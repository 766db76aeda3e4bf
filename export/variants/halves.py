"""FP16 for the GPU, and BF16 for processors that support it; nodes stay in FP32 if measured values require it.

A node stays in FP32 in an FP16 file if a value at its inputs or outputs exceeds 512 on real images, or one of its
constants exceeds FP16's largest number: sums of products of larger values overflow at 65504. The limits are those of
NVIDIA's AutoCast (TensorRT Model Optimizer, guide 8). The uint8 front stays in FP32 and exact. BF16 has FP32's range,
so no node must stay in FP32 for its values.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from convoy.export.sources.torch_job import one_line
from convoy.export.variants.calibrate import Conversion, Ranges
from convoy.export.variants.onnx_graph import (
    array,
    attribute,
    front_nodes,
    initializers,
    producers,
    rewire,
    tidy,
)
from convoy.models.errors import JobError

CONSTANT_LIMIT = 65504.0


def convert_to_fp16(conversion: Conversion, target: Path) -> Mapping[str, str]:
    """Write `target`. Returns the names of the nodes left in FP32 beyond the front, each with its reason.

    Inputs and outputs keep their types. Ranges are the exact extremes, whatever the method. Raises JobError if the
    graph cannot be converted, and OSError if the disk is full.
    """
    model = onnx.load(str(conversion.calibration.graph))
    kept = out_of_range(model.graph, conversion.calibration.ranges["minmax"])
    others = {node.name for node in model.graph.node if not conversion.takes(node.name)}
    onnx.save(as_fp16(model, kept.keys() | others), str(target))
    return kept


def out_of_range(graph: Any, ranges: Ranges, limit: float = 512.0) -> dict[str, str]:
    """The nodes whose values exceed FP16's range, each with the value."""
    constants = initializers(graph)
    front = set(front_nodes(graph))
    found = {}
    for node in graph.node:
        if node.name in front:
            continue
        values = [(max(map(abs, ranges[name])), limit) for name in (*node.input, *node.output) if name in ranges]
        weights = [
            (float(np.abs(array(constants[name])).max(initial=0)), CONSTANT_LIMIT)
            for name in node.input
            if name in constants and constants[name].data_type == 1
        ]
        over = [value for value, most in (*values, *weights) if value > most]
        if over:
            found[node.name] = f"values up to {max(over):.3g}"
    return found


def as_fp16(model: Any, kept: Iterable[str]) -> Any:
    """The model in FP16, except for its front, the nodes of `kept`, and the types of its inputs and outputs."""
    blocked = [*front_nodes(model.graph), *kept]
    # The package puts its own folder, full of common names, on the import path.
    path = list(sys.path)
    try:
        from onnxruntime.transformers.float16 import convert_float_to_float16

        model = convert_float_to_float16(model, keep_io_types=True, node_block_list=blocked)
    except Exception as error:  # the converter's errors share no base class
        raise JobError(f"fp16 cannot be made from this network ({one_line(str(error))})") from error
    finally:
        sys.path[:] = path
    _cast_once(model.graph)
    _join_fp32_islands(model.graph)
    tidy(model.graph)
    return model


def _cast_once(graph: Any) -> None:
    """The converter writes one cast per reader of a tensor, all with one name; keep one."""
    seen: set[str] = set()
    for node in list(graph.node):
        if node.op_type == "Cast" and node.output[0] in seen:
            graph.node.remove(node)
        seen.update(node.output)


def _join_fp32_islands(graph: Any) -> None:
    """Remove casts to FP16 and straight back between two FP32 nodes: the very values that do not fit pass there."""
    makers = producers(graph)
    for node in list(graph.node):
        if node.op_type != "Cast" or attribute(node, "to", None) != onnx.TensorProto.FLOAT:
            continue
        before = makers.get(node.input[0])
        if before is not None and _is_from_fp32(before):
            rewire(graph, node.output[0], before.input[0])
            if node.output[0] in {output.name for output in graph.output}:
                _give_out(graph, makers, before.input[0], node)


def _give_out(graph: Any, makers: Mapping[str, Any], tensor: str, cast: Any) -> None:
    """Let the FP32 node behind `tensor` write the graph's output that `cast` wrote."""
    output = cast.output[0]
    cast.output[0] = f"{output}_unused"
    maker = makers[tensor]
    maker.output[list(maker.output).index(tensor)] = output
    rewire(graph, tensor, output)


def _is_from_fp32(node: Any) -> bool:
    """Whether it is the converter's cast of the output of a node left in FP32."""
    return node.op_type == "Cast" and str(node.name).endswith("_cast_to_fp16_node")


def convert_to_bf16(conversion: Conversion, target: Path) -> Mapping[str, str]:
    """Write `target`: the weights in BF16, cast back at once, in half of FP32's bytes.

    OpenVINO folds the casts and is told to compute in BF16, activations too. No node is left in higher precision by
    rule. Raises OSError if the disk is full.
    """
    model = onnx.load(str(conversion.calibration.graph))
    graph, constants = model.graph, initializers(model.graph)
    narrow = onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.BFLOAT16)
    for node in list(graph.node):
        if node.op_type not in ("Conv", "ConvTranspose", "Gemm", "MatMul") or not conversion.takes(node.name):
            continue
        for index, name in enumerate(node.input):
            weight = constants.get(name)
            if weight is None or weight.data_type != onnx.TensorProto.FLOAT or len(weight.dims) < 2:
                continue
            stored = array(weight).astype(narrow)
            short, wide = f"{name}_bf16", f"{node.name}_{name}_wide"
            if short not in constants:
                values = onnx.helper.make_tensor(
                    short, onnx.TensorProto.BFLOAT16, stored.shape, stored.tobytes(), raw=True
                )
                graph.initializer.append(values)
                constants[short] = values
            graph.node.insert(0, onnx.helper.make_node("Cast", [short], [wide], to=onnx.TensorProto.FLOAT))
            node.input[index] = wide
    tidy(graph)
    onnx.save(model, str(target))
    return {}
