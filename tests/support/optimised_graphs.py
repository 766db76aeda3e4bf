"""Small graphs with the patterns that runtimes fuse, remove or rewrite, to compare optimised and not.

One row each: what is computed and from which inputs. Values are drawn from a seed and have both signs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_TYPES = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.float16): TensorProto.FLOAT16,
    np.dtype(np.uint8): TensorProto.UINT8,
    np.dtype(np.int64): TensorProto.INT64,
    np.dtype(np.bool_): TensorProto.BOOL,
}
OPSET, IR_VERSION = 20, 9
BATCH = 2
IMAGE = (3, 9, 10)


class Writer:
    """Nodes one after the other; every call gives the name of its output."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def op(self, kind: str, *inputs: str, **attributes: object) -> str:
        (output,) = self.ops(kind, 1, *inputs, **attributes)
        return output

    def ops(self, kind: str, outputs: int, *inputs: str, **attributes: object) -> list[str]:
        names = [f"t{len(self.nodes)}_{index}" for index in range(outputs)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, f"n{len(self.nodes)}", **attributes))
        return names

    def const(self, values: object, dtype: type = np.float32) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(values, dtype), name))
        return name

    def ints(self, *values: int) -> str:
        return self.const(values, np.int64)

    def weights(self, *shape: int, dtype: type = np.float32, scale: float = 0.5) -> str:
        return self.const(scale * self.random.standard_normal(shape), dtype)

    def conv(self, x: str, channels: int = 3, out: int = 4, **attributes: object) -> str:
        attributes.setdefault("kernel_shape", [3, 3])
        group = int(attributes.get("group", 1))  # type: ignore[call-overload]
        kernel: Sequence[int] = attributes["kernel_shape"]  # type: ignore[assignment]
        return self.op("Conv", x, self.weights(out, channels // group, *kernel), self.weights(out), **attributes)

    def rounded(self, x: str, scale: float = 0.05, zero: int = 120) -> str:
        """A pair of quantise and dequantise."""
        step, point = self.const(scale), self.const(zero, np.uint8)
        return self.op("DequantizeLinear", self.op("QuantizeLinear", x, step, point), step, point)

    def rounded_weights(self, *shape: int) -> str:
        values = self.random.integers(-127, 128, shape)
        return self.op("DequantizeLinear", self.const(values, np.int8), self.const(0.01), self.const(0, np.int8))


Write = Callable[[Writer, str], str | list[str]]


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
        made = self.write(writer, "x")
        outputs = [made] if isinstance(made, str) else made
        graph = helper.make_graph(
            writer.nodes,
            "small",
            [helper.make_tensor_value_info("x", _TYPES[np.dtype(self.dtype)], [BATCH, *self.shape])],
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


def _padded(w: Writer, x: str, pads: Sequence[int], value: float | None = 0.0, mode: str = "constant") -> str:
    whole = [0, 0, *pads[:2], 0, 0, *pads[2:]]
    given = [w.ints(*whole)] + ([] if value is None or mode != "constant" else [w.const(value)])
    return w.op("Pad", x, *given, mode=mode)


def _leaky_pad_max_pool(w: Writer, x: str) -> str:
    seen = w.op("LeakyRelu", w.conv(x, pads=[1, 1, 1, 1]), alpha=0.1)
    return w.op("MaxPool", _padded(w, seen, (0, 0, 1, 1)), kernel_shape=[2, 2], strides=[1, 1])


def _average(w: Writer, padded: str, count_pads: int, **how: object) -> str:
    return w.op("AveragePool", padded, kernel_shape=[3, 3], count_include_pad=count_pads, **how)


def _pad_conv(w: Writer, x: str, mode: str, value: float = 0.0) -> str:
    return w.conv(_padded(w, x, (1, 2, 0, 1), value, mode), strides=[2, 2], pads=[0, 1, 1, 0])


def _norm(w: Writer, x: str, channels: int = 4) -> str:
    spread = w.const(0.2 + np.abs(w.random.standard_normal(channels)))
    own = [w.weights(channels), w.weights(channels), w.weights(channels), spread]
    return w.op("BatchNormalization", x, *own, epsilon=1e-3)


def _norm_conv(w: Writer, x: str) -> str:
    # Behind the padding, a shift cannot go into the convolution.
    return w.conv(_norm(w, x, 3), pads=[1, 1, 1, 1])


def _conv_mul_add(w: Writer, x: str) -> str:
    scaled = w.op("Mul", w.conv(x), w.weights(4, 1, 1))
    return w.op("Add", scaled, w.weights(1, 4, 1, 1))


def _conv_mul_wide(w: Writer, x: str) -> str:
    # As wide as the picture, it is no channel's scale.
    return w.op("Mul", w.conv(x, pads=[1, 1, 1, 1]), w.weights(1, 10))


def _conv_add_relu(w: Writer, x: str) -> str:
    both = w.op("Add", w.conv(x, pads=[1, 1, 1, 1]), w.conv(x, pads=[1, 1, 1, 1]))
    return w.op("Relu", both)


def _conv_activations(w: Writer, x: str) -> list[str]:
    clip = w.op("Clip", w.conv(x), w.const(-0.5), w.const(0.7))
    return [clip, w.op("HardSigmoid", w.conv(x), alpha=0.3, beta=0.4), w.op("Tanh", w.conv(x)), w.op("Elu", w.conv(x))]


def _depthwise(w: Writer, x: str) -> str:
    seen = w.conv(x, 3, 6, group=3, dilations=[2, 2], strides=[1, 2], pads=[2, 1, 0, 2])
    return w.op("HardSwish", seen)


def _conv_transpose(w: Writer, x: str) -> str:
    how = {"strides": [2, 2], "pads": [1, 0, 0, 1], "output_padding": [1, 0]}
    return w.op("Relu", _norm(w, w.op("ConvTranspose", x, w.weights(3, 4, 3, 3), w.weights(4), **how)))


def _gemm_chain(w: Writer, x: str) -> str:
    first = w.op("Gemm", x, w.weights(6, 8), w.weights(6), alpha=0.5, beta=2.0, transB=1)
    return w.op("Gemm", w.op("Relu", first), w.weights(6, 3), w.weights(1, 3))


def _matmul_scale(w: Writer, x: str) -> str:
    scaled = w.op("Mul", w.op("MatMul", w.op("Div", x, w.const(3.0)), w.weights(8, 8)), w.const(-0.25))
    return w.op("Div", scaled, w.const(0.7))


def _gelu(w: Writer, x: str) -> str:
    inner = w.op("Erf", w.op("Div", x, w.const(np.sqrt(2.0))))
    return w.op("Mul", w.op("Mul", x, w.op("Add", inner, w.const(1.0))), w.const(0.5))


def _tanh_gelu(w: Writer, x: str) -> str:
    cubed = w.op("Mul", w.op("Pow", x, w.const(3.0)), w.const(0.044715))
    inner = w.op("Tanh", w.op("Mul", w.op("Add", x, cubed), w.const(np.sqrt(2 / np.pi))))
    return w.op("Mul", w.op("Mul", x, w.const(0.5)), w.op("Add", inner, w.const(1.0)))


def _layer_norm_parts(w: Writer, x: str) -> str:
    centred = w.op("Sub", x, w.op("ReduceMean", x, w.ints(-1)))
    spread = w.op("ReduceMean", w.op("Pow", centred, w.const(2.0)), w.ints(-1))
    shares = w.op("Div", centred, w.op("Sqrt", w.op("Add", spread, w.const(1e-5))))
    return w.op("Add", w.op("Mul", shares, w.weights(8)), w.weights(8))


def _rms_norm(w: Writer, x: str) -> str:
    spread = w.op("Add", w.op("ReduceMean", w.op("Pow", x, w.const(2.0)), w.ints(-1)), w.const(1e-3))
    return w.op("Mul", w.op("Div", x, w.op("Sqrt", spread)), w.weights(8))


def _skip_layer_norm(w: Writer, x: str) -> list[str]:
    both = w.op("Add", w.op("Add", w.op("MatMul", x, w.weights(8, 8)), w.weights(8)), x)
    return [w.op("LayerNormalization", both, w.weights(8), w.weights(8), axis=-1, epsilon=1e-5), both]


def _group_norm(w: Writer, x: str) -> str:
    flat = w.op("Reshape", x, w.ints(0, 2, -1))
    normed = w.op("InstanceNormalization", flat, w.const([1.0, 1.0]), w.const([0.0, 0.0]), epsilon=1e-5)
    back = w.op("Reshape", normed, w.ints(BATCH, 4, 5, 6))
    return w.op("Add", w.op("Mul", back, w.weights(4, 1, 1)), w.weights(4, 1, 1))


def _relu_clip(w: Writer, x: str) -> list[str]:
    first = w.op("Clip", w.op("Relu", x), w.const(-1.0), w.const(0.9))
    second = w.op("Clip", w.op("Relu", x), w.const(0.3))
    return [first, second, w.op("Relu", w.op("Clip", x, w.const(-0.5), w.const(0.5)))]


def _transposes(w: Writer, x: str) -> str:
    last = w.op("Transpose", x, perm=[0, 2, 3, 1])
    scaled = w.op("Mul", w.op("Relu", last), w.weights(3))
    back = w.op("Transpose", scaled, perm=[0, 3, 1, 2])
    return w.op("Transpose", w.op("Softmax", w.op("Transpose", back, perm=[1, 0, 3, 2]), axis=0), perm=[3, 2, 0, 1])


def _transposed_pool(w: Writer, x: str) -> str:
    rows = w.op("Transpose", w.conv(x), perm=[0, 2, 3, 1])
    summed = w.op("ReduceSum", rows, w.ints(1, 2), keepdims=0)
    return w.op("Concat", summed, w.op("ReduceMax", rows, w.ints(-2, -3), keepdims=0), axis=-1)


def _transposed_pad_concat(w: Writer, x: str) -> str:
    last = w.op("Transpose", x, perm=[0, 2, 3, 1])
    wider = w.op("Pad", last, w.ints(0, 1, 0, 0, 0, 0, 1, 0), w.const(0.5))
    both = w.op("Concat", wider, w.op("Neg", wider), axis=3)
    return w.conv(w.op("Transpose", both, perm=[0, 3, 1, 2]), 6, 4)


def _reshapes(w: Writer, x: str) -> str:
    shape = w.op("Shape", x)
    rows = w.op("Gather", shape, w.ints(0), axis=0)
    flat = w.op("Reshape", x, w.op("Concat", rows, w.ints(3, -1), axis=0))
    first = w.op("Unsqueeze", w.op("Squeeze", w.op("Reshape", flat, w.ints(0, -1, 1)), w.ints(2)), w.ints(1))
    return w.op("Flatten", w.op("Reshape", first, w.ints(BATCH, 9, 3, 10)), axis=2)


def _slices(w: Writer, x: str) -> str:
    whole = w.op("Slice", x, w.ints(0), w.ints(2**62), w.ints(2))
    part = w.op("Slice", whole, w.ints(1, -1), w.ints(8, 0), w.ints(2, 3), w.ints(2, -2))
    return w.op("Slice", part, w.ints(-3), w.ints(2**31), w.ints(1))


def _concats(w: Writer, x: str) -> str:
    single = w.op("Concat", x, axis=1)
    parts = w.ops("Split", 3, single, axis=1, num_outputs=3)
    return w.op("Concat", w.op("Concat", parts[2], parts[0], axis=1), parts[1], axis=1)


def _split_sizes(w: Writer, x: str) -> list[str]:
    first, second = w.ops("Split", 2, x, w.ints(4, 6), axis=3)
    return [w.op("Relu", first), w.op("Concat", second, first, axis=3)]


def _slices_concat(w: Writer, x: str) -> str:
    """A focus layer: every other pixel."""
    parts = []
    for down, right in ((0, 0), (1, 0), (0, 1), (1, 1)):
        rows = w.op("Slice", x, w.ints(down), w.ints(2**62), w.ints(2), w.ints(2))
        parts.append(w.op("Slice", rows, w.ints(right), w.ints(2**62), w.ints(3), w.ints(2)))
    return w.conv(w.op("Concat", *parts, axis=1), 12, 4)


def _casts(w: Writer, x: str) -> list[str]:
    whole = w.op("Cast", w.op("Cast", w.op("Mul", x, w.const(3.7)), to=TensorProto.INT32), to=TensorProto.FLOAT)
    doubles = w.op("Cast", w.op("Cast", x, to=TensorProto.DOUBLE), to=TensorProto.FLOAT)
    truths = w.op("Cast", w.op("Cast", x, to=TensorProto.BOOL), to=TensorProto.FLOAT)
    return [whole, doubles, truths]


def _resizes(w: Writer, x: str) -> list[str]:
    ways = [
        {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
        {"mode": "nearest", "coordinate_transformation_mode": "half_pixel", "nearest_mode": "round_prefer_ceil"},
        {"mode": "linear", "coordinate_transformation_mode": "half_pixel"},
        {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
        {"mode": "linear", "coordinate_transformation_mode": "pytorch_half_pixel"},
        {"mode": "cubic", "coordinate_transformation_mode": "half_pixel", "cubic_coeff_a": -0.75},
    ]
    return [w.op("Resize", w.op("Relu", x), "", w.const([1.0, 1.0, 2.0, 1.5]), **way) for way in ways]


def _upsampled_concat(w: Writer, x: str) -> str:
    small = w.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1)
    large = w.op("Resize", small, "", "", w.ints(BATCH, 3, 9, 10), mode="nearest")
    return w.conv(w.op("Concat", large, x, axis=1), 6, 4, pads=[1, 1, 1, 1])


def _attention(w: Writer, x: str) -> str:
    """Two heads of four, as an encoder has them."""
    heads = []
    for perm in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]):
        made = w.op("Add", w.op("MatMul", x, w.weights(8, 8)), w.weights(8))
        heads.append(w.op("Transpose", w.op("Reshape", made, w.ints(0, 0, 2, 4)), perm=perm))
    scores = w.op("Div", w.op("MatMul", heads[0], heads[1]), w.const(2.0))
    mixed = w.op("MatMul", w.op("Softmax", scores, axis=-1), heads[2])
    back = w.op("Reshape", w.op("Transpose", mixed, perm=[0, 2, 1, 3]), w.ints(0, 0, 8))
    return w.op("Add", w.op("MatMul", back, w.weights(8, 8)), w.weights(8))


def _nothing_changed(w: Writer, x: str) -> list[str]:
    same = w.op("Expand", w.op("Unsqueeze", x, w.ints(1)), w.ints(1, 1, 1, 1, 1))
    same = w.op("Add", w.op("Mul", w.op("Squeeze", same, w.ints(1)), w.const(1.0)), w.const(0.0))
    return [w.op("Identity", w.op("Sub", w.op("Div", same, w.const(1.0)), w.const(0.0))), w.op("Dropout", same)]


def _wider_by_zero(w: Writer, x: str) -> str:
    # The sum is wider than the picture: nothing here may be taken out.
    return w.op("Add", w.op("Expand", x, w.ints(2, BATCH, 3, 9, 10)), w.const(np.zeros((2, 1, 1, 1, 1))))


def _not_where(w: Writer, x: str) -> str:
    is_high = w.op("Not", w.op("Greater", x, w.const(0.25)))
    return w.op("Where", is_high, w.op("Neg", x), w.op("Mul", x, w.const(10.0)))


def _infinities(w: Writer, x: str) -> str:
    large = w.op("Div", w.const(1.0), w.op("Relu", x))
    counted = w.op("Cast", w.op("IsInf", large), to=TensorProto.FLOAT)
    return w.op("ReduceSum", counted, w.ints(2, 3), keepdims=0)


def _isinf_any(w: Writer, x: str) -> str:
    counted = w.op("ReduceSum", w.op("Cast", w.op("IsInf", x), to=TensorProto.INT64), w.ints(0, 1, 2, 3), keepdims=0)
    return w.op("Cast", w.op("Greater", counted, w.const(0, np.int64)), to=TensorProto.FLOAT)


def _global_pools(w: Writer, x: str) -> str:
    mean = w.op("GlobalAveragePool", x)
    return w.op("Sub", w.op("GlobalMaxPool", x), w.op("Add", mean, w.op("ReduceMean", x, w.ints(2, 3))))


def _ceiling_pools(w: Writer, x: str) -> list[str]:
    how = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
    return [w.op("MaxPool", x, ceil_mode=1, **how), w.op("AveragePool", x, count_include_pad=0, **how)]


def _shuffled_channels(w: Writer, x: str) -> str:
    apart = w.op("Reshape", w.conv(x, 3, 6), w.ints(BATCH, 2, 3, 7, 8))
    back = w.op("Reshape", w.op("Transpose", apart, perm=[0, 2, 1, 3, 4]), w.ints(BATCH, 6, 7, 8))
    return w.op("DepthToSpace", w.op("Concat", back, back, axis=1), blocksize=2, mode="CRD")


def _squeeze_excite(w: Writer, x: str) -> str:
    seen = w.conv(x, 3, 4, pads=[1, 1, 1, 1])
    squeezed = w.op("Relu", w.conv(w.op("GlobalAveragePool", seen), 4, 2, kernel_shape=[1, 1]))
    gate = w.op("Sigmoid", w.conv(squeezed, 2, 4, kernel_shape=[1, 1]))
    return w.op("Mul", w.op("Mul", seen, gate), w.op("Sigmoid", seen))


def _shape_maths(w: Writer, x: str) -> str:
    half = w.op("Div", w.op("Slice", w.op("Shape", x), w.ints(2), w.ints(4)), w.ints(2))
    size = w.op("Concat", w.op("Slice", w.op("Shape", x), w.ints(0), w.ints(2)), half, axis=0)
    return w.op("Resize", x, "", "", size, mode="linear", antialias=0)


def _gathers(w: Writer, x: str) -> str:
    flipped = w.op("Gather", x, w.ints(2, 1, 0), axis=1)
    one = w.op("Gather", flipped, w.const(-1, np.int64), axis=3)
    return w.op("Add", w.op("Unsqueeze", one, w.ints(3)), w.op("Einsum", x, flipped, equation="nchw,nkhw->nchk"))


def _half_network(w: Writer, x: str) -> str:
    kernel, bias = w.weights(4, 3, 3, 3, dtype=np.float16), w.weights(4, dtype=np.float16)
    seen = w.op("Relu", w.op("Conv", x, kernel, bias, pads=[1, 1, 1, 1]))
    pooled = w.op("MaxPool", w.op("Add", seen, seen), kernel_shape=[2, 2], strides=[2, 2])
    return w.op("Gemm", w.op("Flatten", pooled), w.weights(80, 5, dtype=np.float16), w.weights(5, dtype=np.float16))


def _half_pad_max_pool(w: Writer, x: str) -> str:
    padded = w.op("Pad", x, w.ints(0, 0, 0, 0, 0, 0, 1, 1), w.const(0, np.float16))
    return w.op("MaxPool", padded, kernel_shape=[2, 2], strides=[1, 1])


def _rounded_conv(w: Writer, x: str) -> str:
    first = w.op("Conv", w.rounded(x), w.rounded_weights(4, 3, 3, 3), pads=[1, 1, 1, 1])
    pooled = w.op("MaxPool", w.rounded(w.op("Relu", w.rounded(first))), kernel_shape=[2, 2], strides=[2, 2])
    return w.rounded(w.op("Add", w.rounded(pooled), w.rounded(pooled)))


def _rounded_pad_max_pool(w: Writer, x: str) -> str:
    padded = w.op("Pad", w.rounded(x), w.ints(0, 0, 0, 0, 0, 0, 1, 1), w.const(0.0))
    return w.rounded(w.op("MaxPool", w.rounded(padded), kernel_shape=[2, 2], strides=[1, 1]))


def _rounded_matmul(w: Writer, x: str) -> str:
    made = w.op("MatMul", w.rounded(x), w.rounded_weights(8, 6))
    return w.op("Softmax", w.rounded(w.op("Concat", w.rounded(made), w.rounded(made), axis=2)), axis=-1)


def _bytes_front(w: Writer, x: str) -> str:
    laid_out = w.op("Transpose", w.op("Cast", x, to=TensorProto.FLOAT), perm=[0, 3, 1, 2])
    normal = w.op("Add", w.op("Mul", laid_out, w.const(np.full((1, 3, 1, 1), 1 / 58.0))), w.weights(1, 3, 1, 1))
    return w.op("MaxPool", _padded(w, w.conv(normal), (1, 1, 1, 1)), kernel_shape=[3, 3], strides=[2, 2])


_ROWS, _HALF, _STEP = (5, 8), 4e-3, 3e-2
GRAPHS = (
    SmallGraph(
        "pad 0, max pool",
        lambda w, x: w.op("MaxPool", _padded(w, x, (0, 0, 1, 1)), kernel_shape=[2, 2], strides=[1, 1]),
    ),
    SmallGraph(
        "pad without a value, max pool",
        lambda w, x: w.op("MaxPool", _padded(w, x, (1, 1, 1, 1), None), kernel_shape=[3, 3], strides=[2, 2]),
    ),
    SmallGraph(
        "pad of minus a lot, max pool",
        lambda w, x: w.op("MaxPool", _padded(w, x, (1, 1, 1, 1), -3e38), kernel_shape=[3, 3], strides=[1, 1]),
    ),
    SmallGraph(
        "pad 0, padded max pool",
        lambda w, x: w.op(
            "MaxPool", _padded(w, x, (1, 0, 0, 1)), kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2]
        ),
    ),
    SmallGraph("conv, leaky relu, pad 0, max pool", _leaky_pad_max_pool),
    SmallGraph("pad 0, average pool", lambda w, x: _average(w, _padded(w, x, (1, 1, 1, 1)), 0, strides=[2, 2])),
    SmallGraph(
        "pad 0, average pool that counts pads", lambda w, x: _average(w, _padded(w, x, (1, 1, 1, 1)), 1, strides=[2, 2])
    ),
    SmallGraph(
        "pad 0, padded average pool", lambda w, x: _average(w, _padded(w, x, (1, 0, 0, 1)), 0, pads=[1, 1, 1, 1])
    ),
    SmallGraph(
        "pad 0, padded average pool that counts pads",
        lambda w, x: _average(w, _padded(w, x, (1, 0, 0, 1)), 1, pads=[1, 1, 1, 1]),
    ),
    SmallGraph("pad 0, conv", lambda w, x: _pad_conv(w, x, "constant")),
    SmallGraph("pad 0.5, conv", lambda w, x: _pad_conv(w, x, "constant", 0.5)),
    SmallGraph("pad by reflection, conv", lambda w, x: _pad_conv(w, x, "reflect")),
    SmallGraph("pad by the edge, conv", lambda w, x: _pad_conv(w, x, "edge")),
    SmallGraph("pad around, conv", lambda w, x: _pad_conv(w, x, "wrap")),
    SmallGraph("crop by a negative pad, conv", lambda w, x: w.conv(_padded(w, x, (-1, 1, -1, -1)))),
    SmallGraph(
        "pad, pad, conv that pads itself",
        lambda w, x: w.conv(
            _padded(w, _padded(w, x, (1, 1, 1, 1)), (1, 0, 0, 1)), auto_pad="SAME_UPPER", strides=[2, 2]
        ),
    ),
    SmallGraph("conv, batch norm, relu", lambda w, x: w.op("Relu", _norm(w, w.conv(x, auto_pad="SAME_LOWER")))),
    SmallGraph("batch norm, padded conv", _norm_conv),
    SmallGraph("conv, mul, add", _conv_mul_add),
    SmallGraph("conv, mul over the width", _conv_mul_wide),
    SmallGraph("conv, add, relu", _conv_add_relu),
    SmallGraph("conv, activations", _conv_activations),
    SmallGraph("depthwise conv, hard swish", _depthwise),
    SmallGraph(
        "conv in one dimension",
        lambda w, x: w.op("Relu", w.op("Conv", x, w.weights(5, 4, 3), w.weights(5), pads=[2, 1], strides=[2])),
        (4, 11),
    ),
    SmallGraph("transposed conv, batch norm", _conv_transpose),
    SmallGraph(
        "matmul, add", lambda w, x: w.op("Relu", w.op("Add", w.op("MatMul", x, w.weights(8, 5)), w.weights(5))), _ROWS
    ),
    SmallGraph("gemm, relu, gemm", _gemm_chain, (8,)),
    SmallGraph("scaled matmul", _matmul_scale, _ROWS),
    SmallGraph(
        "matmul of transposes",
        lambda w, x: w.op(
            "MatMul", w.op("Transpose", x, perm=[0, 2, 1]), w.op("Transpose", w.weights(5, 6), perm=[1, 0])
        ),
        (6, 7),
    ),
    SmallGraph("gelu", _gelu, _ROWS),
    SmallGraph(
        "gelu with a bias", lambda w, x: _gelu(w, w.op("Add", w.op("MatMul", x, w.weights(8, 8)), w.weights(8))), _ROWS
    ),
    SmallGraph("gelu by tanh", _tanh_gelu, _ROWS),
    SmallGraph("quick gelu", lambda w, x: w.op("Mul", x, w.op("Sigmoid", w.op("Mul", x, w.const(1.702)))), _ROWS),
    SmallGraph("layer norm in parts", _layer_norm_parts, _ROWS),
    SmallGraph("norm by the root of the mean square", _rms_norm, _ROWS),
    SmallGraph("skip, layer norm", _skip_layer_norm, _ROWS),
    SmallGraph("group norm", _group_norm, (4, 5, 6), tolerance=1e-4),
    SmallGraph(
        "instance norm",
        lambda w, x: w.op("LeakyRelu", w.op("InstanceNormalization", x, w.weights(3), w.weights(3)), alpha=-0.3),
        tolerance=1e-4,
    ),
    SmallGraph("relu, clip", _relu_clip),
    SmallGraph(
        "clip, clip",
        lambda w, x: w.op("Clip", w.op("Clip", x, w.const(-0.2), w.const(2.0)), w.const(-1.0), w.const(0.5)),
    ),
    SmallGraph("transposes", _transposes),
    SmallGraph("sums behind a transpose", _transposed_pool),
    SmallGraph("pad and concat between transposes", _transposed_pad_concat),
    SmallGraph("reshapes", _reshapes),
    SmallGraph("slices", _slices),
    SmallGraph("slices, concat", _slices_concat, (3, 10, 10)),
    SmallGraph("split, concat", _concats),
    SmallGraph("uneven split", _split_sizes),
    SmallGraph("casts there and back", _casts),
    SmallGraph(
        "cast to half precision and back",
        lambda w, x: w.op("Cast", w.op("Cast", x, to=TensorProto.FLOAT16), to=TensorProto.FLOAT),
        tolerance=_HALF,
    ),
    SmallGraph("resizes", _resizes),
    SmallGraph("pool, resize, concat", _upsampled_concat),
    SmallGraph("attention", _attention, _ROWS),
    SmallGraph(
        "softmax with a bias", lambda w, x: w.op("Softmax", w.op("Add", x, w.weights(BATCH, 1, 8)), axis=-1), _ROWS
    ),
    SmallGraph("log of a softmax", lambda w, x: w.op("Log", w.op("Softmax", x, axis=1)), _ROWS),
    SmallGraph(
        "div, mul", lambda w, x: w.op("Mul", w.op("Div", w.const(1.0), w.op("Add", w.op("Abs", x), w.const(1.0))), x)
    ),
    SmallGraph("what changes nothing", _nothing_changed),
    SmallGraph("zero that makes it wider", _wider_by_zero),
    SmallGraph("not, where", _not_where),
    SmallGraph("sums of infinities", _infinities),
    SmallGraph("any infinity", _isinf_any),
    SmallGraph("global pools", _global_pools),
    SmallGraph("pools that round up", _ceiling_pools),
    SmallGraph("shuffled channels", _shuffled_channels),
    SmallGraph("squeeze and excite", _squeeze_excite),
    SmallGraph("sizes that are computed", _shape_maths),
    SmallGraph("gather, einsum", _gathers),
    SmallGraph("half precision", _half_network, dtype=np.float16, tolerance=_HALF),
    SmallGraph("pad 0, max pool in half precision", _half_pad_max_pool, dtype=np.float16, tolerance=_HALF),
    SmallGraph("8 bits: conv, pool, add", _rounded_conv, tolerance=_STEP),
    SmallGraph("8 bits: pad 0, max pool", _rounded_pad_max_pool, tolerance=_STEP),
    SmallGraph(
        "8 bits: rounded twice",
        lambda w, x: w.rounded(
            w.op("Transpose", w.rounded(w.rounded(x, 0.05, 120), 0.1, 30), perm=[0, 2, 3, 1]), 0.02, 200
        ),
        tolerance=2 * _STEP,
    ),
    SmallGraph("8 bits: matmul, concat", _rounded_matmul, _ROWS, tolerance=_STEP),
    SmallGraph("bytes, normalised", _bytes_front, (9, 10, 3), np.uint8),
)
