"""The validation part: images that are not trained on and choose the best epoch.

Either a share of the training images, chosen by content as the parts are, or a separate folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from convoy.models.datasets import load_folder
from convoy.models.errors import JobError
from convoy.models.samples import PARTS, Dataset, Sample
from convoy.models.train_options import parse_validation


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The training images and the validation images; `left_out` images of the folder are also in the data set."""

    training: Sequence[Sample]
    validation: Sequence[Sample]
    left_out: int = 0


def hold_out(dataset: Dataset, wanted: str | None) -> HeldOut:
    """Split as `--validation` says. Raises UsageError, and JobError if a part is empty or has other classes."""
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
        raise JobError(f"all images of {folder} are also in {dataset.name}; use other images, or pass a share")
    return HeldOut(dataset.part("train"), validation, len(samples) - len(validation))


def _is_apart(sample: Sample, share: float) -> bool:
    # Not the bits that chose the part: within a part those are not evenly distributed.
    return int(sample.sha256[-16:-8], 16) < share * 2**32
