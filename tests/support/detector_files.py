"""ONNX detectors without training: each cell of a grid is as red or as blue as its part of the image."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SIDE, STRIDE = 64, 8
CELLS = (SIDE // STRIDE) ** 2
# The grids of strides 16 and 32, which find nothing here.
COARSE = CELLS // 4 + CELLS // 16
# As Ultralytics' exporter writes it.
METADATA = {
    "description": "Ultralytics YOLO11n model",
    "author": "Ultralytics",
    "stride": str(STRIDE),
    "task": "detect",
    "batch": "1",
    "imgsz": f"[{SIDE}, {SIDE}]",
    "names": "{0: 'red', 1: 'blue'}",
    "args": "{'batch': 1, 'nms': False, 'dynamic': False}",
    "channels": "3",
}


def write_detector(path: Path, layout: str = "yolo_v8", metadata: Mapping[str, str] = METADATA, batch: Any = 1) -> Path:
    """A file that takes float [batch, 3, 64, 64] in 0..1 and gives two classes for each of 84 cells in a layout.

    `yolo_v8` [batch, 6, 84], `yolo_v5` [batch, 84, 7], or `end_to_end` [batch, 84, 6] by score. `yolo_v8_seg` adds the
    coefficients of two masks, which are where the image is red or blue; `yolo_v8_pose` two keypoints with scores, the
    centre of the cell and its upper left corner.
    """
    graph = _Graph()
    pooled = graph.add("AveragePool", "images", kernel_shape=[STRIDE] * 2, strides=[STRIDE] * 2)
    # How much more red than blue, and the other way round, as [batch, 2, cells].
    weights = np.array([[1, 0, -1], [-1, 0, 1]], np.float32).reshape(2, 3, 1, 1)
    colours = graph.add("Conv", pooled, graph.constant(weights))
    flat = graph.add("Reshape", colours, graph.constant(np.array([0, 2, CELLS], np.int64)))
    fine = graph.add("Clip", flat, graph.constant(np.float32(0)), graph.constant(np.float32(1)))
    scores = graph.add("Pad", fine, graph.constant(np.array([0, 0, 0, 0, 0, COARSE])))
    boxes = _cells()
    if layout == "end_to_end":
        boxes = np.concatenate([boxes[:2] - boxes[2:] / 2, boxes[:2] + boxes[2:] / 2])
    # Zero times the scores, so that there is a row for each sample.
    zeros = graph.add("Mul", scores, graph.constant(np.float32(0)))
    none = graph.add("ReduceMax", zeros, graph.constant(np.array([1])))
    placed = graph.add("Add", graph.constant(boxes[None].astype(np.float32)), none)
    if layout == "end_to_end":
        _by_score(graph, scores, placed)
    elif layout == "yolo_v5":
        objectness = graph.add("Add", none, graph.constant(np.float32(1)))
        graph.add("Transpose", graph.add("Concat", placed, objectness, scores, axis=1), perm=[0, 2, 1], to="output0")
    elif layout == "yolo_v8_seg":
        graph.add("Concat", placed, scores, scores, axis=1, to="output0")
        graph.add("Sub", colours, graph.constant(np.float32(0.1)), to="output1")
    elif layout == "yolo_v8_pose":
        (x, y, width, height), certain = boxes, np.ones(CELLS + COARSE)
        points = np.stack([x, y, 0.75 * certain, x - width / 2, y - height / 2, 0.25 * certain])
        further = graph.add("Add", graph.constant(points[None].astype(np.float32)), none)
        graph.add("Concat", placed, scores, further, axis=1, to="output0")
    else:
        graph.add("Concat", placed, scores, axis=1, to="output0")
    count = CELLS + COARSE
    shapes = {"yolo_v8": [6, count], "yolo_v5": [count, 7], "end_to_end": [count, 6]}
    shapes |= {"yolo_v8_seg": [8, count], "yolo_v8_pose": [12, count]}
    outputs = [helper.make_tensor_value_info("output0", TensorProto.FLOAT, [batch, *shapes[layout]])]
    if layout == "yolo_v8_seg":
        outputs.append(helper.make_tensor_value_info("output1", TensorProto.FLOAT, [batch, 2, *[SIDE // STRIDE] * 2]))
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            "detector",
            [helper.make_tensor_value_info("images", TensorProto.FLOAT, [batch, 3, SIDE, SIDE])],
            outputs,
            graph.constants,
        ),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=9,
    )
    helper.set_model_props(model, dict(metadata))
    onnx.save(model, str(path))
    return path


def _cells() -> np.ndarray:
    """cx, cy, w, h [4, cells] in pixels, row by row; each box is as large as its cell."""
    rows, columns = np.mgrid[: SIDE // STRIDE, : SIDE // STRIDE]
    centres = np.stack([columns.ravel(), rows.ravel()]) * STRIDE + STRIDE / 2
    boxes = np.concatenate([centres, np.full_like(centres, STRIDE)])
    return np.pad(boxes, ((0, 0), (0, COARSE)))


def _by_score(graph: _Graph, scores: str, corners: str) -> None:
    """Rows of corners, score and class, the highest score first."""
    best = graph.add("ReduceMax", scores, graph.constant(np.array([1])), keepdims=0)
    number = graph.add("Cast", graph.add("ArgMax", scores, axis=1, keepdims=0), to_type=TensorProto.FLOAT)
    names = [f"sorted{place}" for place in range(2)]
    graph.nodes.append(helper.make_node("TopK", [best, graph.constant(np.array([CELLS + COARSE]))], names, axis=1))
    last = graph.constant(np.array([2]))
    columns = graph.add("Transpose", corners, perm=[0, 2, 1])
    more = [graph.add("Unsqueeze", one, last) for one in (best, number)]
    rows = graph.add("Concat", columns, *more, axis=2)
    index = graph.add(
        "Expand", graph.add("Unsqueeze", names[1], last), graph.constant(np.array([1, CELLS + COARSE, 6]))
    )
    graph.add("GatherElements", rows, index, axis=1, to="output0")


class _Graph:
    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, array: Any) -> str:
        name = f"constant{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def add(self, kind: str, *inputs: str, to: str = "", to_type: int | None = None, **attributes: Any) -> str:
        """Append a node and return the name of its output."""
        output = to or f"{kind.lower()}{len(self.nodes)}"
        if to_type is not None:
            attributes["to"] = to_type
        self.nodes.append(helper.make_node(kind, list(inputs), [output], **attributes))
        return output
