"""Small graphs with the patterns that runtimes fuse, remove or rewrite, to compare optimised and not.

One row each: what is computed and from which inputs. Values are drawn from a seed and have both signs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT, HALF, INT64 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT64
OPSET, IR_VERSION = 20, 9
BATCH = 2
IMAGE = (3, 9, 10)


class Value(str):
    """The name of a tensor in the graph of a writer, with which can be calculated."""

    __slots__ = ("writer",)
    writer: Writer

    def __add__(self, other: object) -> Value:  # type: ignore[override]
        return self.writer.op("Add", self, other)

    def __sub__(self, other: object) -> Value:
        return self.writer.op("Sub", self, other)

    def __mul__(self, other: object) -> Value:  # type: ignore[override]
        return self.writer.op("Mul", self, other)

    def __truediv__(self, other: object) -> Value:
        return self.writer.op("Div", self, other)

    def __matmul__(self, other: object) -> Value:
        return self.writer.op("MatMul", self, other)


class Writer:
    """Nodes one after the other; every call gives its output. What is no name of a tensor is a constant."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def value(self, name: str) -> Value:
        made = Value(name)
        made.writer = self
        return made

    def op(self, kind: str, *inputs: object, **attributes: object) -> Value:
        (output,) = self.ops(kind, 1, *inputs, **attributes)
        return output

    def ops(self, kind: str, outputs: int, *inputs: object, **attributes: object) -> list[Value]:
        names = [f"t{len(self.nodes)}_{index}" for index in range(outputs)]
        given = [one if isinstance(one, str) else self.const(one) for one in inputs]
        self.nodes.append(helper.make_node(kind, given, names, f"n{len(self.nodes)}", **attributes))
        return [self.value(name) for name in names]

    def const(self, values: object, dtype: type = np.float32) -> Value:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(values, dtype), name))
        return self.value(name)

    def ints(self, *values: int) -> Value:
        return self.const(values, np.int64)

    def weights(self, *shape: int, dtype: type = np.float32) -> Value:
        return self.const(0.5 * self.random.standard_normal(shape), dtype)

    def conv(self, x: str, channels: int = 3, out: int = 4, side: int = 3, **attributes: object) -> Value:
        group = int(attributes.get("group", 1))  # type: ignore[call-overload]
        kernel = self.weights(out, channels // group, side, side)
        return self.op("Conv", x, kernel, self.weights(out), kernel_shape=[side, side], **attributes)

    def cast(self, x: str, *types: int) -> Value:
        """To these types, one after the other."""
        for to in types:
            x = self.op("Cast", x, to=to)
        return x  # type: ignore[return-value]

    def turned(self, x: str, *perm: int) -> Value:
        return self.op("Transpose", x, perm=perm)

    def reshaped(self, x: str, *shape: int) -> Value:
        return self.op("Reshape", x, self.ints(*shape))

    def joined(self, axis: int, *parts: str) -> Value:
        return self.op("Concat", *parts, axis=axis)

    def mean(self, x: str, *axes: int) -> Value:
        return self.op("ReduceMean", x, self.ints(*axes))

    def padded(self, x: str, pads: Sequence[int], value: float | None = 0.0, mode: str = "constant") -> Value:
        """Of a picture: above, left, below and right."""
        given = [self.ints(0, 0, *pads[:2], 0, 0, *pads[2:])]
        return self.op("Pad", x, *given, *([] if value is None or mode != "constant" else [value]), mode=mode)

    def pooled(self, x: str, side: int, step: int, kind: str = "MaxPool", **how: object) -> Value:
        return self.op(kind, x, kernel_shape=[side, side], strides=[step, step], **how)

    def norm(self, x: str, channels: int = 4) -> Value:
        spread = self.const(0.2 + np.abs(self.random.standard_normal(channels)))
        own = [self.weights(channels) for _ in range(3)]
        return self.op("BatchNormalization", x, *own, spread, epsilon=1e-3)

    def rounded(self, x: str, scale: float = 0.05, zero: int = 120) -> Value:
        """A pair of quantise and dequantise."""
        step, point = self.const(scale), self.const(zero, np.uint8)
        return self.op("DequantizeLinear", self.op("QuantizeLinear", x, step, point), step, point)

    def rounded_weights(self, *shape: int) -> Value:
        values = self.random.integers(-127, 128, shape)
        return self.op("DequantizeLinear", self.const(values, np.int8), 0.01, self.const(0, np.int8))


Write = Callable[[Writer, Value], "Value | list[Value]"]


@dataclass(frozen=True)
class SmallGraph:
    """`write` makes the outputs of the input `x`, whose samples have `shape`. `tolerance` is of ||a - b|| / ||b||."""

    name: str
    write: Write
    shape: tuple[int, ...] = IMAGE
    dtype: type = np.float32
    tolerance: float = 1e-5
    opset: int = OPSET

    def model(self) -> onnx.ModelProto:
        """The graph in a batch of `BATCH`, with weights from a seed of its own."""
        writer = Writer(seed=sum(self.name.encode()))
        made = self.write(writer, writer.value("x"))
        outputs = [made] if isinstance(made, str) else made
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype))
        graph = helper.make_graph(
            writer.nodes,
            "small",
            [helper.make_tensor_value_info("x", kind, [BATCH, *self.shape])],
            [onnx.ValueInfoProto(name=name) for name in outputs],
            writer.constants,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=IR_VERSION)
        return onnx.shape_inference.infer_shapes(model)

    def inputs(self) -> list[np.ndarray]:
        """Noise of both signs, of each alone, far from zero, and zeros."""
        shape, random = (BATCH, *self.shape), np.random.default_rng(7)
        if self.dtype is np.uint8:
            whole = random.integers(0, 256, shape, np.uint8)
            return [whole, np.zeros_like(whole), np.full_like(whole, 255)]
        noise = random.standard_normal(shape)
        return [one.astype(self.dtype) for one in (noise, -np.abs(noise), np.abs(noise), 4 * noise - 2, 0 * noise)]


