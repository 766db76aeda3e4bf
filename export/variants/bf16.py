"""BF16 for processors that multiply it: the weights in BF16, cast back at once, in half of FP32's bytes.

OpenVINO folds the casts and is told to compute in BF16, activations too. BF16 has FP32's range, so that no node has to
stay in FP32 for its values. Knows nothing of accuracy or devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from convoy.export.variants.calibrate import Conversion
from convoy.export.variants.onnx_graph import array, initializers, tidy

LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})


def convert_to_bf16(conversion: Conversion, target: Path) -> Mapping[str, str]:
    """Write `target`; nothing is left in higher precision by rule. Raises OSError when the disk is full."""
    model = onnx.load(str(conversion.calibration.graph))
    graph, constants = model.graph, initializers(model.graph)
    narrow = helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16)
    for node in list(graph.node):
        if node.op_type not in LAYERS or not conversion.takes(node.name):
            continue
        for index, name in enumerate(node.input):
            weight = constants.get(name)
            if weight is None or weight.data_type != TensorProto.FLOAT or len(weight.dims) < 2:
                continue
            stored = array(weight).astype(narrow)
            short, wide = f"{name}_bf16", f"{node.name}_{name}_wide"
            if short not in constants:
                values = helper.make_tensor(short, TensorProto.BFLOAT16, stored.shape, stored.tobytes(), raw=True)
                graph.initializer.append(values)
                constants[short] = values
            graph.node.insert(0, helper.make_node("Cast", [short], [wide], to=TensorProto.FLOAT))
            node.input[index] = wide
    tidy(graph)
    onnx.save(model, str(target))
    return {}
