"""A data set as a network learns from it: read, split, measured, each part in batches.

The validation part chooses the best epoch: a share of the training images, chosen by content, or a folder of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from convoy.models.checkpoint import PartRecord
from convoy.models.datasets import load_folder
from convoy.models.errors import JobError
from convoy.models.samples import PARTS, Dataset, Sample, content_sha256, decode, refuse_broken
from convoy.models.spec import ImageSpec
from convoy.models.train_options import parse_validation
from convoy.models.training.feed import Feed, MemoryFeed, Survey, WorkerFeed, survey, surveyed


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What is left to learn from, and what is held out; `left_out` of the folder's images are in the data set, too."""

    training: Sequence[Sample]
    validation: Sequence[Sample]
    left_out: int = 0


def hold_out(dataset: Dataset, wanted: str | None) -> HeldOut:
    """The training part, and what `--validation` says. Raises UsageError, and JobError where a part has no image or the
    folder other classes."""
    samples = dataset.part("train")
    if wanted is None:
        return HeldOut(samples, ())
    choice = parse_validation(wanted)
    if isinstance(choice, Path):
        return _from_folder(dataset, choice)
    apart = [_is_apart(sample, choice) for sample in samples]
    training = tuple(sample for sample, is_apart in zip(samples, apart, strict=True) if not is_apart)
    validation = tuple(sample for sample, is_apart in zip(samples, apart, strict=True) if is_apart)
    if not training or not validation:
        raise JobError(
            f"--validation {wanted} of {len(samples)} training images leaves {len(validation)} for validation and "
            f"{len(training)} to learn from; choose another share"
        )
    return HeldOut(training, validation)


def _from_folder(dataset: Dataset, folder: Path) -> HeldOut:
    found = load_folder(folder).in_order_of(dataset.labels)
    samples = [sample for part in PARTS for sample in found.parts[part]]
    known = {sample.sha256 for part in PARTS for sample in dataset.parts[part]}
    validation = tuple(sample for sample in samples if sample.sha256 not in known)
    if not validation:
        raise JobError(f"all images of {folder} are in {dataset.name}, too; put others there, or pass a share")
    return HeldOut(dataset.part("train"), validation, len(samples) - len(validation))


def _is_apart(sample: Sample, share: float) -> bool:
    # Not the bits that chose the part: within one of them those are no longer evenly spread.
    return int(sample.sha256[-16:-8], 16) < share * 2**32


Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class SplitData:
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


class _ReadPart(NamedTuple):
    """`surveys` are of the images that are not broken, in order; nobody asked for them where they are None."""

    feed: Feed
    skipped: tuple[str, ...]
    surveys: list[Survey] | None


def read_split_data(
    dataset: Dataset, held_out: HeldOut, image: ImageSpec, is_settled: bool, workers: int, progress: Progress
) -> SplitData:
    """All images: decoded into memory, or where there are `workers` looked at once by them and decoded whenever they
    are due. The mean and deviation of `image` are those of the training images unless they are settled.

    Raises JobError when images are missing or broken.
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
        image=image if is_settled else _with_statistics(image, training.surveys or []),
        training=training.feed,
        validation=None if validation is None else validation.feed,
        test=test.feed,
        split=split_record(dataset, held_out),
        skipped=tuple(name for part in (training, validation, test) if part is not None for name in part.skipped),
    )


def _into_memory(samples: Sequence[Sample], image: ImageSpec, is_surveyed: bool, progress: Progress) -> _ReadPart:
    part = decode(samples, image, progress)
    # Image by image, because float64 of a whole data set would not fit.
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


def _with_statistics(image: ImageSpec, surveys: Sequence[Survey]) -> ImageSpec:
    """Mean and deviation per channel over all pixels; never 0, so that a blank channel does not divide by it."""
    mean = np.mean([one.mean for one in surveys], axis=0) / 255
    square = np.mean([one.square for one in surveys], axis=0) / 255**2
    std = np.sqrt(np.maximum(square - mean**2, 1e-6))
    return replace(image, mean=tuple(np.round(mean, 4).tolist()), std=tuple(np.round(std, 4).tolist()))