def _pad_conv(w: Writer, x: Value, mode: str = "constant", value: float = 0.0) -> Value:
    return w.conv(w.padded(x, (1, 2, 0, 1), value, mode), strides=[2, 2], pads=[0, 1, 1, 0])


def _gelu(w: Writer, x: Value) -> Value:
    return x * (w.op("Erf", x / np.sqrt(2.0)) + 1.0) * 0.5


def _layer_norm_parts(w: Writer, x: Value) -> Value:
    centred = x - w.mean(x, -1)
    spread = w.mean(w.op("Pow", centred, 2.0), -1)
    return centred / w.op("Sqrt", spread + 1e-5) * w.weights(8) + w.weights(8)


def _skip_layer_norm(w: Writer, x: Value) -> list[Value]:
    both = x @ w.weights(8, 8) + w.weights(8) + x
    return [w.op("LayerNormalization", both, w.weights(8), w.weights(8), axis=-1, epsilon=1e-5), both]


def _group_norm(w: Writer, x: Value) -> Value:
    flat, ones, zeros = w.reshaped(x, 0, 2, -1), w.const([1.0, 1.0]), w.const([0.0, 0.0])
    normed = w.op("InstanceNormalization", flat, ones, zeros, epsilon=1e-5)
    return w.reshaped(normed, BATCH, 4, 5, 6) * w.weights(4, 1, 1) + w.weights(4, 1, 1)


def _transposed_pool(w: Writer, x: Value) -> Value:
    rows = w.turned(w.conv(x), 0, 2, 3, 1)
    summed = w.op("ReduceSum", rows, w.ints(1, 2), keepdims=0)
    return w.joined(-1, summed, w.op("ReduceMax", rows, w.ints(-2, -3), keepdims=0))


def _transposed_pad_concat(w: Writer, x: Value) -> Value:
    wider = w.op("Pad", w.turned(x, 0, 2, 3, 1), w.ints(0, 1, 0, 0, 0, 0, 1, 0), 0.5)
    return w.conv(w.turned(w.joined(3, wider, w.op("Neg", wider)), 0, 3, 1, 2), 6, 4)


def _reshapes(w: Writer, x: Value) -> Value:
    rows = w.op("Gather", w.op("Shape", x), w.ints(0), axis=0)
    flat = w.reshaped(w.op("Reshape", x, w.joined(0, rows, w.ints(3, -1))), 0, -1, 1)
    first = w.op("Unsqueeze", w.op("Squeeze", flat, w.ints(2)), w.ints(1))
    return w.op("Flatten", w.reshaped(first, BATCH, 9, 3, 10), axis=2)


