"""ResNet-50 with random weights, as an ONNX file and in torch, from the same numbers.

Batch normalisation is folded into the convolutions, as exporters leave it. Speed and the distance between two ways of
computing do not depend on what a network has learnt. Input: uint8 [N, side, side, 3]; output: float32 [N, classes].
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

INPUT, OUTPUT = "images", "logits"
_EXPANSION = 4
# As strong as their skips, the branches would let rounding errors grow from block to block, unlike after training.
_BRANCH_SCALE, _SKIP_SCALE = 0.25, 0.7
_OPSET, _IR_VERSION = 17, 8


class Size(NamedTuple):
    """How large the network is. `Size()` is ResNet-50."""

    side: int = 224
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    classes: int = 1000


SMALL = Size(32, (1, 1), 8, 10)


class _Operators(Protocol):
    """What the network is made of: nodes of a graph, or calls that compute."""

    def conv(self, x: Any, weight: np.ndarray, bias: np.ndarray, stride: int) -> Any: ...
    def relu(self, x: Any) -> Any: ...
    def add(self, x: Any, y: Any) -> Any: ...
    def max_pool(self, x: Any) -> Any: ...
    def mean(self, x: Any) -> Any: ...
    def dense(self, x: Any, weight: np.ndarray, bias: np.ndarray) -> Any: ...


def images(count: int, size: Size) -> np.ndarray:
    """Random pictures, the same every time: uint8 [count, side, side, 3]."""
    return np.random.default_rng(1).integers(0, 256, (count, size.side, size.side, 3), np.uint8)


def write_onnx(path: Path, size: Size, *, half: bool) -> Path:
    """Write the network; inside it computes in FP16 where `half`. Raises ImportError without the onnx package."""
    graph = _Graph(half)
    graph.finish(_resnet(graph, graph.front(INPUT), size))
    graph.save(path, size)
    return path


def torch_network(torch: Any, size: Size, *, half: bool, device: str) -> Any:
    """A function of torch's: uint8 [N, side, side, 3] on `device` -> float32 [N, classes], eager, channels last."""
    kept = _Torch(torch, torch.float16 if half else torch.float32, device)

    def run(pictures: Any) -> Any:
        kept.rewind()
        with torch.inference_mode():
            x = (pictures.permute(0, 3, 1, 2).float() / 127.5 - 1.0).to(kept.dtype)
            return _resnet(kept, x, size).float()

    return run


def _resnet(ops: _Operators, x: Any, size: Size) -> Any:
    chance = np.random.default_rng(0)

    def conv(x: Any, into: int, out: int, kernel: int, stride: int, scale: float = 1.0) -> Any:
        weight = chance.standard_normal((out, into, kernel, kernel), np.float32)
        weight *= scale * np.sqrt(2 / (into * kernel * kernel))
        return ops.conv(x, weight, chance.standard_normal(out, np.float32) * 0.01, stride)

    x = ops.max_pool(ops.relu(conv(x, 3, size.width, 7, 2)))
    channels = size.width
    for stage, count in enumerate(size.blocks):
        for block in range(count):
            inner, stride = size.width << stage, 2 if stage and not block else 1
            out = inner * _EXPANSION
            branch = ops.relu(conv(x, channels, inner, 1, 1))
            branch = ops.relu(conv(branch, inner, inner, 3, stride))
            branch = conv(branch, inner, out, 1, 1, _BRANCH_SCALE)
            skip = x if channels == out and stride == 1 else conv(x, channels, out, 1, stride, _SKIP_SCALE)
            x, channels = ops.relu(ops.add(branch, skip)), out
    weight = chance.standard_normal((channels, size.classes), np.float32) * np.float32(np.sqrt(1 / channels))
    return ops.dense(ops.mean(x), weight, chance.standard_normal(size.classes, np.float32) * 0.01)


