"""A residual network of two convolutions, its calibration, and how far a converted file is from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from export_fixtures import save_graph
from onnx import TensorProto, helper, numpy_helper

from convoy.export.rows import Chunk
from convoy.export.variants.calibrate import Calibration, collect
from convoy.export.variants.onnx_graph import prepare


def residual(path: Path, *, gain: float = 1.0, depthwise: bool = False) -> Path:
    """float32 [N, 3, 8, 8] -> conv, relu, conv, + skip, relu, pool, product [N, 4]; `gain` scales the first weights."""
    draw = np.random.default_rng(0)
    middle = (16, 1, 3, 3) if depthwise else (16, 16, 3, 3)
    constants = {
        "w0": draw.normal(size=(16, 3, 3, 3)) * 0.3 * gain,
        "w1": draw.normal(size=middle) * 0.1,
        "b1": draw.normal(size=16) * 0.1,
        "w2": draw.normal(size=(4, 16)) / gain,
    }
    pads, groups = [1, 1, 1, 1], 16 if depthwise else 1
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["c0"], "conv0", pads=pads),
        helper.make_node("Relu", ["c0"], ["r0"], "relu0"),
        helper.make_node("Conv", ["r0", "w1", "b1"], ["c1"], "conv1", pads=pads, group=groups),
        helper.make_node("Add", ["c1", "r0"], ["a"], "add"),
        helper.make_node("Relu", ["a"], ["r1"], "relu1"),
        helper.make_node("GlobalAveragePool", ["r1"], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["f"], "flatten"),
        helper.make_node("Gemm", ["f", "w2"], ["y"], "head", transB=1),
    ]
    return save_graph(
        path,
        nodes,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in constants.items()],
    )


def inputs(count: int = 12) -> np.ndarray:
    return np.random.default_rng(2).normal(size=(count, 3, 8, 8)).astype(np.float32)


def calibrated(fp32: Path, images: np.ndarray, name: str = "x") -> Calibration:
    graph = prepare(fp32, fp32.with_name("prepared.onnx"))
    labels = np.zeros(len(images), np.int64)
    return Calibration(graph, collect(graph, [Chunk({name: images}, labels, np.arange(len(labels)))]))


def far(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
