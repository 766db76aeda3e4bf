"""From a segmentation network's raw output to the class of each pixel of a picture, as a PNG or as run lengths."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

from convoy.app.engines.batch import Answer
from convoy.models.activation import ClassNumbers, class_numbers
from convoy.models.errors import InvalidRequest
from convoy.models.geometry import UNSEEN, ImagePlacement
from convoy.models.spec import ModelSpec

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
    class_map = placement.map_on_picture(_class_numbers(answer, spec))
    counts = np.array(Image.fromarray(class_map).histogram())  # numpy's would take eight bytes for each pixel
    shares = counts / class_map.size
    known = len(spec.labels)
    classes = [
        ClassShare(number, spec.labels[number] if number < known else None, float(shares[number]))
        for number in np.flatnonzero(counts[:UNSEEN]).tolist()
    ]
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
            f"the class map has {len(starts) + 1} runs, more than the {MAX_RUNS} that are answered as run lengths; "
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


def _class_numbers(answer: Answer, spec: ModelSpec) -> ClassNumbers:
    """One sample's map as the network gives it, [h, w]. Raises ModelFailed."""
    assert spec.segmentation is not None, "a segmenter has this; this is a bug"
    output = spec.outputs[spec.output_index(spec.segmentation.class_map)]
    values = np.frombuffer(answer.data, output.numpy_dtype).reshape(answer.shape[-len(output.shape) :])
    return class_numbers(values, spec.activation)


def _voc_palette() -> bytes:
    """The colours of PASCAL VOC: the bits of a number, three by three, are the upper ones of red, green, blue."""
    colours = bytearray()
    for number in range(256):
        for channel in range(3):
            bits = [(number >> (3 * place + channel) & 1) << (7 - place) for place in range(3)]
            colours.append(sum(bits))
    return bytes(colours)


_VOC_PALETTE = _voc_palette()
