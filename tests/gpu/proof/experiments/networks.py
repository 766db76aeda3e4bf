"""Networks for the experiments, written as ONNX node by node: they need neither torch nor an exporter nor a download.

ResNet-50 with its BatchNorms folded into the convolutions, as exporters leave it, and with random weights: how fast it
is and how far two ways of computing it differ does not depend on what it has learnt.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.gpu.proof.experiment import NotMeasurable

INPUT, OUTPUT = "images", "logits"
RESNET50 = (3, 4, 6, 3)
_EXPANSION = 4
# Branches as strong as their skips would let rounding grow from block to block, unlike in a trained network.
_BRANCH_SCALE = 0.25
_OPSET, _IR_VERSION = 17, 8


def resnet(
    path: Path, *, half: bool, side: int = 224, blocks: Sequence[int] = RESNET50, width: int = 64, classes: int = 1000
) -> Path:
    """float32 [batch, 3, side, side] -> float32 [batch, classes]; inside it computes in FP16 where `half`.

    Raises NotMeasurable without the onnx package.
    """
    graph = _Graph(half)
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
    graph = _Graph(False)
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


class _Graph:
    """Nodes and weights as they are added; every node's answer has a name of its own."""

    def __init__(self, half: bool) -> None:
        try:
            import onnx
        except ImportError as error:
            raise NotMeasurable(f"writing a network needs the onnx package ({error})") from error
        self._onnx = onnx
        self._half = half
        self._chance = np.random.default_rng(0)
        self._nodes: list[Any] = []
        self._weights: list[Any] = []

    def node(self, kind: str, inputs: Sequence[str], outputs: Sequence[str] = (), **attributes: Any) -> str:
        names = list(outputs) or [f"{kind.lower()}_{len(self._nodes)}"]
        self._nodes.append(self._onnx.helper.make_node(kind, list(inputs), names, **attributes))
        return names[0]

    def constant(self, scale: float, shape: Sequence[int]) -> str:
        values = (self._chance.standard_normal(tuple(shape), np.float32) * scale).astype(
            np.float16 if self._half else np.float32
        )
        return self._add(values)

    def integers(self, *values: int) -> str:
        return self._add(np.array(values, np.int64))

    def _add(self, values: np.ndarray) -> str:
        name = f"weight_{len(self._weights)}"
        self._weights.append(self._onnx.numpy_helper.from_array(values, name))
        return name

    def cast_in(self, name: str) -> str:
        return self.node("Cast", [name], to=self._onnx.TensorProto.FLOAT16) if self._half else name

    def cast_out(self, name: str, output: str) -> None:
        if self._half:
            self.node("Cast", [name], [output], to=self._onnx.TensorProto.FLOAT)
        else:
            self.node("Identity", [name], [output])

    def conv(
        self, x: str, into: int, out: int, *, kernel: int, stride: int, relu: bool = False, scale: float = 1.0
    ) -> str:
        weight = self.constant(scale * np.sqrt(2 / (into * kernel * kernel)), (out, into, kernel, kernel))
        bias = self.constant(0.01, (out,))
        around = kernel // 2
        x = self.node("Conv", [x, weight, bias], kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[around] * 4)
        return self.node("Relu", [x]) if relu else x

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
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION)
        self._onnx.checker.check_model(model)
        self._onnx.save(model, str(path))
        return path
