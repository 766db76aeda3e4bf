"""What is known of an epoch once it is over. Plain data: it goes into logs, pages and the file of an unfinished run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """`epoch` counts from 1; `learning_rate` is that of its first step. Losses are means over images, the training
    images' as the network learns from it, the validation images' plain cross-entropy; accuracy is a fraction.

    `epoch_s` is learning alone, without the validation. None where there is no validation part, or the machine does not
    tell.
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
        """By validation accuracy, then by validation loss; without a validation part the later epoch is better."""
        if self.validation_accuracy is None or other.validation_accuracy is None:
            return self.epoch > other.epoch
        mine = (self.validation_accuracy, -(self.validation_loss or 0.0))
        return mine > (other.validation_accuracy, -(other.validation_loss or 0.0))
