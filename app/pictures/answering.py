"""Turn the outputs for a picture into an answer: classes, a class map or boxes; one row per task.

Knows which outputs a task needs, how to read them, and whether that is slow.
"""

from __future__ import annotations

import io
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from convoy.app.engines.batch import Answer
from convoy.app.pictures.instances import keypoints_of, masks_bytes, masks_of
from convoy.models.activation import NAN, ClassNumbers, activate, class_numbers
from convoy.models.answers import Box, ClassShare, Detection, MaskForm, Prediction
from convoy.models.boxes import find_boxes
from convoy.models.errors import InvalidRequest, ModelFailed
from convoy.models.geometry import UNSEEN, Extent, ImagePlacement
from convoy.models.run_lengths import counts_between
from convoy.models.spec import ModelSpec
from convoy.models.tasks import Task

_FEW_IN = 20  # below this share of the classes, finding them is cheaper than sorting all


def best_classes(
    logits: np.ndarray, spec: ModelSpec, top_k: int | None, threshold: float | None = None
) -> list[Prediction]:
    """The `top_k` classes of one sample (None: all) that reach `threshold`, best first, ties by class number.

    `logits` is the sample's output, flattened. Scores are rounded to six decimals, about the precision of float32.
    Raises ModelFailed if a score is not a number.
    """
    scores = _scores(logits.astype(np.float32, copy=False), spec)
    order = _best(scores, top_k)
    if threshold is not None:
        order = order[scores[order] >= threshold]
    found = zip(order.tolist(), _six_decimals(scores[order]), strict=True)
    return [Prediction(number, _label(spec, number), score) for number, score in found]


def _six_decimals(scores: np.ndarray) -> list[float]:
    rounded: list[float] = scores.astype(np.float64).round(6).tolist()
    return rounded


def _label(spec: ModelSpec, number: int) -> str | None:
    return spec.labels[number] if number < len(spec.labels) else None


def _best(scores: np.ndarray, top_k: int | None) -> np.ndarray:
    """The class numbers that `best_classes` returns. Raises ModelFailed."""
    negated, count = -scores, len(scores)
    if top_k is None or _FEW_IN * top_k > count:
        order: np.ndarray = negated.argsort(kind="stable")  # sorted behind all others: scores that are not numbers
        if count and math.isnan(scores[order[-1]]):
            raise ModelFailed(NAN)
        return order[:top_k]
    if math.isnan(np.minimum.reduce(scores)):
        raise ModelFailed(NAN)
    # If few of many classes count, they are found without sorting the others; ties with the last one stay in order.
    among: np.ndarray = (negated <= np.partition(negated, top_k - 1)[top_k - 1]).nonzero()[0]
    best: np.ndarray = among[negated[among].argsort(kind="stable")][:top_k]
    return best


class RankedClasses(NamedTuple):
    """The best classes of each sample of a batch: ids int32 [samples, k], scores float32 [samples, k].

    `is_nan` [samples] is true if a score of the sample is not a number; then none of them counts.
    """

    class_ids: np.ndarray
    scores: np.ndarray
    is_nan: np.ndarray


def best_classes_of_batch(outputs: np.ndarray, spec: ModelSpec, top_k: int) -> RankedClasses:
    """Apply `best_classes` to each row of [samples, values] at once, without rounding the scores."""
    scores = _scores(outputs.astype(np.float32, copy=False), spec)
    is_nan = np.isnan(scores).any(axis=1)
    if _FEW_IN * top_k > scores.shape[1] or is_nan.any():
        order = (-scores).argsort(axis=1, kind="stable")[:, :top_k]
    else:
        order = np.array([_best(row, top_k) for row in scores]).reshape(-1, top_k)
    return RankedClasses(order.astype(np.int32), np.take_along_axis(scores, order, axis=1), is_nan)


def _scores(outputs: np.ndarray, spec: ModelSpec) -> np.ndarray:
    """The scores of the classes, along the last axis.

    A single output with two labels is the score of the second; the first gets the difference to one.
    """
    if not spec.is_binary or spec.activation == "softmax":
        return activate(outputs, spec.activation)
    if spec.activation == "sigmoid":
        # Not one minus the score: for a score near one, rounding would leave nothing.
        return activate(np.concatenate([-outputs, outputs], axis=-1), "sigmoid")
    return np.concatenate([1 - outputs, outputs], axis=-1)


# A noisy map would have a run per pixel: some 10 MB of JSON.
MAX_RUNS = 500_000


@dataclass(slots=True)
class SegmentedPicture:
    """The class of each pixel of the picture, uint8 [height, width]; 255 for pixels that the network did not see.

    `classes` are those that occur, in the order of their ids. Their shares and `unseen_share` add up to 1.
    """

    class_map: ClassNumbers
    classes: list[ClassShare]
    unseen_share: float


