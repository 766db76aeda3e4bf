"""A detector's answers against the objects of images: each image's score, and what a mean average precision needs.

Masks or keypoints are compared if both the network and the data have them, and boxes otherwise.
"""

from __future__ import annotations

import numpy as np

from convoy.export.proof.detection_metric import (
    BOXES,
    IOU_THRESHOLDS,
    KEYPOINTS,
    MASKS,
    MAX_DETECTIONS,
    MAX_POSES,
    Booleans,
    Found,
    Matches,
    Wanted,
    image_score,
    match,
)
from convoy.export.proof.shape_overlaps import keypoint_overlaps, mask_overlaps
from convoy.export.rows import Rows
from convoy.export.targets import CROWD, PICTURE
from convoy.models.boxes import InputBoxes, find_boxes, further_values, input_keypoints
from convoy.models.errors import ModelFailed
from convoy.models.geometry import ImagePlacement
from convoy.models.masks import masks_on_picture
from convoy.models.spec import ModelSpec
from convoy.models.tasks import DetectionOutputs

# Of boxes in a mean average precision.
LEAST_SCORE = 0.001


def window_of(spec: ModelSpec) -> tuple[int, int]:
    """Width and height of the input. Without an image they may be any: overlaps are the same on every scale."""
    return (1, 1) if spec.image is None else (spec.image.width, spec.image.height)


def boxes_against(answers: Rows, targets: np.ndarray, spec: ModelSpec) -> dict[str, np.ndarray]:
    """The fields of `DetectionOutcomes` other than agreements and errors, for `targets` of `convoy.export.targets`.

    The scores of images are of the boxes that a server would answer. The matches go down to a score of 0.001, where
    published mean average precisions usually end.
    """
    samples = [_against(answers, target, spec, sample) for sample, target in enumerate(targets)]
    return {name: np.stack([one[name] for one in samples]) for name in samples[0]}


def _against(answers: Rows, target: np.ndarray, spec: ModelSpec, sample: int) -> dict[str, np.ndarray]:
    said = spec.detection
    assert said is not None, "only detectors have boxes; this is a bug"
    values = {name: answers[name][sample] for name in said.names}
    shape = _shape_of(target, spec, said)
    found, boxes = _found(values, target, spec, said)
    wanted = _wanted(target, shape)
    overlaps = None
    if shape != BOXES and boxes is not None:
        overlaps = _overlaps(values, boxes, found, wanted, target, spec, said)
    most = MAX_POSES if shape == KEYPOINTS else MAX_DETECTIONS
    matches, count = match(found, wanted, overlaps, most), len(found.scores)
    answered = min(int((found.scores >= said.threshold).sum()), said.max_boxes)
    served = Found(found.boxes[:answered], found.classes[:answered], found.scores[:answered])
    is_object = ~wanted.does_not_count
    score = image_score(served, Matches(*(one[:, :answered] for one in matches)), int(is_object.sum()))
    filled = {
        "found_scores": np.full(MAX_DETECTIONS, -1.0),
        "found_classes": np.full(MAX_DETECTIONS, -1),
        "right": np.zeros(MAX_DETECTIONS, np.uint16),
        "ignored": np.zeros(MAX_DETECTIONS, np.uint16),
        "wanted": np.full(len(target), -1),
        "shape": np.array(shape),
    }
    bits = 1 << np.arange(len(IOU_THRESHOLDS), dtype=np.uint16)
    filled["found_scores"][:count], filled["found_classes"][:count] = found.scores, found.classes
    filled["right"][:count], filled["ignored"][:count] = (bits @ one.astype(np.uint16) for one in matches)
    filled["wanted"][: int(is_object.sum())] = wanted.classes[is_object]
    return {"scores": np.array(score), **filled}


def _shape_of(target: np.ndarray, spec: ModelSpec, said: DetectionOutputs) -> int:
    """What is measured: what both the network and the data have."""
    if target.shape[1] <= 6 or spec.image is None:
        return BOXES
    if said.prototypes is not None:
        return MASKS
    # The data's keypoints may be of another kind of object.
    return KEYPOINTS if said.keypoints and target.shape[1] == 7 + 3 * said.keypoints[0] else BOXES


def _found(
    values: dict[str, np.ndarray], target: np.ndarray, spec: ModelSpec, said: DetectionOutputs
) -> tuple[Found, InputBoxes | None]:
    """The boxes of one sample, clipped to its picture, as a server clips them; none if it would answer an error."""
    window = window_of(spec)
    threshold = min(LEAST_SCORE, said.threshold)
    try:
        found = find_boxes(values, said, spec.activation, window, threshold, MAX_DETECTIONS)
    except ModelFailed:
        return Found(np.zeros((0, 4)), np.zeros(0, np.int64), np.zeros(0)), None
    boxes = found.corners
    if spec.image is not None:
        pictures = target[target[:, 5] == PICTURE, :4] if target.shape[1] > 5 else target[:0, :4]
        low, high = (pictures[0, :2], pictures[0, 2:]) if len(pictures) else (np.zeros(2), np.array(window))
        boxes = boxes.clip(np.tile(low, 2), np.tile(high, 2))
    return Found(boxes, found.classes, found.scores.astype(np.float64)), found


def _overlaps(
    values: dict[str, np.ndarray],
    boxes: InputBoxes,
    found: Found,
    wanted: Wanted,
    target: np.ndarray,
    spec: ModelSpec,
    said: DetectionOutputs,
) -> np.ndarray:
    """Of masks or keypoints on the picture, as a server answers them; none if it would answer an error."""
    assert spec.image is not None, "they are only measured on pictures; this is a bug"
    (picture,) = target[target[:, 5] == PICTURE, 6:8].astype(int).tolist()
    placement = ImagePlacement.of((picture[0], picture[1]), spec.image)
    shapes = target[target[:, 4] >= 0, 6:]
    try:
        if said.prototypes is not None:
            coefficients = further_values(values, said, boxes.rows)
            corners = placement.boxes_on_picture(boxes.corners)
            masks = list(masks_on_picture(coefficients, values[said.prototypes], corners, placement))
            own = [one[1 : int(one[0]) + 1].astype(np.int64) for one in shapes]
            return mask_overlaps(masks, own, wanted.is_crowd)
        points = input_keypoints(values, said, boxes.rows, placement.window)
    except ModelFailed:
        return np.zeros((len(found.scores), len(wanted.classes)))
    points[..., :2] = placement.points_on_picture(points[..., :2])
    on_picture = placement.boxes_on_picture(wanted.boxes)
    return keypoint_overlaps(points, shapes[:, 1:].reshape(len(shapes), -1, 3), shapes[:, 0], on_picture)


def _wanted(target: np.ndarray, shape: int) -> Wanted:
    rows = target[target[:, 4] >= 0].astype(np.float64)
    is_crowd = rows[:, 5] == CROWD if rows.shape[1] > 5 else np.zeros(len(rows), bool)
    # As in COCO, a person without labelled keypoints is neither right nor wrong.
    is_ignored: Booleans | None = np.all(rows[:, 9::3] <= 0, axis=1) if shape == KEYPOINTS else None
    return Wanted(rows[:, :4], rows[:, 4].astype(np.int64), is_crowd, is_ignored)
