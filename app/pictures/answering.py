"""How a picture's outputs become an answer: the classes, the class of each pixel, or the boxes; one row per task.

Knows which outputs a task needs, whether reading them is short, and what reads them. Knows no wire.
"""

from __future__ import annotations

import io
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from convoy.app.engines.batch import Answer
from convoy.models.activation import NAN, ClassNumbers, activate, class_numbers
from convoy.models.boxes import find_boxes
from convoy.models.errors import InvalidRequest, ModelFailed
from convoy.models.geometry import UNSEEN, Extent, ImagePlacement
from convoy.models.spec import ModelSpec
from convoy.models.tasks import Task

_FEW_IN = 20  # a share of the classes that is cheaper to find than to sort


@dataclass(slots=True)  # not frozen, which would take five times as long to make
class Prediction:
    """One class and its score; the label is None where the model has none for it."""

    class_id: int
    label: str | None
    score: float


def best_classes(
    logits: np.ndarray, spec: ModelSpec, top_k: int | None, threshold: float | None = None
) -> list[Prediction]:
    """The `top_k` classes of one sample, or all, best first, ties by class number; none that scores below `threshold`.

    `logits` is the sample's output, flattened. Raises ModelFailed when a score is not a number.
    """
    scores = _scores(logits.astype(np.float32, copy=False), spec)
    order = _best(scores, top_k)
    if threshold is not None:
        order = order[scores[order] >= threshold]
    found = zip(order.tolist(), scores[order].tolist(), strict=True)
    return [Prediction(number, _label(spec, number), score) for number, score in found]


def _label(spec: ModelSpec, number: int) -> str | None:
    return spec.labels[number] if number < len(spec.labels) else None


def _best(scores: np.ndarray, top_k: int | None) -> np.ndarray:
    """Class numbers, as `best_classes` has them. Raises ModelFailed."""
    negated, count = -scores, len(scores)
    if top_k is None or _FEW_IN * top_k > count:
        order: np.ndarray = negated.argsort(kind="stable")  # behind all others comes what is not a number
        if count and math.isnan(scores[order[-1]]):
            raise ModelFailed(NAN)
        return order[:top_k]
    if math.isnan(np.minimum.reduce(scores)):
        raise ModelFailed(NAN)
    # Of many the few that count are found without sorting the others; equals of the last one stay in their order.
    among: np.ndarray = (negated <= np.partition(negated, top_k - 1)[top_k - 1]).nonzero()[0]
    best: np.ndarray = among[negated[among].argsort(kind="stable")][:top_k]
    return best


class RankedClasses(NamedTuple):
    """The best classes of each sample of a batch: numbers int32 [samples, k], scores float32 [samples, k].

    `is_nan` [samples]: a score of the sample is not a number, so none of them counts.
    """

    class_ids: np.ndarray
    scores: np.ndarray
    is_nan: np.ndarray


def best_classes_of_batch(outputs: np.ndarray, spec: ModelSpec, top_k: int) -> RankedClasses:
    """What `best_classes` gives for each row of [samples, values], to the last bit, all at once."""
    scores = _scores(outputs.astype(np.float32, copy=False), spec)
    is_nan = np.isnan(scores).any(axis=1)
    if _FEW_IN * top_k > scores.shape[1] or is_nan.any():
        order = (-scores).argsort(axis=1, kind="stable")[:, :top_k]
    else:
        order = np.array([_best(row, top_k) for row in scores]).reshape(-1, top_k)
    return RankedClasses(order.astype(np.int32), np.take_along_axis(scores, order, axis=1), is_nan)


def _scores(outputs: np.ndarray, spec: ModelSpec) -> np.ndarray:
    """One a class, along the last axis.

    A single output with two labels is the second's score, and what it lacks to one the first's.
    """
    if not spec.is_binary or spec.activation == "softmax":
        return activate(outputs, spec.activation)
    if spec.activation == "sigmoid":
        # Not one minus it: of a score near one, nothing would be left of the other.
        return activate(np.concatenate([-outputs, outputs], axis=-1), "sigmoid")
    return np.concatenate([1 - outputs, outputs], axis=-1)