def _slices(w: Writer, x: Value) -> Value:
    whole = w.op("Slice", x, w.ints(0), w.ints(2**62), w.ints(2))
    part = w.op("Slice", whole, w.ints(1, -1), w.ints(8, 0), w.ints(2, 3), w.ints(2, -2))
    return w.op("Slice", part, w.ints(-3), w.ints(2**31), w.ints(1))


def _concats(w: Writer, x: Value) -> Value:
    parts = w.ops("Split", 3, w.joined(1, x), axis=1, num_outputs=3)
    return w.joined(1, w.joined(1, parts[2], parts[0]), parts[1])


def _split_sizes(w: Writer, x: Value) -> list[Value]:
    first, second = w.ops("Split", 2, x, w.ints(4, 6), axis=3)
    return [w.op("Relu", first), w.joined(3, second, first)]


def _slices_concat(w: Writer, x: Value) -> Value:
    """A focus layer: every other pixel."""
    parts = []
    for down, right in ((0, 0), (1, 0), (0, 1), (1, 1)):
        rows = w.op("Slice", x, w.ints(down), w.ints(2**62), w.ints(2), w.ints(2))
        parts.append(w.op("Slice", rows, w.ints(right), w.ints(2**62), w.ints(3), w.ints(2)))
    return w.conv(w.joined(1, *parts), 12, 4)


