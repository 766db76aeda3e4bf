"""Networks that are right in fp32 and hard in INT8: what their channels hold spans three decades.

Each is a CNN of random weights and unit outputs whose channels are then given gains of 0.03 to 30, which the next
convolution takes back; only its classifier is fitted, in closed form, to the digits of scikit-learn. So no training is
needed, and whatever INT8 loses is what its own ranges lose.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from convoy.app.engines.onnx_session import new_session, session_options

SIZE_PX = 32
_DECADES = 3.0
_SOME = 48


class _Builder:
    """A graph under construction, run on some images after each convolution to see what scale its outputs have."""

    def __init__(self, images: np.ndarray, decades: float, top: float, seed: int) -> None:
        self._draw = np.random.default_rng(seed)
        self._some = images[:: max(1, len(images) // _SOME)]
        # The gain of the largest channel, as a power of ten.
        self._top, self._decades = top, decades
        self._constants: dict[str, np.ndarray] = {
            "scale": np.full((1, 3, 1, 1), 1 / 127.5),
            "shift": np.full((1, 3, 1, 1), -1.0),
        }
        self._nodes = [
            helper.make_node("Transpose", ["images"], ["nchw"], "transpose", perm=[0, 3, 1, 2]),
            helper.make_node("Cast", ["nchw"], ["float"], "cast", to=TensorProto.FLOAT),
            helper.make_node("Mul", ["float", "scale"], ["scaled"], "scale_front"),
            helper.make_node("Add", ["scaled", "shift"], ["x"], "shift_front"),
        ]

    def conv(
        self,
        source: str,
        outputs: int,
        kernel: int = 1,
        *,
        stride: int = 1,
        depthwise: bool = False,
        even: bool = False,
    ) -> str:
        """A convolution whose inputs count alike whatever their scale, and whose outputs have gains unless `even`."""
        values = self.run(source, self._some)
        inputs, name = values.shape[1], f"conv{len(self._nodes)}"
        groups = inputs if depthwise else 1
        weight = self._draw.normal(size=(outputs, inputs // groups, kernel, kernel))
        spread = np.maximum(values.std(axis=(0, 2, 3)), 1e-6)
        weight /= spread.reshape(-1, 1, 1, 1) if depthwise else spread.reshape(1, -1, 1, 1)
        self._constants |= {f"{name}.w": weight, f"{name}.b": np.zeros(outputs)}
        attributes = {"pads": [kernel // 2] * 4, "strides": [stride] * 2, "group": groups}
        inside = [source, f"{name}.w", f"{name}.b"]
        self._nodes.append(helper.make_node("Conv", inside, [f"{name}.y"], name, **attributes))
        values = self.run(f"{name}.y", self._some)
        centre, spread = values.mean(axis=(0, 2, 3)), values.std(axis=(0, 2, 3))
        # The same for all of one width, so that what is added up has one scale.
        gains = np.random.default_rng(outputs).permutation(np.logspace(self._top - self._decades, self._top, outputs))
        gains = np.ones(outputs) if even else gains
        self._constants[f"{name}.w"] = weight * (gains / spread).reshape(-1, 1, 1, 1)
        offsets = self._draw.normal(size=outputs) * 0.5
        self._constants[f"{name}.b"] = gains * (offsets - centre / spread)
        return f"{name}.y"

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        name = f"{op.lower()}{len(self._nodes)}"
        self._nodes.append(helper.make_node(op, inputs, [f"{name}.y"], name, **attributes))
        return f"{name}.y"

    def silu(self, source: str) -> str:
        return self.add("Mul", source, self.add("Sigmoid", source))

    def hardswish(self, source: str) -> str:
        return self.add("HardSwish", source)

    def relu6(self, source: str) -> str:
        self._constants |= {"zero": np.array(0.0), "six": np.array(6.0)}
        return self.add("Clip", source, "zero", "six")

    def relu(self, source: str) -> str:
        return self.add("Relu", source)

    def classify(self, source: str, images: np.ndarray, labels: np.ndarray) -> onnx.ModelProto:
        """The whole network, with the ridge regression of the labels as its last layer."""
        flat = self.add("Flatten", self.add("AveragePool", source, kernel_shape=[2, 2], strides=[2, 2]))
        features = self.run(flat, images).astype(np.float64)
        spread = features.std(axis=0) + 1e-6
        whitened = np.c_[(features - features.mean(axis=0)) / spread, np.ones(len(features))]
        targets = 2.0 * np.eye(10)[labels] - 1
        normal = whitened.T @ whitened + 30.0 * np.eye(whitened.shape[1])
        solved = np.linalg.solve(normal, whitened.T @ targets)
        weight = solved[:-1] / spread[:, None]
        self._constants |= {"head.w": weight.T, "head.b": solved[-1] - features.mean(axis=0) @ weight}
        self._nodes.append(helper.make_node("Gemm", [flat, "head.w", "head.b"], ["logits"], "head", transB=1))
        return self._model("logits", ["batch", 10])

    def run(self, name: str, images: np.ndarray) -> np.ndarray:
        serialised = self._model(name, None).SerializeToString()
        session = new_session(serialised, session_options(threads=1))
        found: np.ndarray = session.run(None, {"images": images})[0]
        return found

    def _model(self, output: str, shape: list[int | str] | None) -> onnx.ModelProto:
        graph = helper.make_graph(
            self._nodes,
            "hard",
            [helper.make_tensor_value_info("images", TensorProto.UINT8, ["batch", SIZE_PX, SIZE_PX, 3])],
            [helper.make_tensor_value_info(output, TensorProto.FLOAT, shape)],
            [numpy_helper.from_array(v.astype(np.float32), name) for name, v in self._constants.items()],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def _separable(activation: Callable[[_Builder, str], str]) -> Callable[[_Builder], str]:
    def body(net: _Builder) -> str:
        stream = activation(net, net.conv("x", 24, 3, stride=2))
        for width, stride in ((32, 1), (48, 2), (64, 1), (96, 2)):
            channels = 24 if width == 32 else {48: 32, 64: 48, 96: 64}[width]
            stream = activation(net, net.conv(stream, channels, 3, stride=stride, depthwise=True))
            stream = activation(net, net.conv(stream, width))
        return stream

    return body


def _gated(net: _Builder) -> str:
    """SiLU with squeeze-and-excitation between linear bottlenecks, with additions."""
    stream = net.conv(net.silu(net.conv("x", 24, 3, stride=2)), 24)
    for stride, width in ((2, 48), (2, 64)):
        wide = net.silu(net.conv(stream, width))
        wide = net.silu(net.conv(wide, width, 3, stride=stride, depthwise=True))
        squeezed = net.silu(net.conv(net.add("GlobalAveragePool", wide), 16, even=True))
        wide = net.add("Mul", wide, net.add("Sigmoid", net.conv(squeezed, width, even=True)))
        skipped = net.conv(net.add("AveragePool", stream, kernel_shape=[2, 2], strides=[2, 2]), 32)
        stream = net.add("Add", skipped, net.conv(wide, 32))
    return net.silu(net.conv(stream, 96))


def _concatenated(net: _Builder) -> str:
    """Blocks that append what they compute to what they read, so that all is read together."""
    stream = net.relu(net.conv("x", 24, 3, stride=2))
    for block in range(4):
        grown = net.relu(net.conv(net.relu(net.conv(stream, 32)), 24, 3))
        stream = net.add("Concat", stream, grown, axis=1)
        if block % 2:
            stream = net.add("MaxPool", stream, kernel_shape=[2, 2], strides=[2, 2])
    return net.relu(net.conv(stream, 64))


HARD: dict[str, Callable[[_Builder], str]] = {
    "silu": _separable(_Builder.silu),
    "hardswish": _separable(_Builder.hardswish),
    "relu6": _separable(_Builder.relu6),
    "gated": _gated,
    "concat": _concatenated,
}


def write_hard_network(
    path: Path, name: str, images: np.ndarray, labels: np.ndarray, *, decades: float = _DECADES, seed: int = 1
) -> Path:
    """uint8 [N, 32, 32, 3] -> logits [N, 10] of the network of this name, fitted to these images."""
    # What ReLU6 cuts off must not be most of it.
    net = _Builder(images, decades, 0.3 if name == "relu6" else decades / 2, seed)
    onnx.save(net.classify(HARD[name](net), images, labels), path)
    return path
