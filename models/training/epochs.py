"""The record of a finished epoch. Plain data: it goes into logs, pages and the file of an unfinished run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """`epoch` counts from 1; `learning_rate` is that of its first step. Losses are means over images: for training
    images as in training, for validation images the objective's plain loss. `validation_accuracy` is the objective's
    measure, from 0 to 1.

    `epoch_s` is training alone, without validation. Fields are None without a validation part, or if the machine does
    not tell.
    """

    epoch: int
    learning_rate: float
    loss: float
    validation_loss: float | None
    validation_accuracy: float | None
    epoch_s: float
    images_per_s: float
    peak_memory_bytes: int | None
    energy_j: float | None

    def is_better_than(self, other: EpochRecord) -> bool:
        """Compare by validation accuracy, then loss; without a validation part the later epoch is better."""
        if self.validation_accuracy is None or other.validation_accuracy is None:
            return self.epoch > other.epoch
        mine = (self.validation_accuracy, -(self.validation_loss or 0.0))
        return mine > (other.validation_accuracy, -(other.validation_loss or 0.0))