_RESIZES = (
    {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
    {"mode": "nearest", "coordinate_transformation_mode": "half_pixel", "nearest_mode": "round_prefer_ceil"},
    {"mode": "linear", "coordinate_transformation_mode": "half_pixel"},
    {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
    {"mode": "linear", "coordinate_transformation_mode": "pytorch_half_pixel"},
    {"mode": "cubic", "coordinate_transformation_mode": "half_pixel", "cubic_coeff_a": -0.75},
)


def _upsampled_concat(w: Writer, x: Value) -> Value:
    small = w.pooled(x, 2, 2, ceil_mode=1)
    large = w.op("Resize", small, "", "", w.ints(BATCH, 3, 9, 10), mode="nearest")
    return w.conv(w.joined(1, large, x), 6, 4, pads=[1, 1, 1, 1])


def _attention(w: Writer, x: Value) -> Value:
    """Two heads of four, as an encoder has them."""
    query, key, value = (
        w.turned(w.reshaped(x @ w.weights(8, 8) + w.weights(8), 0, 0, 2, 4), *perm)
        for perm in ((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3))
    )
    mixed = w.op("Softmax", (query @ key) / 2.0, axis=-1) @ value
    return w.reshaped(w.turned(mixed, 0, 2, 1, 3), 0, 0, 8) @ w.weights(8, 8) + w.weights(8)


def _nothing_changed(w: Writer, x: Value) -> list[Value]:
    same = w.op("Expand", w.op("Unsqueeze", x, w.ints(1)), w.ints(1, 1, 1, 1, 1))
    same = w.op("Squeeze", same, w.ints(1)) * 1.0 + 0.0
    return [w.op("Identity", same / 1.0 - 0.0), w.op("Dropout", same)]


def _isinf_any(w: Writer, x: Value) -> Value:
    counted = w.op("ReduceSum", w.cast(w.op("IsInf", x), INT64), w.ints(0, 1, 2, 3), keepdims=0)
    return w.cast(w.op("Greater", counted, w.const(0, np.int64)), FLOAT)


def _shuffled_channels(w: Writer, x: Value) -> Value:
    apart = w.reshaped(w.conv(x, 3, 6), BATCH, 2, 3, 7, 8)
    back = w.reshaped(w.turned(apart, 0, 2, 1, 3, 4), BATCH, 6, 7, 8)
    return w.op("DepthToSpace", w.joined(1, back, back), blocksize=2, mode="CRD")


def _squeeze_excite(w: Writer, x: Value) -> Value:
    seen = w.conv(x, pads=[1, 1, 1, 1])
    squeezed = w.op("Relu", w.conv(w.op("GlobalAveragePool", seen), 4, 2, side=1))
    return seen * w.op("Sigmoid", w.conv(squeezed, 2, 4, side=1)) * w.op("Sigmoid", seen)


def _shape_maths(w: Writer, x: Value) -> Value:
    half = w.op("Slice", w.op("Shape", x), w.ints(2), w.ints(4)) / w.ints(2)
    size = w.joined(0, w.op("Slice", w.op("Shape", x), w.ints(0), w.ints(2)), half)
    return w.op("Resize", x, "", "", size, mode="linear", antialias=0)


def _gathers(w: Writer, x: Value) -> Value:
    flipped = w.op("Gather", x, w.ints(2, 1, 0), axis=1)
    one = w.op("Gather", flipped, w.const(-1, np.int64), axis=3)
    return w.op("Unsqueeze", one, w.ints(3)) + w.op("Einsum", x, flipped, equation="nchw,nkhw->nchk")


def _half_network(w: Writer, x: Value) -> Value:
    kernel, bias, matrix, shift = (w.weights(*one, dtype=np.float16) for one in ((4, 3, 3, 3), (4,), (80, 5), (5,)))
    seen = w.op("Relu", w.op("Conv", x, kernel, bias, pads=[1, 1, 1, 1]))
    return w.op("Gemm", w.op("Flatten", w.pooled(seen + seen, 2, 2)), matrix, shift)


def _rounded_conv(w: Writer, x: Value) -> Value:
    first = w.op("Conv", w.rounded(x), w.rounded_weights(4, 3, 3, 3), pads=[1, 1, 1, 1])
    pooled = w.pooled(w.rounded(w.op("Relu", w.rounded(first))), 2, 2)
    return w.rounded(w.rounded(pooled) + w.rounded(pooled))


def _rounded_matmul(w: Writer, x: Value) -> Value:
    made = w.rounded(x) @ w.rounded_weights(8, 6)
    return w.op("Softmax", w.rounded(w.joined(2, w.rounded(made), w.rounded(made))), axis=-1)


def _bytes_front(w: Writer, x: Value) -> Value:
    laid_out = w.turned(w.cast(x, FLOAT), 0, 3, 1, 2)
    normal = laid_out * np.full((1, 3, 1, 1), 1 / 58.0) + w.weights(1, 3, 1, 1)
    return w.pooled(w.padded(w.conv(normal), (1, 1, 1, 1)), 3, 2)


_AROUND, _BELOW = (1, 1, 1, 1), (0, 0, 1, 1)
_AVERAGE = {"kind": "AveragePool"}
_IMAGES: dict[str, Write] = {
    "pad 0, max pool": lambda w, x: w.pooled(w.padded(x, _BELOW), 2, 1),
    "pad without a value, max pool": lambda w, x: w.pooled(w.padded(x, _AROUND, None), 3, 2),
    "pad of minus a lot, max pool": lambda w, x: w.pooled(w.padded(x, _AROUND, -3e38), 3, 1),
    "pad 0, padded max pool": lambda w, x: w.pooled(w.padded(x, (1, 0, 0, 1)), 3, 2, pads=_AROUND),
    "conv, leaky relu, pad 0, max pool": lambda w, x: w.pooled(
        w.padded(w.op("LeakyRelu", w.conv(x, pads=_AROUND), alpha=0.1), _BELOW), 2, 1
    ),
    "pad 0, average pool": lambda w, x: w.pooled(w.padded(x, _AROUND), 3, 2, **_AVERAGE, count_include_pad=0),
    "pad 0, average pool that counts pads": lambda w, x: w.pooled(
        w.padded(x, _AROUND), 3, 2, **_AVERAGE, count_include_pad=1
    ),
    **{
        f"pad 0, padded average pool{words}": lambda w, x, count=count: w.op(
            "AveragePool",
            w.padded(x, (1, 0, 0, 1)),
            kernel_shape=[3, 3],
            count_include_pad=count,
            pads=_AROUND,
        )
        for words, count in (("", 0), (" that counts pads", 1))
    },
    "pad 0, conv": _pad_conv,
    "pad 0.5, conv": lambda w, x: _pad_conv(w, x, value=0.5),
    "pad by reflection, conv": lambda w, x: _pad_conv(w, x, "reflect"),
    "pad by the edge, conv": lambda w, x: _pad_conv(w, x, "edge"),
    "pad around, conv": lambda w, x: _pad_conv(w, x, "wrap"),
    "crop by a negative pad, conv": lambda w, x: w.conv(w.padded(x, (-1, 1, -1, -1))),
    "pad, pad, conv that pads itself": lambda w, x: w.conv(
        w.padded(w.padded(x, _AROUND), (1, 0, 0, 1)), auto_pad="SAME_UPPER", strides=[2, 2]
    ),
    "conv, batch norm, relu": lambda w, x: w.op("Relu", w.norm(w.conv(x, auto_pad="SAME_LOWER"))),
    # Behind the padding, a shift cannot go into the convolution.
    "batch norm, padded conv": lambda w, x: w.conv(w.norm(x, 3), pads=_AROUND),
    "conv, mul, add": lambda w, x: w.conv(x) * w.weights(4, 1, 1) + w.weights(1, 4, 1, 1),
    # As wide as the picture, it is no channel's scale.
    "conv, mul over the width": lambda w, x: w.conv(x, pads=_AROUND) * w.weights(1, 10),
    "conv, add, relu": lambda w, x: w.op("Relu", w.conv(x, pads=_AROUND) + w.conv(x, pads=_AROUND)),
    "conv, activations": lambda w, x: [
        w.op("Clip", w.conv(x), -0.5, 0.7),
        w.op("HardSigmoid", w.conv(x), alpha=0.3, beta=0.4),
        w.op("Tanh", w.conv(x)),
        w.op("Elu", w.conv(x)),
    ],
    "depthwise conv, hard swish": lambda w, x: w.op(
        "HardSwish", w.conv(x, 3, 6, group=3, dilations=[2, 2], strides=[1, 2], pads=[2, 1, 0, 2])
    ),
    "transposed conv, batch norm": lambda w, x: w.op(
        "Relu",
        w.norm(
            w.op(
                *("ConvTranspose", x, w.weights(3, 4, 3, 3), w.weights(4)),
                strides=[2, 2],
                pads=[1, 0, 0, 1],
                output_padding=[1, 0],
            )
        ),
    ),
    "relu, clip": lambda w, x: [
        w.op("Clip", w.op("Relu", x), -1.0, 0.9),
        w.op("Clip", w.op("Relu", x), 0.3),
        w.op("Relu", w.op("Clip", x, -0.5, 0.5)),
    ],
    "clip, clip": lambda w, x: w.op("Clip", w.op("Clip", x, -0.2, 2.0), -1.0, 0.5),
    "transposes": lambda w, x: w.turned(
        w.op(
            "Softmax",
            w.turned(
                w.turned(w.op("Relu", w.turned(x, 0, 2, 3, 1)) * w.weights(3), 0, 3, 1, 2),
                *(1, 0, 3, 2),
            ),
            axis=0,
        ),
        *(3, 2, 0, 1),
    ),
    "sums behind a transpose": _transposed_pool,
    "pad and concat between transposes": _transposed_pad_concat,
    "reshapes": _reshapes,
    "slices": _slices,
    "split, concat": _concats,
    "uneven split": _split_sizes,
    "casts there and back": lambda w, x: [
        w.cast(x * 3.7, TensorProto.INT32, FLOAT),
        w.cast(x, TensorProto.DOUBLE, FLOAT),
        w.cast(x, TensorProto.BOOL, FLOAT),
    ],
    "resizes": lambda w, x: [
        w.op("Resize", w.op("Relu", x), "", np.array([1.0, 1.0, 2.0, 1.5]), **way) for way in _RESIZES
    ],
    "pool, resize, concat": _upsampled_concat,
    "div, mul": lambda w, x: w.const(1.0) / (w.op("Abs", x) + 1.0) * x,
    "what changes nothing": _nothing_changed,
    # The sum is wider than the picture: nothing here may be taken out.
    "zero that makes it wider": lambda w, x: w.op("Expand", x, w.ints(2, BATCH, 3, 9, 10)) + np.zeros((2, 1, 1, 1, 1)),
    "not, where": lambda w, x: w.op("Where", w.op("Not", w.op("Greater", x, 0.25)), w.op("Neg", x), x * 10.0),
    "sums of infinities": lambda w, x: w.op(
        "ReduceSum", w.cast(w.op("IsInf", w.const(1.0) / w.op("Relu", x)), FLOAT), w.ints(2, 3), keepdims=0
    ),
    "any infinity": _isinf_any,
    "global pools": lambda w, x: w.op("GlobalMaxPool", x) - (w.op("GlobalAveragePool", x) + w.mean(x, 2, 3)),
    "pools that round up": lambda w, x: [
        w.pooled(x, 3, 2, ceil_mode=1, pads=_AROUND),
        w.pooled(x, 3, 2, **_AVERAGE, count_include_pad=0, pads=_AROUND),
    ],
    "shuffled channels": _shuffled_channels,
    "squeeze and excite": _squeeze_excite,
    "sizes that are computed": _shape_maths,
    "gather, einsum": _gathers,
}
_ROWS: dict[str, Write] = {
    "matmul, add": lambda w, x: w.op("Relu", x @ w.weights(8, 5) + w.weights(5)),
    "scaled matmul": lambda w, x: (x / 3.0) @ w.weights(8, 8) * -0.25 / 0.7,
    "gelu": _gelu,
    "gelu with a bias": lambda w, x: _gelu(w, x @ w.weights(8, 8) + w.weights(8)),
    "gelu by tanh": lambda w, x: (
        x * 0.5 * (w.op("Tanh", (x + w.op("Pow", x, 3.0) * 0.044715) * np.sqrt(2 / np.pi)) + 1.0)
    ),
    "quick gelu": lambda w, x: x * w.op("Sigmoid", x * 1.702),
    "layer norm in parts": _layer_norm_parts,
    "norm by the root of the mean square": lambda w, x: (
        x / w.op("Sqrt", w.mean(w.op("Pow", x, 2.0), -1) + 1e-3) * w.weights(8)
    ),
    "skip, layer norm": _skip_layer_norm,
    "attention": _attention,
    "softmax with a bias": lambda w, x: w.op("Softmax", x + w.weights(BATCH, 1, 8), axis=-1),
    "log of a softmax": lambda w, x: w.op("Log", w.op("Softmax", x, axis=1)),
}
_HALF, _STEP = 4e-3, 3e-2
GRAPHS = (
    *(SmallGraph(name, write) for name, write in _IMAGES.items()),
    *(SmallGraph(name, write, (5, 8)) for name, write in _ROWS.items()),
    SmallGraph(
        "conv in one dimension",
        lambda w, x: w.op("Relu", w.op("Conv", x, w.weights(5, 4, 3), w.weights(5), pads=[2, 1], strides=[2])),
        (4, 11),
    ),
    SmallGraph(
        "gemm, relu, gemm",
        lambda w, x: w.op(
            "Gemm",
            w.op("Relu", w.op("Gemm", x, w.weights(6, 8), w.weights(6), alpha=0.5, beta=2.0, transB=1)),
            w.weights(6, 3),
            w.weights(1, 3),
        ),
        (8,),
    ),
    SmallGraph("matmul of transposes", lambda w, x: w.turned(x, 0, 2, 1) @ w.turned(w.weights(5, 6), 1, 0), (6, 7)),
    SmallGraph("group norm", _group_norm, (4, 5, 6), tolerance=1e-4),
    SmallGraph(
        "instance norm",
        lambda w, x: w.op("LeakyRelu", w.op("InstanceNormalization", x, w.weights(3), w.weights(3)), alpha=-0.3),
        tolerance=1e-4,
    ),
    SmallGraph("slices, concat", _slices_concat, (3, 10, 10)),
    SmallGraph("cast to half precision and back", lambda w, x: w.cast(x, HALF, FLOAT), tolerance=_HALF),
    SmallGraph("half precision", _half_network, dtype=np.float16, tolerance=_HALF),
    SmallGraph(
        "pad 0, max pool in half precision",
        lambda w, x: w.pooled(w.op("Pad", x, w.ints(0, 0, 0, 0, 0, 0, 1, 1), w.const(0, np.float16)), 2, 1),
        dtype=np.float16,
        tolerance=_HALF,
    ),
    SmallGraph("8 bits: conv, pool, add", _rounded_conv, tolerance=_STEP),
    SmallGraph(
        "8 bits: pad 0, max pool",
        lambda w, x: w.rounded(
            w.pooled(w.rounded(w.op("Pad", w.rounded(x), w.ints(0, 0, 0, 0, 0, 0, 1, 1), 0.0)), 2, 1)
        ),
        tolerance=_STEP,
    ),
    SmallGraph(
        "8 bits: rounded twice",
        lambda w, x: w.rounded(w.turned(w.rounded(w.rounded(x, 0.05, 120), 0.1, 30), 0, 2, 3, 1), 0.02, 200),
        tolerance=2 * _STEP,
    ),
    SmallGraph("8 bits: matmul, concat", _rounded_matmul, (5, 8), tolerance=_STEP),
    SmallGraph("bytes, normalised", _bytes_front, (9, 10, 3), np.uint8),
)