# Noise would have a run for nearly every pixel: some 10 MB of JSON, and as much again while it is written.
MAX_RUNS = 500_000


@dataclass(slots=True)
class ClassShare:
    """One class that occurs in a class map; the label is None where the model has none for it.

    `share` is that of all pixels of the picture, from 0 to 1.
    """

    class_id: int
    label: str | None
    share: float


@dataclass(slots=True)
class SegmentedPicture:
    """The class of each pixel of the picture, uint8 [height, width], 255 where the network was not shown it.

    `classes` are those that occur, by their number. Their shares and `unseen_share` come to 1.
    """

    class_map: ClassNumbers
    classes: list[ClassShare]
    unseen_share: float


def segmented(answer: Answer, spec: ModelSpec, placement: ImagePlacement) -> SegmentedPicture:
    """One sample's class map, on the picture that it was made of. Raises ModelFailed."""
    assert spec.segmentation is not None, "a segmenter has this; this is a bug"
    of_input = class_numbers(_one_sample(answer, spec, spec.segmentation.class_map), spec.activation)
    class_map = placement.map_on_picture(of_input)
    counts = np.array(Image.fromarray(class_map).histogram())  # numpy's would take eight bytes for each pixel
    shares = counts / class_map.size
    occurring = np.flatnonzero(counts[:UNSEEN]).tolist()
    classes = [ClassShare(number, _label(spec, number), float(shares[number])) for number in occurring]
    return SegmentedPicture(class_map, classes, float(shares[UNSEEN]))


def rendering_bytes(placement: ImagePlacement) -> int:
    """About how much memory it takes to read a map as large as the input, to place it on the picture and to write it
    out; less than it took to decode the picture."""
    (width, height), (input_width, input_height) = placement.picture, placement.window
    return 4 * width * height + 12 * input_width * input_height


def palette_png(class_map: ClassNumbers) -> bytes:
    """A PNG whose pixel values are the class numbers, coloured by the palette of PASCAL VOC."""
    image = Image.fromarray(class_map)
    image.putpalette(_VOC_PALETTE)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def run_lengths(class_map: ClassNumbers, class_ids: Sequence[int]) -> list[list[int]]:
    """Of each class the counts of COCO's uncompressed run lengths.

    The pixels are read column by column from the left, each from the top. The first count is of pixels that are not of
    the class, and may be 0; then they alternate, and together they are height * width.

    Raises InvalidRequest where there are too many runs for an answer.
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
    return [_counts(starts[of_run == number], ends[of_run == number], values.size) for number in class_ids]


def _counts(starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], pixels: int) -> list[int]:
    edges = np.empty(2 * len(starts) + 1, np.int64)
    edges[0:-1:2], edges[1:-1:2], edges[-1] = starts, ends, pixels
    counts: list[int] = np.diff(edges, prepend=0).tolist()
    return counts if counts[-1] else counts[:-1]


def _voc_palette() -> bytes:
    """The colours of PASCAL VOC: the bits of a number, three by three, are the upper ones of red, green, blue."""
    colours = bytearray()
    for number in range(256):
        for channel in range(3):
            bits = [(number >> (3 * place + channel) & 1) << (7 - place) for place in range(3)]
            colours.append(sum(bits))
    return bytes(colours)


_VOC_PALETTE = _voc_palette()


@dataclass(slots=True)
class Detection:
    """One object: (x1, y1, x2, y2) in pixels of the picture, from its upper left corner, to hundredths.

    The label is None where the model has none for the class.
    """

    box: tuple[float, float, float, float]
    class_id: int
    label: str | None
    score: float


def detections(
    answers: Mapping[str, Answer], spec: ModelSpec, placement: ImagePlacement, threshold: float | None, most: int | None
) -> list[Detection]:
    """One sample's objects, best first. Raises ModelFailed where a score or a box of those is not a number.

    `answers` has the outputs that the spec declares, by name; `threshold` and `most` None are as it declares.
    """
    said = spec.detection
    assert said is not None, "a detector has this; this is a bug"
    threshold = said.threshold if threshold is None else threshold
    most = said.max_boxes if most is None else most
    values = {name: _one_sample(answer, spec, name) for name, answer in answers.items()}
    found = find_boxes(values, said, spec.activation, placement.window, threshold, most)
    placed = placement.boxes_on_picture(found.corners).round(2).tolist()
    return [
        Detection((x1, y1, x2, y2), number, _label(spec, number), score)
        for (x1, y1, x2, y2), number, score in zip(placed, found.classes.tolist(), found.scores.tolist(), strict=True)
    ]


def _one_sample(answer: Answer, spec: ModelSpec, name: str) -> npt.NDArray[np.generic]:
    """As its spec's shape says, without the batch dimension."""
    output = spec.outputs[spec.output_index(name)]
    of_sample = answer.shape[len(answer.shape) - len(output.shape) :]
    return np.frombuffer(answer.data, output.numpy_dtype).reshape(of_sample)


