"""The task of a model's outputs, and which output holds what, as a spec declares it.

Everything declared here is data, so no code of a model's author runs to read its outputs. Shapes are those of one
sample, without the batch dimension. -1 is a size known only at run time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from convoy.models.errors import BundleError

# "classify": one class of several. "multilabel": independent classes. "segment": a class for each pixel. "detect":
# boxes with a class and a score. "none": tensors in, tensors out, with unknown meaning.
Task = Literal["classify", "multilabel", "segment", "detect", "none"]
CLASS_TASKS: tuple[Task, ...] = ("classify", "multilabel")
# The four numbers of a box: corners; a corner, width and height; or centre, width and height.
BoxForm = Literal["xyxy", "xywh", "cxcywh"]
# In pixels of the network's input, or as shares of its width and height.
BoxUnit = Literal["pixels", "fractions"]
# What a detector's outputs are; see `DetectionOutputs`.
Layout = Literal["separate", "yolo_v5", "yolo_v8", "yolo_v8_seg", "yolo_v8_pose", "end_to_end", "detr"]

# A class map has one byte per pixel; the last value marks pixels that the network did not see.
MAX_MAP_CLASSES = 255

_FLOATS = ("FP16", "FP32", "FP64")
_INTEGERS = ("UINT8", "UINT16", "UINT32", "INT8", "INT16", "INT32", "INT64")


class _Tensor(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class SegmentationOutput:
    """The output that holds a class for each pixel.

    `class_map` is float [C, H, W], a score per class, of which the largest counts; or integer [H, W], the class itself.
    With C = 1, a score of at least 0.5 (after the spec's activation) is class 1, and less is class 0. H and W may
    differ from the input's: the map always covers the whole input.
    """

    class_map: str

    def check(self, outputs: Sequence[_Tensor]) -> int | None:
        """The number of classes in the map, None if its shape does not tell. Raises BundleError."""
        output = _found("segment", "class map", self.class_map, outputs)
        shape = output.shape
        if len(shape) == 2 and output.dtype in _INTEGERS:
            return None
        if len(shape) != 3 or output.dtype not in _FLOATS or shape[0] < 1:
            raise _unfit("segment", output, "float [classes, height, width] or integer [height, width]")
        if shape[0] > MAX_MAP_CLASSES:
            raise _unfit("segment", output, f"a map of at most {MAX_MAP_CLASSES} classes")
        return shape[0]


@dataclass(frozen=True, slots=True)
class AnchorLevel:
    """The anchors of one grid of a detector: one of each size at each cell.

    In row r and column c they are centred at x = (c + `offset`) * `step_x_px`, y = (r + `offset`) * `step_y_px`, in
    pixels of the network's input; `sizes_px` are pairs of width and height. Their order is row by row, within a row
    column by column, within a cell in the order of the sizes.
    """

    rows: int
    columns: int
    step_y_px: float
    step_x_px: float
    sizes_px: tuple[tuple[float, ...], ...]
    offset: float = 0.5

    def __post_init__(self) -> None:
        sizes = [side for size in self.sizes_px for side in size]
        is_sound = min(self.rows, self.columns, len(self.sizes_px)) >= 1 and {len(size) for size in self.sizes_px} == {
            2
        }
        steps = (self.step_y_px, self.step_x_px, *sizes)
        if not is_sound or min(steps) <= 0 or not all(map(math.isfinite, (*steps, self.offset))):
            raise BundleError(
                "an anchor level needs rows and columns of at least 1, steps above 0, and sizes in pairs of width and "
                f"height above 0; got {self}"
            )

    @property
    def anchors(self) -> int:
        return self.rows * self.columns * len(self.sizes_px)


@dataclass(frozen=True, slots=True)
class DetectionOutputs:
    """The outputs that hold boxes, and the steps that turn them into detections.

    `layout` says what the outputs of one sample are; K is the number of boxes, C of classes:

        separate     `boxes` float [K, 4], read by `box_form` and `box_unit`; `scores` float [K, C], or [K] with
                     `labels` integer [K], or [K] for one class. `count`, integer [] or [1], is the number of valid
                     rows; without it all are valid.
        yolo_v5      `boxes` float [K, 5 + C]: cx, cy, w, h, objectness, classes (YOLOv5, YOLOv7, YOLOX). With
                     `strides` the grid is not decoded: centres are offsets from the cell, sizes logarithms, both in
                     strides (YOLOX).
        yolo_v8      `boxes` float [4 + C, K]: cx, cy, w, h, classes (YOLOv8, YOLOv9, YOLO11, YOLO12)
        yolo_v8_seg  `boxes` float [4 + C + M, K]: as yolo_v8, then the coefficients of M masks; `prototypes` float
                     [M, h, w], these masks over the whole input, at any resolution
        yolo_v8_pose `boxes` float [4 + C + P * D, K]: as yolo_v8, then P keypoints of D values; `keypoints` is [P, D]
        end_to_end   `boxes` float [K, 6]: x1, y1, x2, y2, score, class (YOLOv10, YOLO26, exports with nms=True), then
                     coefficients or keypoints if there are `prototypes` or `keypoints`
        detr         `boxes` float [K, 4]: cx, cy, w, h as fractions, and `scores` float [K, C]; or without `scores`
                     `boxes` float [K, 4 + C] (DETR, RT-DETR, RF-DETR)

    The YOLO layouts are in pixels of the network's input, or fractions if `box_unit` says so. `classes` is C if further
    other values follow. An object's mask is where the sum of its coefficients times the prototypes is above 0, within
    its box. A keypoint is x, y and, if D is 3, its score from 0 to 1. With `anchors`, `boxes` [K, 4] holds the
    difference from the anchor of its row, (dx, dy, dw, dh) times `anchor_weights`: the centre moved by dx widths and dy
    heights, the size times e to the dw and dh, of which at most ln(1000 / 16) counts (Girshick et al., 2014). Rows with
    a label below 0 or a score of 0 are padding.

    `background` is the class that stands for no object. `threshold` is the default minimum score, after the spec's
    activation. With `multi_label`, a box counts for each class that reaches the threshold, otherwise for its best; by
    default only layouts with separate scores do. `iou_threshold` is how much boxes of one class (of any class, if
    `class_agnostic`) may overlap, as intersection over union, before the lower score is dropped; None if the graph does
    that itself. At most `max_candidates` boxes, the best, go into that step, and at most `max_boxes` come out by
    default.
    """

    boxes: str
    scores: str | None = None
    labels: str | None = None
    count: str | None = None
    box_form: BoxForm = "xyxy"
    box_unit: BoxUnit = "pixels"
    anchors: tuple[AnchorLevel, ...] = ()
    anchor_weights: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)
    background: int | None = None
    threshold: float = 0.05
    iou_threshold: float | None = None
    max_candidates: int = 4_000
    max_boxes: int = 100
    layout: Layout = "separate"
    classes: int | None = None
    strides: tuple[int, ...] = ()
    multi_label: bool | None = None
    class_agnostic: bool = False
    prototypes: str | None = None
    keypoints: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1 or not 0 < (1.0 if self.iou_threshold is None else self.iou_threshold) <= 1:
            raise BundleError("detect: threshold must be from 0 to 1, and iou_threshold above 0 and at most 1, or none")
        if not 1 <= self.max_boxes <= self.max_candidates <= 100_000:
            raise BundleError("detect: max_boxes must be at least 1, max_candidates no less, and at most 100000")
        if len(self.anchor_weights) != 4 or not all(0 < weight < math.inf for weight in self.anchor_weights):
            raise BundleError("detect: anchor_weights must be four numbers above 0, for dx, dy, dw and dh")
        if self.anchors and (self.box_form, self.box_unit) != ("xyxy", "pixels"):
            raise BundleError("detect: boxes that differ from anchors have no box_form and box_unit of their own")
        if self.classes is not None and self.classes < 1:
            raise BundleError(f"detect: classes must be at least 1, got {self.classes}")
        self._check_fields()

    def _check_fields(self) -> None:
        """Refuse fields that the layout has no use for. Raises BundleError."""
        separate = {"labels": self.labels, "count": self.count, "anchors": self.anchors or None}
        unused = {name for name, value in separate.items() if value is not None} if self.layout != "separate" else set()
        if self.layout not in ("separate", "detr") and self.scores is not None:
            unused.add("scores")
        if self.strides and self.layout != "yolo_v5":
            unused.add("strides")
        further = {"prototypes": self.prototypes is not None, "keypoints": bool(self.keypoints)}
        unused |= {name for name, is_given in further.items() if is_given and name not in _FURTHER.get(self.layout, ())}
        if unused:
            raise BundleError(f"detect: the layout {self.layout} has no {', '.join(sorted(unused))}; remove it")
        if self.layout == "separate" and self.scores is None:
            raise BundleError("detect: the layout separate needs the name of the output with the scores; add scores")
        if min(self.strides, default=1) < 1:
            raise BundleError("detect: strides must be at least 1")
        if all(further.values()):
            raise BundleError("detect: boxes have prototypes or keypoints, not both; remove one")
        # A layout that is only known by its name gets these from the file.
        if self.boxes and self.layout in _NEEDED and not further[_NEEDED[self.layout]]:
            raise BundleError(f"detect: the layout {self.layout} needs {_NEEDED[self.layout]}; add it")
        if self.keypoints and (len(self.keypoints) != 2 or self.keypoints[0] < 1 or self.keypoints[1] not in (2, 3)):
            raise BundleError(
                "detect: keypoints are the number of points, and 2 values of each (x, y) or 3 (x, y, score), such as "
                f"[17, 3]; got {list(self.keypoints)}"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The needed outputs: boxes, and scores, labels, count and prototypes if there are any."""
        names = (self.boxes, self.scores, self.labels, self.count, self.prototypes)
        return tuple(name for name in names if name is not None)

    @property
    def of_boxes(self) -> tuple[str, ...]:
        """The outputs with a row for each box."""
        return tuple(name for name in (self.boxes, self.scores, self.labels) if name is not None)

    @property
    def is_yolo_v8(self) -> bool:
        """Whether a box's values lie along the first axis."""
        return self.layout in ("yolo_v8", *_NEEDED)

    @property
    def is_list(self) -> bool:
        """Whether the graph itself chooses the boxes, or the queries that find them, so that rounding may change their
        order.
        """
        return self.layout in ("end_to_end", "detr") or self.labels is not None

    @property
    def are_fractions(self) -> bool:
        """Whether boxes are shares of the input's width and height."""
        return self.box_unit == "fractions" or self.layout == "detr"

    @property
    def is_multi_label(self) -> bool:
        """Whether a box counts for each class that reaches the threshold."""
        return self.scores is not None if self.multi_label is None else self.multi_label

    def check(self, outputs: Sequence[_Tensor]) -> int | None:
        """The number of classes of the scores, None if their shape does not tell. Raises BundleError."""
        boxes = _found("detect", "boxes", self.boxes, outputs)
        if self.scores is None:
            classes = self._classes_of(boxes, self._further_values(outputs))
        else:
            classes = self._check_separate(boxes, _found("detect", "scores", self.scores, outputs), outputs)
        if self.background is not None and not 0 <= self.background < (classes or math.inf):
            raise BundleError(
                f"detect: background {self.background} is none of the {classes} classes of output "
                f"{self.scores or self.boxes!r}"
            )
        return classes

    def _further_values(self, outputs: Sequence[_Tensor]) -> int:
        """How many values of masks or keypoints each box has. Raises BundleError."""
        if self.prototypes is None:
            return math.prod(self.keypoints) if self.keypoints else 0
        prototypes = _found("detect", "prototypes", self.prototypes, outputs)
        if len(prototypes.shape) != 3 or min(prototypes.shape) < 1 or prototypes.dtype not in _FLOATS:
            raise _unfit("detect", prototypes, "float [masks, height, width] of fixed size, for the prototypes")
        return prototypes.shape[0]

    def _classes_of(self, output: _Tensor, further: int) -> int | None:
        """The number of classes of a layout with one output of boxes, whose last values are `further`. Raises
        BundleError.
        """
        before, axis = _ONE_OUTPUT[self.layout]
        form = _FORMS[self.layout]
        if len(output.shape) != 2 or output.dtype not in _FLOATS:
            raise _unfit("detect", output, f"float {form} for the layout {self.layout}")
        values = output.shape[axis]
        if self.layout == "end_to_end":
            if values < 6 or (further and values not in (-1, 6 + further)):
                raise _unfit("detect", output, f"float {form if not further else f'[boxes, {6 + further}]'}")
            return self.classes
        least = before + (self.classes or 1) + further
        if values < 0:
            return self.classes
        if values < least or (further and self.classes and values != least):
            how_many = f"{least} values" if further and self.classes else f"{least} values or more"
            raise _unfit("detect", output, f"float {form} with {how_many} for the layout {self.layout}")
        return self.classes or values - before - further

    def _check_separate(self, boxes: _Tensor, scores: _Tensor, outputs: Sequence[_Tensor]) -> int | None:
        if len(boxes.shape) != 2 or boxes.shape[1] != 4 or boxes.dtype not in _FLOATS:
            raise _unfit("detect", boxes, "float [boxes, 4]")
        if len(scores.shape) not in (1, 2) or scores.dtype not in _FLOATS or 0 in scores.shape:
            raise _unfit("detect", scores, "float [boxes] or [boxes, classes]")
        classes = scores.shape[1] if len(scores.shape) == 2 else None
        rows = [boxes, scores]
        if self.labels is not None:
            labels = _found("detect", "labels", self.labels, outputs)
            if classes is not None:
                raise BundleError(
                    f"detect: output {scores.name!r} {list(scores.shape)} has a score for each class, so that there is "
                    f"no use for labels in {labels.name!r}; declare one or the other"
                )
            if len(labels.shape) != 1 or labels.dtype not in _INTEGERS:
                raise _unfit("detect", labels, "integer [boxes]")
            rows.append(labels)
        if self.count is not None:
            count = _found("detect", "count", self.count, outputs)
            if count.shape not in ((), (1,)) or count.dtype not in _INTEGERS:
                raise _unfit("detect", count, "integer [] or [1]")
        sizes = {one.shape[0] for one in rows} - {-1}
        if self.anchors:
            sizes.add(sum(level.anchors for level in self.anchors))
        if len(sizes) > 1:
            shapes = ", ".join(f"{one.name!r} {list(one.shape)}" for one in rows)
            anchors = f", and there are {sum(level.anchors for level in self.anchors)} anchors" if self.anchors else ""
            raise BundleError(f"detect: the outputs are not of one number of boxes: {shapes}{anchors}")
        return classes


# For layouts with one output: the values before the scores, and the axis along which a box's values lie.
_ONE_OUTPUT: dict[Layout, tuple[int, int]] = {
    "yolo_v5": (5, 1),
    "yolo_v8": (4, 0),
    "yolo_v8_seg": (4, 0),
    "yolo_v8_pose": (4, 0),
    "end_to_end": (6, 1),
    "detr": (4, 1),
}
_FORMS: dict[Layout, str] = {
    "yolo_v5": "[boxes, 5 + classes]",
    "yolo_v8": "[4 + classes, boxes]",
    "yolo_v8_seg": "[4 + classes + masks, boxes]",
    "yolo_v8_pose": "[4 + classes + values of keypoints, boxes]",
    "end_to_end": "[boxes, 6]",
    "detr": "[boxes, 4 + classes]",
}

# What follows the classes of a box.
_FURTHER: dict[Layout, tuple[str, ...]] = {
    "yolo_v8_seg": ("prototypes",),
    "yolo_v8_pose": ("keypoints",),
    "end_to_end": ("prototypes", "keypoints"),
}
_NEEDED: dict[Layout, str] = {"yolo_v8_seg": "prototypes", "yolo_v8_pose": "keypoints"}


def _found(task: str, what: str, name: str, outputs: Sequence[_Tensor]) -> _Tensor:
    for output in outputs:
        if output.name == name:
            return output
    known = ", ".join(repr(output.name) for output in outputs)
    raise BundleError(f"{task}: there is no output {name!r} for the {what}; the model gives {known}")


def _unfit(task: str, output: _Tensor, wanted: str) -> BundleError:
    return BundleError(
        f"{task}: output {output.name!r} is {output.dtype} {list(output.shape)} for one sample; it must be {wanted}"
    )