class _Graph:
    """The operators as ONNX nodes."""

    def __init__(self, half: bool) -> None:
        import onnx

        self._onnx, self._half = onnx, half
        self._nodes: list[Any] = []
        self._weights: list[Any] = []

    def front(self, x: str) -> str:
        """uint8 NHWC to normalised NCHW in the network's type, as Convoy's own exports do it."""
        x = self._node("Cast", [x], to=self._onnx.TensorProto.FLOAT)
        x = self._node(
            "Sub", [self._node("Div", [x, self._constant(np.float32(127.5))]), self._constant(np.float32(1))]
        )
        x = self._node("Transpose", [x], perm=[0, 3, 1, 2])
        return self._node("Cast", [x], to=self._onnx.TensorProto.FLOAT16) if self._half else x

    def conv(self, x: str, weight: np.ndarray, bias: np.ndarray, stride: int) -> str:
        kernel = weight.shape[2]
        given = [x, self._weight(weight), self._weight(bias)]
        return self._node("Conv", given, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[kernel // 2] * 4)

    def relu(self, x: str) -> str:
        return self._node("Relu", [x])

    def add(self, x: str, y: str) -> str:
        return self._node("Add", [x, y])

    def max_pool(self, x: str) -> str:
        return self._node("MaxPool", [x], kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)

    def mean(self, x: str) -> str:
        return self._node("Flatten", [self._node("GlobalAveragePool", [x])])

    def dense(self, x: str, weight: np.ndarray, bias: np.ndarray) -> str:
        return self._node("Gemm", [x, self._weight(weight), self._weight(bias)])

    def finish(self, x: str) -> None:
        kind = self._onnx.TensorProto.FLOAT
        self._nodes.append(self._onnx.helper.make_node("Cast", [x], [OUTPUT], to=kind))

    def save(self, path: Path, size: Size) -> None:
        helper, proto = self._onnx.helper, self._onnx.TensorProto
        taken = helper.make_tensor_value_info(INPUT, proto.UINT8, ["batch", size.side, size.side, 3])
        given = helper.make_tensor_value_info(OUTPUT, proto.FLOAT, ["batch", size.classes])
        graph = helper.make_graph(self._nodes, "resnet", [taken], [given], self._weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION)
        self._onnx.save(model, str(path))

    def _node(self, kind: str, inputs: Sequence[str], **attributes: Any) -> str:
        name = f"{kind.lower()}_{len(self._nodes)}"
        self._nodes.append(self._onnx.helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def _weight(self, values: np.ndarray) -> str:
        return self._constant(values.astype(np.float16 if self._half else np.float32))

    def _constant(self, values: Any) -> str:
        name = f"weight_{len(self._weights)}"
        self._weights.append(self._onnx.numpy_helper.from_array(np.asarray(values), name))
        return name


class _Torch:
    """The operators as torch computes them; weights are put on the device in the first run."""

    def __init__(self, torch: Any, dtype: Any, device: str) -> None:
        self._torch, self._functional = torch, torch.nn.functional
        self.dtype, self._device = dtype, device
        self._weights: list[Any] = []
        self._next = 0

    def rewind(self) -> None:
        self._next = 0

    def _weight(self, values: np.ndarray) -> Any:
        if self._next == len(self._weights):
            tensor = self._torch.from_numpy(np.array(values, np.float32)).to(self._device, self.dtype)
            if values.ndim == 4:
                tensor = tensor.to(memory_format=self._torch.channels_last)
            self._weights.append(tensor)
        self._next += 1
        return self._weights[self._next - 1]

    def conv(self, x: Any, weight: np.ndarray, bias: np.ndarray, stride: int) -> Any:
        kernel = weight.shape[2]
        return self._functional.conv2d(x, self._weight(weight), self._weight(bias), stride, kernel // 2)

    def relu(self, x: Any) -> Any:
        return self._functional.relu(x)

    def add(self, x: Any, y: Any) -> Any:
        return x + y

    def max_pool(self, x: Any) -> Any:
        return self._functional.max_pool2d(x, 3, 2, 1)

    def mean(self, x: Any) -> Any:
        return x.mean((2, 3))

    def dense(self, x: Any, weight: np.ndarray, bias: np.ndarray) -> Any:
        return x @ self._weight(weight) + self._weight(bias)