class Wanted(NamedTuple):
    """What is asked of a picture: by the version's task, and what else the task's answers depend on.

    The best `top_k` classes or boxes, or all for None, of those that reach `threshold`. `finish` makes of what was
    found what the asker needs, where that takes as long as reading does.
    """

    answering: Answering
    top_k: int | None = None
    threshold: float | None = None
    finish: Callable[[Any], Any] | None = None


class Answering(ABC):
    """One task. `key` is what documents call its answer; `is_long`: for a thread, and not for the event loop."""

    key: ClassVar[str]
    is_long: ClassVar[bool]

    @abstractmethod
    def outputs(self, spec: ModelSpec) -> tuple[int, ...]:
        """Those that are needed, by their index."""

    @abstractmethod
    def read(self, answers: Sequence[Answer], spec: ModelSpec, size: Extent, wanted: Wanted) -> Any:
        """What they say of a picture of this upright size. Raises ModelFailed, and what `wanted.finish` raises."""

    def working_bytes(self, spec: ModelSpec, size: Extent) -> int:
        """About how much memory `read` takes beside the outputs; only asked of one that is long."""
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

    def read(self, answers: Sequence[Answer], spec: ModelSpec, size: Extent, wanted: Wanted) -> list[Detection]:
        assert spec.detection is not None, "the spec has seen to it; this is a bug"
        by_name = dict(zip(spec.detection.names, answers, strict=True))
        return detections(by_name, spec, _placement(size, spec), wanted.threshold, wanted.top_k)

    def working_bytes(self, spec: ModelSpec, size: Extent) -> int:
        # As far as the outputs' sizes are fixed.
        return 2 * sum(spec.outputs[index].sample_bytes or 0 for index in self.outputs(spec))


CLASSES, CLASS_MAP, BOXES = _Classes(), _ClassMap(), _Boxes()
ANSWERING: dict[Task, Answering] = {
    "classify": CLASSES,
    "multilabel": CLASSES,
    "segment": CLASS_MAP,
    "detect": BOXES,
}


def why_no_predictions(spec: ModelSpec) -> str | None:
    """Why a model answers nothing to a picture, in words that go on from its name; None where it does."""
    if spec.image is None:
        return "has no image preprocessing, so it cannot take images"
    return None if spec.task in ANSWERING else f"has the task {spec.task!r}, so the meaning of its outputs is unknown"


def _placement(size: Extent, spec: ModelSpec) -> ImagePlacement:
    assert spec.image is not None, "the route has checked it; this is a bug"
    return ImagePlacement.of(size, spec.image)