def segmented(answer: Answer, spec: ModelSpec, placement: ImagePlacement) -> SegmentedPicture:
    """The class map of one sample, scaled to the picture. Raises ModelFailed."""
    assert spec.segmentation is not None, "a segmenter has this; this is a bug"
    of_input = class_numbers(_one_sample(answer, spec, spec.segmentation.class_map), spec.activation)
    class_map = placement.map_on_picture(of_input)
    counts = np.array(Image.fromarray(class_map).histogram())  # numpy's bincount would take eight bytes per pixel
    shares = counts / class_map.size
    occurring = np.flatnonzero(counts[:UNSEEN]).tolist()
    classes = [ClassShare(number, _label(spec, number), float(shares[number])) for number in occurring]
    return SegmentedPicture(class_map, classes, float(shares[UNSEEN]))


def rendering_bytes(placement: ImagePlacement) -> int:
    """Estimate the memory to read a class map as large as the input, scale it to the picture and encode it. It is less
    than decoding the picture took.
    """
    (width, height), (input_width, input_height) = placement.picture, placement.window
    return 4 * width * height + 12 * input_width * input_height


def palette_png(class_map: ClassNumbers) -> bytes:
    """A PNG whose pixel values are the class ids, with the palette of PASCAL VOC."""
    image = Image.fromarray(class_map)
    image.putpalette(_VOC_PALETTE)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def run_lengths(class_map: ClassNumbers, class_ids: Sequence[int]) -> list[list[int]]:
    """The run lengths of each class, as in COCO's uncompressed RLE.

    Pixels are read column by column from the left, each from the top. The first count is of pixels outside the class
    and may be 0; then counts alternate, and together they are height * width.

    Raises InvalidRequest if there are too many runs for an answer.
    """
    values = class_map.T.reshape(-1)
    starts = np.flatnonzero(values[1:] != values[:-1]) + 1
    if len(starts) >= MAX_RUNS:
        raise InvalidRequest(
            f"the class map has {len(starts) + 1} runs, more than the limit of {MAX_RUNS} for run lengths; "
            "ask for a PNG with Accept: image/png or ?format=png"
        )
    starts = np.concatenate([[0], starts])
    ends = np.append(starts[1:], values.size)
    of_run = values[starts]
    counts = []
    for number in class_ids:
        edges = np.concatenate([starts[of_run == number], ends[of_run == number]])
        counts.append(counts_between(edges, values.size).tolist())
    return counts


def _voc_palette() -> bytes:
    """The palette of PASCAL VOC: the bits of an id, three at a time, are the high bits of red, green and blue."""
    colours = bytearray()
    for number in range(256):
        for channel in range(3):
            bits = [(number >> (3 * place + channel) & 1) << (7 - place) for place in range(3)]
            colours.append(sum(bits))
    return bytes(colours)


_VOC_PALETTE = _voc_palette()


def detections(
    answers: Mapping[str, Answer],
    spec: ModelSpec,
    placement: ImagePlacement,
    threshold: float | None,
    most: int | None,
    iou: float | None = None,
    masks: MaskForm = "rle",
) -> list[Detection]:
    """The objects in one sample, best first. Raises ModelFailed if a score or box is not a number, and InvalidRequest
    if there are too many masks.

    `answers` has the outputs that the spec declares, by name. `threshold`, `most` and `iou` (how much boxes of a class
    may overlap) default to the spec's. `masks` is the form of masks, if the spec declares some.
    """
    said = spec.detection
    assert said is not None, "a detector has this; this is a bug"
    if iou is not None:
        said = replace(said, iou_threshold=iou)
    threshold = said.threshold if threshold is None else threshold
    most = said.max_boxes if most is None else most
    values = {name: _one_sample(answer, spec, name) for name, answer in answers.items()}
    found = find_boxes(values, said, spec.activation, placement.window, threshold, most)
    placed = placement.boxes_on_picture(found.corners)
    rows = zip(placed.round(2).tolist(), found.classes.tolist(), _six_decimals(found.scores), strict=True)
    objects = [Detection(number, _label(spec, number), score, Box(*corners)) for corners, number, score in rows]
    if said.prototypes is not None and masks != "none":
        shapes = masks_of(values, said, found, placed, placement, masks)
        for one, (mask, polygons) in zip(objects, shapes, strict=True):
            one.mask, one.polygons = mask, polygons
    if said.keypoints:
        for one, points in zip(objects, keypoints_of(values, said, found, placement), strict=True):
            one.keypoints = points
    return objects


