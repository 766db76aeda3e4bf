"""Networks for the experiments, written as ONNX node by node: they need neither torch nor an exporter nor a download.

ResNet-50 with its BatchNorms folded into the convolutions, as exporters leave it, and with random weights: how fast it
is and how far two ways of computing it differ does not depend on what it has learnt.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tests.gpu.proof.experiment import NotMeasurable

INPUT, OUTPUT = "images", "logits"
RESNET50 = (3, 4, 6, 3)
_EXPANSION = 4
# Branches as strong as their skips would let rounding grow from block to block, unlike in a trained network.
_BRANCH_SCALE = 0.25
_MEASURED_ON = 4
_OPSET, _IR_VERSION = 17, 8
# Convolutions in BF16, and scales in FP16.
_LATER_OPSET, _LATER_IR_VERSION = 22, 10

# What the network computes in: those of eight bits have FP16 between the convolutions.
Kind = Literal["fp32", "fp16", "bf16", "int8", "fp8"]
_BETWEEN = {"fp32": "FLOAT", "fp16": "FLOAT16", "bf16": "BFLOAT16", "int8": "FLOAT16", "fp8": "FLOAT16"}
_EIGHT_BITS = {"int8": ("INT8", 127.0), "fp8": ("FLOAT8E4M3FN", 448.0)}


def resnet(
    path: Path, *, half: bool, side: int = 224, blocks: Sequence[int] = RESNET50, width: int = 64, classes: int = 1000
) -> Path:
    """float32 [batch, 3, side, side] -> float32 [batch, classes]; inside it computes in FP16 where `half`.

    Raises NotMeasurable without the onnx package.
    """
    return _resnet(_Graph("fp16" if half else "fp32"), path, side, blocks, width, classes)


def resnet_in(
    kind: Kind, folder: Path, *, side: int = 224, blocks: Sequence[int] = RESNET50, width: int = 64, classes: int = 1000
) -> Path:
    """The same network in any kind, as `folder`/<kind>.onnx. One of eight bits is measured on `folder`/fp32.onnx.

    Raises NotMeasurable without onnx, or onnxruntime where something is measured.
    """
    ranges = _ranges(folder / "fp32.onnx", pictures(_MEASURED_ON, side)) if kind in _EIGHT_BITS else []
    return _resnet(_Graph(kind, ranges), folder / f"{kind}.onnx", side, blocks, width, classes)


def _resnet(graph: _Graph, path: Path, side: int, blocks: Sequence[int], width: int, classes: int) -> Path:
    x = graph.cast_in(INPUT)
    x = graph.conv(x, 3, width, kernel=7, stride=2, relu=True)
    x = graph.node("MaxPool", [x], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    channels = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            stride = 2 if stage and not block else 1
            x = graph.bottleneck(x, channels, width << stage, stride)
            channels = (width << stage) * _EXPANSION
    x = graph.node("Flatten", [graph.node("GlobalAveragePool", [x])])
    weight = graph.constant(np.sqrt(1 / channels), (channels, classes))
    x = graph.node("Gemm", [x, weight, graph.constant(0.01, (classes,))])
    graph.cast_out(x, OUTPUT)
    return graph.save(path, ("batch", 3, side, side), ("batch", classes))


def resizing(path: Path, side: int = 32) -> Path:
    """A convolution, and its answer doubled by a size that the graph works out itself, as U-Net and FPN do.

    float32 [batch, 3, side, side] -> float32 [batch, 8, 2 side, 2 side].
    """
    graph = _Graph("fp32")
    x = graph.conv(INPUT, 3, 8, kernel=3, stride=1, relu=True)
    shape = graph.node("Shape", [x])
    first = graph.node("Slice", [shape, graph.integers(0), graph.integers(2)])
    last = graph.node("Mul", [graph.node("Slice", [shape, graph.integers(2), graph.integers(4)]), graph.integers(2, 2)])
    size = graph.node("Concat", [first, last], axis=0)
    graph.node("Resize", [x, "", "", size], outputs=[OUTPUT], mode="linear")
    return graph.save(path, ("batch", 3, side, side), ("batch", 8, 2 * side, 2 * side))


def pictures(count: int, side: int = 224) -> np.ndarray:
    """Random inputs, the same every time: float32 [count, 3, side, side], about as normalised pictures are."""
    return np.random.default_rng(1).standard_normal((count, 3, side, side), np.float32)


def _ranges(model: Path, samples: np.ndarray) -> list[float]:
    """The largest number that comes into each convolution, in their order."""
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise NotMeasurable(f"measuring a network needs onnx and onnxruntime ({error})") from error
    whole = onnx.load(model)
    names = [node.input[0] for node in whole.graph.node if node.op_type == "Conv"]
    known = {INPUT}
    for name in names:
        if name not in known:
            whole.graph.output.append(onnx.ValueInfoProto(name=name))
            known.add(name)
    session = onnxruntime.InferenceSession(whole.SerializeToString(), providers=["CPUExecutionProvider"])
    asked = sorted(known - {INPUT})
    found = dict(zip(asked, session.run(asked, {INPUT: samples}), strict=True)) | {INPUT: samples}
    return [float(np.abs(found[name]).max()) for name in names]


class _Graph:
    """Nodes and weights as they are added; every node's answer has a name of its own.

    `ranges` are `_ranges`', for a kind of eight bits: every convolution is between a quantisation and its reverse.
    """

    def __init__(self, kind: Kind, ranges: Sequence[float] = ()) -> None:
        try:
            import onnx
        except ImportError as error:
            raise NotMeasurable(f"writing a network needs the onnx package ({error})") from error
        self._onnx = onnx
        self._kind, self._ranges = kind, iter(ranges)
        self._type = int(getattr(onnx.TensorProto, _BETWEEN[kind]))
        self._chance = np.random.default_rng(0)
        self._nodes: list[Any] = []
        self._weights: list[Any] = []

    def node(self, kind: str, inputs: Sequence[str], outputs: Sequence[str] = (), **attributes: Any) -> str:
        names = list(outputs) or [f"{kind.lower()}_{len(self._nodes)}"]
        self._nodes.append(self._onnx.helper.make_node(kind, list(inputs), names, **attributes))
        return names[0]

    def constant(self, scale: float, shape: Sequence[int]) -> str:
        return self._add(self._numbers(self._chance.standard_normal(tuple(shape), np.float32) * scale))

    def _numbers(self, values: np.ndarray) -> np.ndarray:
        return values.astype(self._onnx.helper.tensor_dtype_to_np_dtype(self._type))

    def integers(self, *values: int) -> str:
        return self._add(np.array(values, np.int64))

    def _add(self, values: np.ndarray) -> str:
        name = f"weight_{len(self._weights)}"
        self._weights.append(self._onnx.numpy_helper.from_array(values, name))
        return name

    def cast_in(self, name: str) -> str:
        return name if self._kind == "fp32" else self.node("Cast", [name], to=self._type)

    def cast_out(self, name: str, output: str) -> None:
        if self._kind != "fp32":
            self.node("Cast", [name], [output], to=self._onnx.TensorProto.FLOAT)
        else:
            self.node("Identity", [name], [output])

    def conv(
        self, x: str, into: int, out: int, *, kernel: int, stride: int, relu: bool = False, scale: float = 1.0
    ) -> str:
        numbers = self._chance.standard_normal((out, into, kernel, kernel), np.float32)
        numbers *= scale * np.sqrt(2 / (into * kernel * kernel))
        weight = self._add(self._numbers(numbers))
        if self._kind in _EIGHT_BITS:
            x = self._coded(x, np.array(next(self._ranges)))
            weight = self._coded(weight, np.abs(numbers).max(axis=(1, 2, 3)), axis=0)
        bias = self.constant(0.01, (out,))
        around = kernel // 2
        x = self.node("Conv", [x, weight, bias], kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[around] * 4)
        return self.node("Relu", [x]) if relu else x

    def _coded(self, x: str, largest: np.ndarray, **axis: int) -> str:
        """In eight bits and back: what lies in between is what a library computes in."""
        name, most = _EIGHT_BITS[self._kind]
        scale = self._add(self._numbers(largest / most))
        self._weights.append(
            self._onnx.helper.make_tensor(
                f"zero_{len(self._weights)}",
                getattr(self._onnx.TensorProto, name),
                largest.shape,
                bytes(largest.size),
                raw=True,
            )
        )
        given = [scale, self._weights[-1].name]
        return self.node("DequantizeLinear", [self.node("QuantizeLinear", [x, *given], **axis), *given], **axis)

    def bottleneck(self, x: str, channels: int, inner: int, stride: int) -> str:
        out = inner * _EXPANSION
        branch = self.conv(x, channels, inner, kernel=1, stride=1, relu=True)
        branch = self.conv(branch, inner, inner, kernel=3, stride=stride, relu=True)
        branch = self.conv(branch, inner, out, kernel=1, stride=1, scale=_BRANCH_SCALE)
        skip = x if channels == out and stride == 1 else self.conv(x, channels, out, kernel=1, stride=stride, scale=0.7)
        return self.node("Relu", [self.node("Add", [branch, skip])])

    def save(self, path: Path, shape_in: Sequence[int | str], shape_out: Sequence[int | str]) -> Path:
        helper, kind = self._onnx.helper, self._onnx.TensorProto.FLOAT
        graph = helper.make_graph(
            self._nodes,
            "experiment",
            [helper.make_tensor_value_info(INPUT, kind, list(shape_in))],
            [helper.make_tensor_value_info(OUTPUT, kind, list(shape_out))],
            self._weights,
        )
        is_later = self._kind not in ("fp32", "fp16")
        opset, ir_version = (_LATER_OPSET, _LATER_IR_VERSION) if is_later else (_OPSET, _IR_VERSION)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)
        self._onnx.checker.check_model(model)
        self._onnx.save(model, str(path))
        return path
