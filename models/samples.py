"""Labelled images and their split into train, calibration and test.

`convoy.models.datasets` reads them from their sources. A sample is always encoded bytes, so that everything that uses
it goes through `convoy.models.images`, the server's own code.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
from PIL import Image

from convoy.models.errors import ImageError, JobError
from convoy.models.image_files import read_image_file
from convoy.models.images import preprocess
from convoy.models.spec import ImageSpec

Part = Literal["train", "calibration", "test"]
PARTS: tuple[Part, ...] = get_args(Part)
Pixels = npt.NDArray[np.uint8]

TEST_PERCENT = 20
CALIBRATION_PERCENT = 10
MAX_BROKEN_FRACTION = 0.01
NO_OTHER_NAMES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Objects:
    """What an image shows: `boxes` float64 [n, 4] of (x1, y1, x2, y2) in its pixels, and `classes` int64 [n].

    `is_crowd` bool [n] marks regions with objects that are not counted one by one, or too difficult to count.

    Where they were asked for: `masks` has the run lengths of each object, as counts of pixels down the columns; and
    `keypoints` float64 [n, K, 3] x, y and whether the point is labelled, with the objects' `areas` float64 [n].
    """

    boxes: npt.NDArray[np.float64]
    classes: npt.NDArray[np.int64]
    is_crowd: npt.NDArray[np.bool_]
    masks: tuple[npt.NDArray[np.int64], ...] | None = None
    keypoints: npt.NDArray[np.float64] | None = None
    areas: npt.NDArray[np.float64] | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One labelled image. `content` is a file to read when needed, or uint8 pixels [H, W, 3] to encode.

    `label` is -1 without a class. `target` has the objects in the image, or is the file of its mask.

    `sha256` is over the file's bytes, or over the pixels if there is no file: the bytes of a PNG depend on the zlib
    that wrote it, and the split must not.
    """

    name: str
    label: int
    sha256: str
    content: Path | Pixels
    target: Objects | Path | None = None

    def encoded(self) -> bytes:
        """The image as it would arrive in a request. Raises ImageError if its file cannot be read."""
        if isinstance(self.content, Path):
            return read_image_file(self.content)
        return encode_png(self.content)


@dataclass(frozen=True, slots=True)
class Dataset:
    """Samples by part; the `label` of a sample, or the classes of its objects, are indices into `labels`."""

    name: str
    labels: tuple[str, ...]
    parts: Mapping[Part, Sequence[Sample]]

    def part(self, part: Part) -> Sequence[Sample]:
        """The samples of one part. Raises JobError if there are none."""
        if not self.parts[part]:
            raise JobError(f"data set {self.name} has no {part} images; add images or make the folder {part}/")
        return self.parts[part]

    def part_sha256(self, part: Part) -> str:
        """One hash over all images of a part, independent of their order."""
        return content_sha256(self.parts[part])

    def in_order_of(self, labels: Sequence[str], known_as: Mapping[str, str] = NO_OTHER_NAMES) -> Dataset:
        """The same samples with labels renumbered as indices into `labels`, matched by name.

        `known_as` maps class names here to names there, if they differ. `labels` may have more classes. Raises JobError
        if they lack one that is here.
        """
        unknown = self.unknown_to(labels, known_as)
        if unknown:
            raise JobError(
                f"data set {self.name} has classes unknown to the model: {some(unknown, 40)}; rename or remove them, "
                "or map them to the model's classes with --class-map"
            )
        place = {label: index for index, label in enumerate(labels)}
        # Unknown classes have no samples.
        index = np.array([place.get(known_as.get(label, label), -1) for label in self.labels], np.int64)
        parts = {part: tuple(_renumbered(sample, index) for sample in samples) for part, samples in self.parts.items()}
        return Dataset(self.name, tuple(labels), parts)

    def unknown_to(self, labels: Sequence[str], known_as: Mapping[str, str] = NO_OTHER_NAMES) -> list[str]:
        """The classes here that have samples or objects, and that `labels` lack."""
        used = {number for samples in self.parts.values() for sample in samples for number in _classes(sample)}
        names = [label for index, label in enumerate(self.labels) if index in used]
        return [label for label in names if known_as.get(label, label) not in labels]


