"""The shapes as a data set for training: drawn, split, with boxes or masks as targets."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from convoy.models.checkpoint import PartRecord
from convoy.models.errors import JobError
from convoy.models.samples import Sample, content_sha256
from convoy.models.shapes.drawing import Picture, pictures
from convoy.models.shapes.shape_set import MOST_SHAPES, SHAPE_PARTS, SHAPES, named_set
from convoy.models.spec import ImageSpec
from convoy.models.tasks import Task
from convoy.models.train_options import parse_validation
from convoy.models.training.feed import Batch, surveyed
from convoy.models.training.split_data import SplitData, with_statistics

Progress = Callable[[int, int], None]


class DrawnFeed:
    """Pictures in memory: uint8 [n, px, px, 3]. `labels` are their targets, as the task's objective wants them."""

    def __init__(self, drawn: Sequence[Picture], task: Task) -> None:
        self._images = torch.from_numpy(np.stack([picture.pixels for picture in drawn]))
        self.labels = _boxes(drawn) if task == "detect" else _masks(drawn)

    def batches(self, order: Sequence[Tensor]) -> Iterator[Batch]:
        for chosen in order:
            yield self._images[chosen], self.labels[chosen]


def draw_split_data(
    dataset: str,
    labels: tuple[str, ...],
    task: Task,
    image: ImageSpec,
    *,
    is_settled: bool,
    validation: str | None,
    progress: Progress,
) -> SplitData:
    """All pictures of `shapes` or `shapes:N`, drawn. Of the training pictures the last, a share, are for `validation`.

    The mean and deviation of `image` are those of the training pictures unless they are fixed. Raises JobError if a
    part would be empty.
    """
    wanted = named_set(dataset)
    assert wanted is not None
    total = wanted.images("train") + wanted.images("val")
    drawn: list[Picture] = []
    for part in SHAPE_PARTS:
        for picture in pictures(wanted, part):
            drawn.append(picture)
            progress(len(drawn), total)
    share = 0.0 if validation is None else parse_validation(validation)
    assert isinstance(share, float)
    held = round(share * wanted.images("train"))
    learned = wanted.images("train") - held
    if learned < 1 or (validation is not None and held < 1):
        raise JobError(
            f"--validation {validation} of {wanted.images('train')} training pictures leaves {held} for validation "
            f"and {learned} to learn from; choose another share"
        )
    training, test = drawn[:learned], drawn[wanted.images("train") :]
    kept = drawn[learned : wanted.images("train")]
    split = {"train": _record(training), "test": _record(test)} | ({"validation": _record(kept)} if kept else {})
    return SplitData(
        dataset=dataset,
        labels=labels,
        image=image if is_settled else with_statistics(image, [surveyed(one.pixels) for one in training]),
        training=DrawnFeed(training, task),
        validation=DrawnFeed(kept, task) if kept else None,
        test=DrawnFeed(test, task),
        split=split,
        skipped=(),
        images_by_class=_images_by_class(training, task),
    )


def _boxes(drawn: Sequence[Picture]) -> Tensor:
    """Float32 [n, most shapes, 5]: class and corners; class -1 is padding."""
    targets = np.full((len(drawn), MOST_SHAPES, 5), -1, np.float32)
    for row, picture in zip(targets, drawn, strict=True):
        row[: len(picture.classes), 0] = picture.classes
        row[: len(picture.classes), 1:] = picture.boxes
    return torch.from_numpy(targets)


def _masks(drawn: Sequence[Picture]) -> Tensor:
    """Uint8 [n, px, px]."""
    return torch.from_numpy(np.stack([picture.mask for picture in drawn]))


def _record(drawn: Sequence[Picture]) -> PartRecord:
    samples = [
        Sample("", -1, hashlib.sha256(picture.pixels.tobytes()).hexdigest(), picture.pixels) for picture in drawn
    ]
    return PartRecord(len(drawn), content_sha256(samples))


def _images_by_class(drawn: Sequence[Picture], task: Task) -> tuple[int, ...]:
    """In how many pictures each class occurs."""
    occurs = np.zeros(len(SHAPES), np.int64)
    for picture in drawn:
        occurs[np.unique(picture.classes)] += 1
    counts = tuple(occurs.tolist())
    return counts if task == "detect" else (len(drawn), *counts)
