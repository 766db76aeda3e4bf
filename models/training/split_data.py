"""A data set prepared for training: read, split, measured, each part in batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from convoy.models.checkpoint import PartRecord
from convoy.models.samples import PARTS, Dataset, Sample, content_sha256, decode, refuse_broken
from convoy.models.spec import ImageSpec
from convoy.models.training.feed import Feed, MemoryFeed, Survey, WorkerFeed, survey, surveyed
from convoy.models.training.held_out import HeldOut

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class SplitData:
    """`image` has the mean and deviation that the network uses; `skipped` names broken images. `images_by_class` counts
    the training images in which each class occurs.
    """

    dataset: str
    labels: tuple[str, ...]
    image: ImageSpec
    training: Feed
    validation: Feed | None
    test: Feed
    split: dict[str, PartRecord]
    skipped: tuple[str, ...]
    images_by_class: tuple[int, ...]


class _ReadPart(NamedTuple):
    """`surveys` are those of the valid images, in order; None if they were not needed."""

    feed: Feed
    skipped: tuple[str, ...]
    surveys: list[Survey] | None


def read_split_data(
    dataset: Dataset, held_out: HeldOut, image: ImageSpec, is_settled: bool, workers: int, progress: Progress
) -> SplitData:
    """All images: decoded into memory or, with `workers`, checked by them now and decoded when needed. The mean and
    deviation of `image` are those of the training images unless they are fixed.

    Raises JobError if images are missing or broken.
    """

    def read(samples: Sequence[Sample], is_surveyed: bool) -> _ReadPart:
        if workers:
            return _through_workers(samples, image, workers, progress)
        return _into_memory(samples, image, is_surveyed, progress)

    training = read(held_out.training, not is_settled)
    validation = read(held_out.validation, False) if held_out.validation else None
    test = read(dataset.part("test"), False)
    return SplitData(
        dataset=dataset.name,
        labels=dataset.labels,
        image=image if is_settled else with_statistics(image, training.surveys or []),
        training=training.feed,
        validation=None if validation is None else validation.feed,
        test=test.feed,
        split=split_record(dataset, held_out),
        skipped=tuple(name for part in (training, validation, test) if part is not None for name in part.skipped),
        images_by_class=tuple(torch.bincount(training.feed.labels, minlength=len(dataset.labels)).tolist()),
    )


def _into_memory(samples: Sequence[Sample], image: ImageSpec, is_surveyed: bool, progress: Progress) -> _ReadPart:
    part = decode(samples, image, progress)
    # Image by image, because float64 of a whole data set would not fit into memory.
    surveys = [surveyed(pixels) for pixels in part.images.astype(np.uint8, copy=False)] if is_surveyed else None
    return _ReadPart(MemoryFeed(part), part.skipped, surveys)


def _through_workers(samples: Sequence[Sample], image: ImageSpec, workers: int, progress: Progress) -> _ReadPart:
    good: list[Sample] = []
    surveys: list[Survey] = []
    skipped: list[str] = []
    for sample, one in zip(samples, survey(samples, image, workers), strict=True):
        if one is None:
            skipped.append(sample.name)
        else:
            good.append(sample)
            surveys.append(one)
        progress(len(good) + len(skipped), len(samples))
    refuse_broken(skipped, len(samples))
    return _ReadPart(WorkerFeed(good, image, workers), tuple(skipped), surveys)


def split_record(dataset: Dataset, held_out: HeldOut) -> dict[str, PartRecord]:
    """Which images were in which part."""
    parts: dict[str, Sequence[Sample]] = {part: dataset.parts[part] for part in PARTS}
    parts["train"] = held_out.training
    if held_out.validation:
        parts["validation"] = held_out.validation
    return {name: PartRecord(len(samples), content_sha256(samples)) for name, samples in parts.items()}


def with_statistics(image: ImageSpec, surveys: Sequence[Survey]) -> ImageSpec:
    """Mean and deviation per channel over all pixels; never 0, so that a constant channel does not divide by zero."""
    mean = np.mean([one.mean for one in surveys], axis=0) / 255
    square = np.mean([one.square for one in surveys], axis=0) / 255**2
    std = np.sqrt(np.maximum(square - mean**2, 1e-6))
    return replace(image, mean=tuple(np.round(mean, 4).tolist()), std=tuple(np.round(std, 4).tolist()))