def _one_sample(answer: Answer, spec: ModelSpec, name: str) -> npt.NDArray[np.generic]:
    """One sample in the shape of its spec, without the batch dimension."""
    output = spec.outputs[spec.output_index(name)]
    of_sample = answer.shape[len(answer.shape) - len(output.shape) :]
    return np.frombuffer(answer.data, output.numpy_dtype).reshape(of_sample)


class Wanted(NamedTuple):
    """What a client wants to know about a picture.

    The best `top_k` classes or boxes (None: all) that reach `threshold`. Boxes of a class that overlap by more than
    `iou` are suppressed. `masks` is the form of their masks. `finish` converts the result further in the same thread.
    """

    answering: Answering
    top_k: int | None = None
    threshold: float | None = None
    iou: float | None = None
    masks: MaskForm = "rle"
    finish: Callable[[Any], Any] | None = None


class Answering(ABC):
    """One task. `key` is the name of its answer in documents; `is_long` means that reading needs a thread."""

    key: ClassVar[str]
    is_long: ClassVar[bool]

    @abstractmethod
    def outputs(self, spec: ModelSpec) -> tuple[int, ...]:
        """The indices of the outputs that the answer needs."""

    @abstractmethod
    def read(self, answers: Sequence[Answer], spec: ModelSpec, size: Extent, wanted: Wanted) -> Any:
        """Read the outputs for a picture of this upright size.

        Raises ModelFailed, InvalidRequest if it is too much for an answer, and what `wanted.finish` raises.
        """

    def working_bytes(self, spec: ModelSpec, size: Extent) -> int:
        """Estimate the memory that `read` takes beside the outputs; only called if `is_long`."""
        return 0


class _Classes(Answering):
    key, is_long = "predictions", False

    def outputs(self, spec: ModelSpec) -> tuple[int, ...]:
        return (0,)

    def read(self, answers: Sequence[Answer], spec: ModelSpec, size: Extent, wanted: Wanted) -> list[Prediction]:
        scores = np.frombuffer(answers[0].data, spec.outputs[0].numpy_dtype)
        return best_classes(scores, spec, wanted.top_k, wanted.threshold)


class _ClassMap(Answering):
    key, is_long = "segmentation", True

    def outputs(self, spec: ModelSpec) -> tuple[int, ...]:
        assert spec.segmentation is not None, "the spec has seen to it; this is a bug"
        return (spec.output_index(spec.segmentation.class_map),)

    def read(self, answers: Sequence[Answer], spec: ModelSpec, size: Extent, wanted: Wanted) -> Any:
        found: SegmentedPicture = segmented(answers[0], spec, _placement(size, spec))
        return found if wanted.finish is None else wanted.finish(found)

    def working_bytes(self, spec: ModelSpec, size: Extent) -> int:
        return rendering_bytes(_placement(size, spec))


class _Boxes(Answering):
    key, is_long = "detections", True

    def outputs(self, spec: ModelSpec) -> tuple[int, ...]:
        assert spec.detection is not None, "the spec has seen to it; this is a bug"
        return tuple([spec.output_index(name) for name in spec.detection.names])

    def read(self, answers: Sequence[Answer], spec: ModelSpec, size: Extent, wanted: Wanted) -> Any:
        assert spec.detection is not None, "the spec has seen to it; this is a bug"
        by_name = dict(zip(spec.detection.names, answers, strict=True))
        asked = wanted.threshold, wanted.top_k, wanted.iou, wanted.masks
        found = detections(by_name, spec, _placement(size, spec), *asked)
        return found if wanted.finish is None else wanted.finish(found)

    def working_bytes(self, spec: ModelSpec, size: Extent) -> int:
        # As far as the sizes of outputs are fixed.
        needed = 2 * sum(spec.outputs[index].sample_bytes or 0 for index in self.outputs(spec))
        said = spec.detection
        if said is None or said.prototypes is None:
            return needed
        return needed + masks_bytes(spec.outputs[spec.output_index(said.prototypes)].shape, size)


CLASSES, CLASS_MAP, BOXES = _Classes(), _ClassMap(), _Boxes()
ANSWERING: dict[Task, Answering] = {
    "classify": CLASSES,
    "multilabel": CLASSES,
    "segment": CLASS_MAP,
    "detect": BOXES,
}


def why_no_predictions(spec: ModelSpec) -> str | None:
    """Why a model cannot answer for pictures, as the rest of a sentence after its name; None if it can."""
    if spec.image is None:
        return "has no image preprocessing, so it cannot take images"
    return None if spec.task in ANSWERING else f"has the task {spec.task!r}, so the meaning of its outputs is unknown"


def _placement(size: Extent, spec: ModelSpec) -> ImagePlacement:
    assert spec.image is not None, "the route has checked it; this is a bug"
    return ImagePlacement.of(size, spec.image)
