"""ONNX files of every kind, by name, as onnx's own text. The weights are drawn and small.

Knows graphs. Knows nothing of what export makes of them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, numpy_helper, parser

_CONV = "conv = Conv <pads = [1, 1, 1, 1]> (images, w)\n"
_HEAD = "pooled = GlobalAveragePool (conv)\nflat = Flatten (pooled)\nlogits = Gemm <transB = 1> (flat, v)\n"
_TEN = "float[N, 10] logits"
_CLASSIFIER = _CONV + _HEAD
# Inputs, outputs and nodes of each; the weights `w` [8, 3, 3, 3] and `v` [10, 8] are there for all.
GRAPHS: dict[str, tuple[str, str, str]] = {
    "free_batch": ("float[N, 3, 32, 32] images", _TEN, _CLASSIFIER),
    "batch_of_one": ("float[1, 3, 32, 32] images", "float[1, 10] logits", _CLASSIFIER),
    "mean_over_the_batch": (
        "float[1, 3, 32, 32] images",
        "float[1, 10] logits",
        _CONV + "mean = ReduceMean <axes = [0], keepdims = 1> (conv)\n" + _HEAD.replace("(conv)", "(mean)"),
    ),
    "batch_of_four": ("float[4, 3, 32, 32] images", "float[4, 10] logits", _CLASSIFIER),
    "channels_last": (
        "float[N, 32, 32, 3] pixels",
        _TEN,
        "images = Transpose <perm = [0, 3, 1, 2]> (pixels)\n" + _CLASSIFIER,
    ),
    "two_inputs": (
        "float[N, 3, 32, 32] images, float[N, 10] bias",
        "float[N, 10] sum",
        _CLASSIFIER + "sum = Add (logits, bias)\n",
    ),
    "two_outputs": ("float[N, 3, 32, 32] images", f"{_TEN}, float[N, 8, 32, 32] conv", _CLASSIFIER),
    "free_sizes": ("float[N, 3, H, W] images", _TEN, _CLASSIFIER),
    "free_sizes_map": ("float[N, 3, H, W] images", "float[N, 8, H, W] conv", _CONV),
    "free_sizes_flattened": (
        "float[N, 3, H, W] images",
        _TEN,
        _CONV + "few = AveragePool <kernel_shape = [32, 32], strides = [32, 32]> (conv)\n"
        "flat = Flatten (few)\nlogits = Gemm <transB = 1> (flat, v)\n",
    ),
    "softmax": ("float[N, 3, 32, 32] images", "float[N, 10] p", _CLASSIFIER + "p = Softmax <axis = 1> (logits)\n"),
    "bytes": (
        "uint8[N, 3, 32, 32] pixels",
        _TEN,
        "images = Cast <to = 1> (pixels)\n" + _CLASSIFIER,
    ),
    "half": (
        "float16[N, 3, 32, 32] pixels",
        "float16[N, 10] out",
        "images = Cast <to = 1> (pixels)\n" + _CLASSIFIER + "out = Cast <to = 10> (logits)\n",
    ),
    "bfloat16": (
        "bfloat16[N, 3, 32, 32] pixels",
        _TEN,
        "images = Cast <to = 1> (pixels)\n" + _CLASSIFIER,
    ),
    "double": (
        "double[N, 3, 32, 32] pixels",
        _TEN,
        "images = Cast <to = 1> (pixels)\n" + _CLASSIFIER,
    ),
    "strings": (
        "string[N] words",
        "float[N, 1] logits",
        'ids = ai.onnx.ml.LabelEncoder <keys_strings = ["no", "yes"], values_floats = [0.0, 1.0]> (words)\n'
        "shape = Constant <value_ints = [-1, 1]> ()\nlogits = Reshape (ids, shape)\n",
    ),
    "ids": (
        "int64[N, 4] ids",
        "float[N, 32] flat",
        "rows = Gather <axis = 0> (v, ids)\nflat = Flatten (rows)\n",
    ),
    "branches": (
        "float[N, 3, 32, 32] images",
        "float[N, 10] out",
        _CLASSIFIER
        + "most = ReduceMax <keepdims = 0> (logits)\nzero = Constant <value_float = 0.0> ()\n"
        + "is_high = Greater (most, zero)\n"
        + "out = If (is_high) <then_branch = t () => (float[N, 10] a) { a = Identity (logits) }, "
        + "else_branch = e () => (float[N, 10] b) { b = Neg (logits) }>\n",
    ),
    "quantised": (
        "float[N, 3, 32, 32] images",
        _TEN,
        "scale = Constant <value_float = 0.02> ()\nzero = Constant <value = int8 {0}> ()\n"
        "q = QuantizeLinear (images, scale, zero)\nd = DequantizeLinear (q, scale, zero)\n"
        + _CLASSIFIER.replace("(images, w)", "(d, w)"),
    ),
    "random": (
        "float[N, 3, 32, 32] images",
        "float[N, 10] out",
        _CLASSIFIER + "noise = RandomNormalLike (logits)\nout = Add (logits, noise)\n",
    ),
    "foreign_operator": (
        "float[N, 3, 32, 32] images",
        "float[N, 10] out",
        _CLASSIFIER + "out = acme.Magic (logits)\n",
    ),
    "sequence": (
        "float[N, 3, 32, 32] images",
        "seq(float[N, 10]) all",
        _CLASSIFIER + "all = SequenceConstruct (logits)\n",
    ),
}


def write(name: str, path: Path, *, opset: int = 17) -> None:
    """The graph `name` to `path`."""
    onnx.save(_model(name, opset), path)


def write_beside(name: str, path: Path) -> None:
    """The same with its weights in a file of their own beside it."""
    onnx.save(_model(name, 17), path, save_as_external_data=True, location=f"{path.name}.data", size_threshold=0)


def _model(name: str, opset: int) -> ModelProto:
    inputs, outputs, nodes = GRAPHS[name]
    domains = f'"" : {opset}, "ai.onnx.ml" : 3, "acme" : 1'
    model = parser.parse_model(
        f"<ir_version: 8, opset_import: [{domains}]>\ng ({inputs}) => ({outputs})\n{{\n{nodes}}}"
    )
    generator = np.random.default_rng(5)
    for weights, shape in (("w", (8, 3, 3, 3)), ("v", (10, 8))):
        drawn = generator.normal(0, 0.5, shape).astype(np.float32)
        if any(weights in node.input for node in model.graph.node):
            model.graph.initializer.append(numpy_helper.from_array(drawn, weights))
    return model
