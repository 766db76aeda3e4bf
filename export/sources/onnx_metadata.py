"""What a detector says of itself: its preprocessing, labels, and how its outputs become boxes.

Ultralytics writes metadata into its ONNX files, and its networks in PyTorch have the same as attributes; RF-DETR's
files are known by the names of their outputs. Sources of the facts:
Ultralytics' exporter, predictors and default configuration (8.4), YOLOv5's `detect.py`, RF-DETR's `export` (1.3).
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from convoy.app.engines.cpu import cpu_budget
from convoy.app.engines.onnxruntime import open_session, read_signature
from convoy.export.class_names import distinct
from convoy.export.sources import onnx_file
from convoy.export.sources.layouts import likely_layout
from convoy.export.sources.preprocess import InputSize, preset
from convoy.models.errors import BundleError, UsageError
from convoy.models.spec import Activation, ImageSpec, TensorSpec
from convoy.models.tasks import DetectionOutputs, Layout, Task


@dataclass(frozen=True, slots=True)
class StatedModel:
    """`source` says what the rest was read from. `remark` names what is in the file and is not served."""

    source: str
    task: Task
    image: ImageSpec
    labels: tuple[str, ...]
    detection: DetectionOutputs | None = None
    activation: Activation | None = None
    remark: str = ""


# Ultralytics' defaults for `predict`: conf, iou and max_det.
_THRESHOLD, _IOU, _MOST = 0.25, 0.7, 300
# Ultralytics passes at most this many boxes to suppression.
_CANDIDATES = 30_000
_COCO_QUERIES = ("dets", "labels")  # RF-DETR's outputs
_MOST_TEXT = 1 << 20


def stated_model(path: Path, size: InputSize | None) -> StatedModel | None:
    """What the file says; None if that is not enough. `size` is its input's.

    Raises UsageError for tasks that cannot be served from pictures.
    """
    if size is None:
        return None
    model = onnx_file.read(path)
    stated = {entry.key: entry.value for entry in model.metadata_props if len(entry.value) <= _MOST_TEXT}
    if _names(stated.get("names", "")) and "stride" in stated:
        shapes = {one.name: tuple(one.shape) for one in _outputs(path)}
        source = "Ultralytics' metadata" if "task" in stated else "YOLOv5's metadata"
        found = of_ultralytics(path.name, source, stated, shapes, size)
        if (found is None or found.task == "detect") and onnx_file.has_halves(model):
            raise UsageError(
                f"{path.name} computes in FP16, so there are no FP32 answers to compare with; export it with "
                "half=False: Convoy makes the FP16 file itself"
            )
        return found
    # The names first: a session of a large file takes seconds.
    has_names = tuple(one.name for one in model.graph.output) == _COCO_QUERIES
    if has_names and [len(one.shape) for one in _outputs(path)] == [3, 3]:
        detection = DetectionOutputs(
            "dets", "labels", layout="detr", threshold=0.5, max_candidates=_CANDIDATES, max_boxes=_MOST
        )
        image = replace(preset("imagenet", size, "uint8_nhwc"), resize_mode="exact")
        return StatedModel("the names of RF-DETR's outputs", "detect", image, (), detection, "sigmoid")
    return None


def of_ultralytics(
    name: str, source: str, stated: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], size: InputSize
) -> StatedModel | None:
    """What Ultralytics' metadata says, which was read from `source`; None if that is not enough.

    `shapes` are of the outputs, with the batch. Raises UsageError for tasks that cannot be served from pictures.
    """
    labels = _names(stated.get("names", ""))
    if not labels:
        return None
    task = stated.get("task", "detect")
    if task == "classify":
        image = replace(preset("unit", size, "uint8_nhwc"), resize_mode="shorter_side")
        return StatedModel(source, "classify", image, labels)
    if task not in ("detect", "segment", "pose"):
        raise UsageError(
            f"{name} is for Ultralytics' task {task!r}, whose boxes are not supported; pass --task none to serve "
            "its tensors"
        )
    outputs = tuple(shapes.items())
    is_detr = "RTDETR" in stated.get("head", "") or "rtdetr" in stated.get("description", "").lower()
    detection = _layout_of(*outputs[0], len(labels), stated, is_detr=is_detr)
    if detection is None:
        return None
    further = {"segment": "masks", "pose": "keypoints"}.get(task)
    complete = _with_further(detection, outputs, len(labels), stated) if further else detection
    remark = f"boxes without their {further}" if complete is None else ""
    detection = complete or detection
    image = letterbox(size) if not is_detr else replace(letterbox(size), resize_mode="exact")
    return StatedModel(source, "detect", image, labels, detection, remark=remark)


def letterbox(size: InputSize) -> ImageSpec:
    """Ultralytics' preparation: resized to fit with cv2's bilinear, padded with 114, values in 0..1."""
    return preset("letterbox", size, "uint8_nhwc")


def _layout_of(
    name: str, shape: tuple[int, ...], classes: int, stated: Mapping[str, str], *, is_detr: bool
) -> DetectionOutputs | None:
    """How an output [N, ...] is read, by its shape and the number of classes; None if it is unknown."""
    if len(shape) != 3:
        return None
    _, rows, columns = shape
    layout: Layout | None = None
    # Masks and keypoints add values to each box.
    further = math.inf if stated.get("task") in ("segment", "pose") else 0
    if columns == 6 or (_is_end_to_end(stated) and 6 <= columns <= 6 + further):
        layout = "end_to_end"
    elif is_detr and columns == 4 + classes:
        layout = "detr"
    elif 4 + classes <= rows <= 4 + classes + further:
        layout = "yolo_v8"
    elif "task" not in stated and columns == 5 + classes:
        layout = "yolo_v5"
    if layout is None:
        return None
    found = replace(usual_detection(layout, name), classes=classes if layout != "end_to_end" else None)
    if layout == "end_to_end" and is_detr:
        return replace(found, box_form="cxcywh", box_unit="fractions")
    return found


def _with_further(
    boxes: DetectionOutputs,
    outputs: Sequence[tuple[str, tuple[int, ...]]],
    classes: int,
    stated: Mapping[str, str],
) -> DetectionOutputs | None:
    """The same with the masks or keypoints that follow the scores; None if the outputs have others than expected."""
    is_list = boxes.layout == "end_to_end"
    if not is_list and boxes.layout != "yolo_v8":
        return None
    (_, (_, rows, columns)), *others = outputs
    further = columns - 6 if is_list else rows - 4 - classes
    if stated.get("task") == "segment":
        if [(len(one), one[1]) for _, one in others] != [(4, further)]:
            return None
        found = replace(boxes, layout=boxes.layout if is_list else "yolo_v8_seg", prototypes=others[0][0])
    else:
        shape = _literal(stated.get("kpt_shape", ""))
        if not isinstance(shape, list | tuple) or not all(type(size) is int for size in shape):
            return None
        if math.prod(shape) != further:
            return None
        layout: Layout = boxes.layout if is_list else "yolo_v8_pose"
        try:
            found = replace(boxes, layout=layout, keypoints=tuple(shape))
        except BundleError:
            return None
    return found


def usual_detection(layout: Layout, boxes: str, scores: str | None = None) -> DetectionOutputs:
    """The layout with the thresholds that the programs of its authors use for `predict`."""
    return DetectionOutputs(
        boxes,
        scores,
        layout=layout,
        threshold=_THRESHOLD,
        iou_threshold=None if layout in ("end_to_end", "detr") else 0.45 if layout == "yolo_v5" else _IOU,
        max_candidates=_CANDIDATES,
        max_boxes=_MOST,
    )


def _is_end_to_end(stated: Mapping[str, str]) -> bool:
    """Whether the graph suppresses overlaps itself: exported with nms=True, or a head that needs no suppression."""
    arguments = _literal(stated.get("args", ""))
    return stated.get("end2end") == "True" or (isinstance(arguments, dict) and bool(arguments.get("nms")))


def _names(text: str) -> tuple[str, ...]:
    """The labels of `names`, a dict by class number or a list; empty if it is neither."""
    names = _literal(text)
    if isinstance(names, dict):
        if sorted(map(str, names)) != sorted(map(str, range(len(names)))):
            return ()
        names = [names[number] for number in sorted(names, key=int)]
    return distinct([str(name) for name in names]) if isinstance(names, list) else ()


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return None


def _outputs(path: Path) -> Sequence[TensorSpec]:
    return read_signature(open_session(path, cpu_budget()), path).outputs


def layout_of_file(path: Path, size: InputSize) -> Layout | None:
    """The layout that the outputs of a file suggest, for advice; None for others."""
    return likely_layout({one.name: one.shape for one in _outputs(path)}, size.height, size.width)
