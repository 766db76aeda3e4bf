"""A data set as a network learns from it: read, split, measured, each part in batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from convoy.models.checkpoint import PartRecord
from convoy.models.samples import PARTS, Dataset, DecodedPart, Pixels, Sample, content_sha256, decode
from convoy.models.spec import ImageSpec
from convoy.models.training.feed import Feed, MemoryFeed
from convoy.models.training.held_out import HeldOut

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Lesson:
    """`image` has the mean and deviation by which the network is to see; `skipped` names broken images."""

    dataset: str
    labels: tuple[str, ...]
    image: ImageSpec
    training: Feed
    validation: Feed | None
    test: Feed
    split: dict[str, PartRecord]
    skipped: tuple[str, ...]

    @property
    def images_by_class(self) -> list[int]:
        """How many images of each class there are to learn from."""
        return torch.bincount(self.training.labels, minlength=len(self.labels)).tolist()


def read_lesson(dataset: Dataset, held_out: HeldOut, image: ImageSpec, is_settled: bool, progress: Progress) -> Lesson:
    """All images, decoded into memory. The mean and deviation of `image` are those of the training images unless they
    are settled. Raises JobError when images are missing or broken."""
    training = decode(held_out.training, image, progress)
    validation = decode(held_out.validation, image, progress) if held_out.validation else None
    test = decode(dataset.part("test"), image, progress)
    return Lesson(
        dataset=dataset.name,
        labels=dataset.labels,
        image=image if is_settled else _with_statistics(image, _pixels(training)),
        training=MemoryFeed(training),
        validation=None if validation is None else MemoryFeed(validation),
        test=MemoryFeed(test),
        split=split_record(dataset, held_out),
        skipped=tuple(name for part in (training, validation, test) if part is not None for name in part.skipped),
    )


def split_record(dataset: Dataset, held_out: HeldOut) -> dict[str, PartRecord]:
    """Which images were in which part."""
    parts: dict[str, Sequence[Sample]] = {part: dataset.parts[part] for part in PARTS}
    parts["train"] = held_out.training
    if held_out.validation:
        parts["validation"] = held_out.validation
    return {name: PartRecord(len(samples), content_sha256(samples)) for name, samples in parts.items()}


def _pixels(part: DecodedPart) -> Pixels:
    """The images of a part that was decoded with front "uint8_nhwc"."""
    return part.images.astype(np.uint8, copy=False)


def _with_statistics(image: ImageSpec, pixels: Pixels) -> ImageSpec:
    """Mean and deviation per channel over all pixels; never 0, so that a blank channel does not divide by it."""
    # Image by image, because float64 of a whole data set would not fit.
    mean = np.mean([sample.mean(axis=(0, 1)) for sample in pixels], axis=0) / 255
    square = np.mean([np.square(sample, dtype=np.float64).mean(axis=(0, 1)) for sample in pixels], axis=0) / 255**2
    std = np.sqrt(np.maximum(square - mean**2, 1e-6))
    return replace(image, mean=tuple(np.round(mean, 4).tolist()), std=tuple(np.round(std, 4).tolist()))