def _classes(sample: Sample) -> Sequence[int]:
    if isinstance(sample.target, Objects):
        found: list[int] = np.unique(sample.target.classes).tolist()
        return found
    return () if sample.label < 0 else (sample.label,)


def _renumbered(sample: Sample, index: npt.NDArray[np.int64]) -> Sample:
    if isinstance(sample.target, Objects):
        return replace(sample, target=replace(sample.target, classes=index[sample.target.classes]))
    return sample if sample.label < 0 else replace(sample, label=int(index[sample.label]))


@dataclass(frozen=True, slots=True)
class DecodedPart:
    """`images` [N, ...] as the spec's front says, `labels` int64 [N], and the names of images that did not decode."""

    images: Pixels | npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]
    skipped: tuple[str, ...]


def decode(
    samples: Sequence[Sample], image: ImageSpec, progress: Callable[[int, int], None] = lambda done, total: None
) -> DecodedPart:
    """Decode all samples through `convoy.models.images`. Skips broken ones; raises JobError if more than 1 % are.

    `progress` is called with the number of images done and the total.
    """
    images = np.empty((len(samples), *image.tensor_shape), np.uint8 if image.front == "uint8_nhwc" else np.float32)
    labels: list[int] = []
    skipped: list[str] = []
    for done, sample in enumerate(samples, start=1):
        try:
            images[len(labels)] = preprocess(sample.encoded(), image)
            labels.append(sample.label)
        except ImageError:
            skipped.append(sample.name)
        progress(done, len(samples))
    refuse_broken(skipped, len(samples))
    return DecodedPart(images[: len(labels)], np.array(labels, np.int64), tuple(skipped))


def refuse_broken(names: Sequence[str], total: int) -> None:
    """Raise JobError if more than 1 % of the images are broken."""
    if len(names) > MAX_BROKEN_FRACTION * total:
        raise JobError(f"{len(names)} of {total} images cannot be read: {some(names)}; remove or repair them")


def content_sha256(samples: Sequence[Sample]) -> str:
    """One hash over all images, independent of their order."""
    return hashlib.sha256("".join(sorted(sample.sha256 for sample in samples)).encode()).hexdigest()


def split_by_content(samples: Sequence[Sample], test_percent: int = TEST_PERCENT) -> dict[Part, Sequence[Sample]]:
    """Assign each sample to a part by the sha256 of its image.

    The result is the same on every machine and in every order, does not change for existing images when others are
    added, and puts equal images into the same part, so nothing is evaluated on what it was trained or calibrated on.
    """
    places = split_by_hash([sample.sha256 for sample in samples], test_percent)
    return {part: tuple(samples[place] for place in members) for part, members in places.items()}


def split_by_hash(hashes: Sequence[str], test_percent: int = TEST_PERCENT) -> dict[Part, list[int]]:
    """The positions of the hashes (hexadecimal) that belong to each part."""
    parts: dict[Part, list[int]] = {part: [] for part in PARTS}
    for place, sha256 in enumerate(hashes):
        # The last bits, because image stores shard by the first, which would skew a shard's parts.
        percent = int(sha256[-8:], 16) % 100
        in_test, in_calibration = percent < test_percent, percent < test_percent + CALIBRATION_PERCENT
        parts["test" if in_test else "calibration" if in_calibration else "train"].append(place)
    return parts


def encode_png(pixels: Pixels) -> bytes:
    """uint8 [H, W, 3] as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


def some(names: Sequence[str], most: int = 5) -> str:
    """The first few names, for a message of one line."""
    shown = ", ".join(names[:most]) or "none"
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
