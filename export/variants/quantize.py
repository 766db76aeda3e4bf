"""INT8 for the CPU: the fp32 graph with quantise-dequantise pairs, U8 activations and S8 weights per channel.

Uses onnxruntime's quantiser. Asymmetric U8 with S8 is the combination whose x86 kernels are tuned. `verify` and
`recover` judge the result.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from convoy.app.engines.cpu import has_int8_dot_product
from convoy.export.sources.torch_job import one_line
from convoy.export.variants.calibrate import Calibration, Conversion, Ranges
from convoy.export.variants.onnx_graph import (
    QDQ_OPSET,
    array,
    attribute,
    consumers,
    front_nodes,
    initializers,
    opset_of,
)
from convoy.export.variants.streams import GATES
from convoy.models.errors import JobError

# Operators that gain from 8 bits by themselves; the others follow their neighbours.
_WITH_WEIGHTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
_LAYERS = _WITH_WEIGHTS | frozenset(
    {"Add", "Mul", "Concat", "AveragePool", "GlobalAveragePool"} | {"Sigmoid", "LeakyRelu", "Softmax", "Resize"}
)


def quantize_for_cpu(conversion: Conversion, target: Path) -> Mapping[str, str]:
    """Write `target`, the U8S8 form of the prepared graph.

    Without 8-bit dot products, x86 adds pairs of products in saturating 16 bits; there, weights get 7 bits. Returns no
    nodes, because the scheme keeps none that multiply and add in float. Raises JobError if the graph cannot be
    quantised, and OSError if the disk is full.
    """
    graph = onnx.load(str(conversion.calibration.graph)).graph
    quantize_with_ranges(
        conversion.calibration.graph,
        target,
        conversion.ranges,
        activation_type="QUInt8",
        reduce_range=not has_int8_dot_product(),
        nodes_to_exclude=[*front_nodes(graph), *_unlevel(graph), *_behind_layers(graph), *conversion.keep],
        nodes_to_quantize=sorted(conversion.only) if conversion.only else None,
        extra_options={
            "ActivationSymmetric": False,
            "WeightSymmetric": True,
            # Logits in 256 steps tie and swap; the kernel outputs float at the same cost.
            "OpTypesToExcludeOutputQuantization": ["Gemm"],
        },
    )
    return {}


def layers(calibration: Calibration) -> tuple[str, ...]:
    """The names of the nodes that quantisation rounds, in the graph's order, without its front."""
    graph = onnx.load(str(calibration.graph)).graph
    left = {*front_nodes(graph), *_unlevel(graph), *_behind_layers(graph)}
    floats = calibration.ranges["minmax"]
    return tuple(
        node.name
        for node in graph.node
        if node.op_type in _LAYERS and node.name not in left and node.output[0] in floats
    )


def _behind_layers(graph: Any) -> list[str]:
    """The operators from which no layer with weights follows.

    What they compute are answers, and they take little time. In a YOLO they join boxes in pixels and scores, which have
    no common scale: in 256 steps of 2.5 pixels every score is 0.
    """
    readers = consumers(graph)
    leads: set[str] = set()
    for node in reversed(graph.node):
        following = [reader.name for output in node.output for reader in readers[output]]
        if node.op_type in _WITH_WEIGHTS or not leads.isdisjoint(following):
            leads.add(node.name)
    return [node.name for node in graph.node if node.name not in leads]


def _unlevel(graph: Any) -> list[str]:
    """Products that undo scales which do not fit into 8 bits, and what follows until they do.

    That is a sigmoid, and its own product with what fits. None of it multiplies and adds.
    """
    constants, readers = initializers(graph), consumers(graph)
    found: list[str] = []
    for node in graph.node:
        factors = [array(constants[name]) for name in node.input if name in constants]
        if node.op_type != "Mul" or not factors or np.ptp(factors[0]) == 0 or (factors[0] <= 0).any():
            continue
        # Factors this far apart leave the smallest channel less than six of its eight bits.
        if factors[0].max() < 4.0 * factors[0].min():
            continue
        gates = [reader for reader in readers[node.output[0]] if reader.op_type in GATES]
        products = [reader for gate in gates for reader in readers[gate.output[0]]]
        found += [one.name for one in (node, *gates, *products)]
    return found


def quantize_with_ranges(
    graph: Path,
    target: Path,
    ranges: Ranges,
    *,
    activation_type: str,
    extra_options: Mapping[str, Any],
    **options: Any,
) -> None:
    """`onnxruntime.quantization.quantize_static` with known ranges, in the QDQ form.

    Raises JobError if the quantiser refuses the graph, and OSError if the disk is full.
    """
    from onnxruntime import quantization

    model = onnx.load(str(graph), load_external_data=False)
    if (opset := opset_of(model)) < QDQ_OPSET:
        raise JobError(
            f"int8 cannot be made from this network of opset {opset}, which cannot be raised to {QDQ_OPSET}; export "
            f"it with opset {QDQ_OPSET} or newer"
        )
    with _quiet(), tempfile.TemporaryDirectory(prefix="convoy-ranges-") as folder:
        try:
            quantization.quantize_static(
                str(graph),
                str(target),
                None,
                quant_format=quantization.QuantFormat.QDQ,
                activation_type=getattr(quantization.QuantType, activation_type),
                weight_type=quantization.QuantType.QInt8,
                per_channel=True,
                calibrate_method=quantization.CalibrationMethod.MinMax,
                calibration_cache_path=_as_cache(ranges, Path(folder) / "ranges.json"),
                extra_options={**extra_options, "TensorQuantOverrides": _of_grouped_transposes(model.graph)},
                **options,
            )
        except (OSError, JobError):
            raise
        except Exception as error:  # onnxruntime's and onnx's errors share no base class
            raise JobError(f"int8 cannot be made from this network ({one_line(str(error))})") from error


def _of_grouped_transposes(graph: Any) -> dict[str, list[dict[str, Any]]]:
    """One scale for all weights of a grouped transposed convolution.

    These are [inputs, outputs of a group, ...]: a scale per second index belongs to one output of every group, but the
    quantiser takes it for one of a single output and has none for the bias.
    """
    from onnxruntime.quantization import QuantType

    return {
        node.input[1]: [{"quant_type": QuantType.QInt8, "symmetric": True}]
        for node in graph.node
        if node.op_type == "ConvTranspose" and attribute(node, "group", 1) > 1
    }


def _as_cache(ranges: Ranges, path: Path) -> Path:
    """Our ranges in the file that the quantiser reads instead of calibrating; the method's name does not matter."""
    from onnxruntime.quantization import CalibrationMethod
    from onnxruntime.quantization.calibrate import TensorData, TensorsData, save_tensors_data

    data = {
        name: TensorData(lowest=np.array(low, np.float32), highest=np.array(high, np.float32))
        for name, (low, high) in ranges.items()
    }
    save_tensors_data(TensorsData(CalibrationMethod.MinMax, data), path)
    return path


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the quantiser's advice, which goes to the root logger and is about calls that the user did not make."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
