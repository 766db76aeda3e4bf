"""The images of an export: one set to calibrate on, another to evaluate on, and a few to compare outputs with.

Knows which part of a data set each flag means and keeps the two apart. Images stay encoded until they are
needed and pass through `convoy.models.images` in chunks, so a large set does not have to fit into memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from convoy.export.plan import ExportPlan
from convoy.export.progress import Step
from convoy.models.bundle import DatasetRecord
from convoy.models.datasets import load, source_labels
from convoy.models.errors import ImageError, JobError
from convoy.models.images import preprocess
from convoy.models.samples import MAX_BROKEN_FRACTION, Dataset, Part, Sample, some
from convoy.models.spec import NUMPY_DTYPES, ImageSpec

# Ranges settle within a few hundred images; more of them cost time and change nothing.
_CALIBRATION_IMAGES = 512
_SAMPLES, _SAMPLES_AT_ONCE = 64, 8
_SAMPLES_BYTES = 64 << 20
_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Chunk:
    """`images` [n, ...] as the spec's front says, and `labels` int64 [n], indices into the model's labels.

    `positions` int64 [n] are the images' places in their set, which has gaps where some do not decode.
    """

    images: np.ndarray
    labels: np.ndarray
    positions: np.ndarray


@dataclass(frozen=True, slots=True)
class ImageSet:
    """Encoded images and how they become inputs; `source` is the data set as given, without its folder.

    `labels` are the model's, which the samples' labels point into; empty where the classes are others.
    """

    source: str
    samples: tuple[Sample, ...]
    image: ImageSpec
    labels: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        return len(self.samples)

    @property
    def record(self) -> DatasetRecord:
        hashes = sorted(sample.sha256 for sample in self.samples)
        return DatasetRecord(self.source, len(hashes), hashlib.sha256("".join(hashes).encode()).hexdigest())

    @property
    def key(self) -> str:
        """A hash over contents, order, labels and preprocessing: equal keys give equal chunks."""
        content = "".join(f"{sample.sha256}:{sample.label};" for sample in self.samples)
        return hashlib.sha256(f"{self.image}{self.labels}{content}".encode()).hexdigest()

    def chunks(self, step: Step, limit: int) -> Iterator[Chunk]:
        """All images in order, at most `limit` and about 16 MB at a time.

        Images that do not decode are left out; more than 1 % of them is a JobError.
        """
        shape, dtype = self.image.tensor_shape, NUMPY_DTYPES[self.image.tensor_dtype]
        size = max(1, min(limit, _CHUNK_BYTES // (int(np.prod(shape)) * dtype.itemsize)))
        broken: list[str] = []
        for start in range(0, len(self.samples), size):
            images, labels, positions = [], [], []
            for position, sample in enumerate(self.samples[start : start + size], start):
                try:
                    images.append(preprocess(sample.encoded(), self.image))
                    labels.append(sample.label)
                    positions.append(position)
                except ImageError:
                    broken.append(sample.name)
            step.advance(len(self.samples[start : start + size]))
            if images:
                yield Chunk(np.stack(images), np.array(labels, np.int64), np.array(positions, np.int64))
        if len(broken) > MAX_BROKEN_FRACTION * len(self.samples):
            raise JobError(
                f"{len(broken)} of {len(self.samples)} images of {self.source} cannot be read: {some(broken)}; "
                "remove or repair them"
            )

    def thinned(self, most: int) -> ImageSet:
        """At most so many of the images, evenly spread, because folders are in the order of their classes."""
        if len(self.samples) <= most:
            return self
        picked = np.linspace(0, len(self.samples) - 1, most).astype(int)
        return replace(self, samples=tuple(self.samples[index] for index in picked))


@dataclass(frozen=True, slots=True)
class RandomImages:
    """Noise in the place of images: it shows that two graphs compute the same, and nothing about accuracy."""

    count: int
    image: ImageSpec
    source: str = "random numbers"
    labels: tuple[str, ...] = ()

    @property
    def record(self) -> DatasetRecord:
        return DatasetRecord(self.source, self.count, hashlib.sha256(self.source.encode()).hexdigest())

    @property
    def key(self) -> str:
        return hashlib.sha256(f"{self.source}{self.count}{self.image}".encode()).hexdigest()

    def chunks(self, step: Step, limit: int) -> Iterator[Chunk]:
        """All of it, at most `limit` at a time."""
        samples = self.samples()
        for start in range(0, self.count, limit):
            images = samples[start : start + limit]
            step.advance(len(images))
            yield Chunk(images, np.zeros(len(images), np.int64), np.arange(start, start + len(images)))

    def thinned(self, most: int) -> RandomImages:
        """At most so many."""
        return replace(self, count=min(self.count, most))

    def samples(self) -> np.ndarray:
        """The same numbers each time: bytes, or values as normalised pixels have them."""
        generator = np.random.default_rng(0)
        shape = (self.count, *self.image.tensor_shape)
        if self.image.front == "uint8_nhwc":
            return generator.integers(0, 256, shape, dtype=np.uint8)
        mean, std = (np.array(values, np.float32)[:, None, None] for values in (self.image.mean, self.image.std))
        normalised: np.ndarray = (generator.random(shape, dtype=np.float32) - mean) / std
        return normalised


# What a network can be shown, a chunk at a time. `labels` is empty where the images have none of the model's.
Images = ImageSet | RandomImages


@dataclass(frozen=True, slots=True)
class ExportData:
    """`samples` are inputs [n, ...] to compare outputs on; `real` tells images from random numbers."""

    calibration: Images | None
    evaluation: ImageSet | None
    samples: np.ndarray
    real: bool


def load_data(plan: ExportPlan, step: Step) -> ExportData:
    """Load what `--calibrate` and `--evaluate` name.

    Raises UsageError for an unknown data set, JobError when it is empty or broken, when its classes are not
    the model's, or when the two sets share an image.
    """
    names = {name for name in (plan.asked.calibrate, plan.asked.evaluate) if name is not None}
    datasets = {name: load(name, plan.asked.data_root) for name in sorted(names)}
    evaluation = calibration = held_out = None
    if plan.asked.evaluate is not None:
        held_out = evaluation = _part(
            datasets[plan.asked.evaluate].in_order_of(plan.labels, plan.classes_known_as),
            plan.asked.evaluate,
            "test",
            plan,
        )
    if plan.asked.calibrate is not None:
        dataset = datasets[plan.asked.calibrate]
        if {plan.classes_known_as.get(label, label) for label in dataset.labels} <= set(plan.labels):
            dataset = dataset.in_order_of(plan.labels, plan.classes_known_as)
        calibration = _part(dataset, plan.asked.calibrate, "calibration", plan).thinned(_CALIBRATION_IMAGES)
        if held_out is None and dataset.parts["test"]:
            held_out = _part(dataset, plan.asked.calibrate, "test", plan)
    if calibration and evaluation:
        _refuse_shared(calibration, evaluation)
    sample_bytes = int(np.prod(plan.image.tensor_shape)) * NUMPY_DTYPES[plan.image.tensor_dtype].itemsize
    noise = RandomImages(max(2, min(_SAMPLES, _SAMPLES_BYTES // sample_bytes)), plan.image)
    shown = calibration or (noise if plan.asked.allow_random_calibration else None)
    if held_out is None:
        return ExportData(shown, evaluation, noise.samples(), real=False)
    return ExportData(shown, evaluation, _decoded(held_out.thinned(noise.count), step), real=True)


def _part(dataset: Dataset, source: str, part: Part, plan: ExportPlan) -> ImageSet:
    shown = source if source_labels(source) else Path(source).resolve().name
    labels = plan.labels if dataset.labels == plan.labels else ()
    return ImageSet(shown, tuple(dataset.part(part)), plan.image, labels)


def _refuse_shared(calibration: ImageSet, evaluation: ImageSet) -> None:
    seen = {sample.sha256 for sample in calibration.samples}
    shared = [sample.name for sample in evaluation.samples if sample.sha256 in seen]
    if shared:
        raise JobError(
            f"{len(shared)} images are both calibrated and evaluated on: {some(shared)}; "
            "remove them from one of the two sets"
        )


def _decoded(images: ImageSet, step: Step) -> np.ndarray:
    step.expect(images.count)
    chunks: Sequence[Chunk] = list(images.chunks(step, _SAMPLES_AT_ONCE))
    if not chunks:
        raise JobError(f"no image of {images.source} can be read; repair the data set")
    return np.concatenate([chunk.images for chunk in chunks])
