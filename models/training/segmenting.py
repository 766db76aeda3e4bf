"""How `shapes_unet` learns masks: cross-entropy and Dice, measured by the mean IoU.

Source of the Dice loss: Milletari et al., V-Net, 2016. It is about regions, so a rare class counts as much as the
background.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from convoy.models.training.objectives import Evaluation, Tally, mirror, mirrored

# Most pixels are background and easy; with equal weights the network learns the classes late.
_BACKGROUND_WEIGHT = 0.2


class Masks:
    """`wanted` is uint8 [n, H, W], a class for each pixel; outputs are logits [n, C, H, W].

    The measure is the mean over classes of intersection over union, each over all pixels of all images.
    """

    def distorted(self, images: Tensor, wanted: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = mirrored(len(images), generator)
        return mirror(images, chosen), mirror(wanted, chosen)

    def loss(self, outputs: Any, wanted: Tensor) -> Tensor:
        logits, classes = outputs.float(), wanted.long()
        weight = torch.ones(logits.shape[1], device=logits.device)
        weight[0] = _BACKGROUND_WEIGHT
        return functional.cross_entropy(logits, classes, weight) + dice_loss(logits, classes)

    def tally(self) -> Tally:
        return _Pixels(self)


def dice_loss(logits: Tensor, classes: Tensor) -> Tensor:
    """1 - the mean Dice coefficient of the classes, from 0 to 1, over all pixels of a batch."""
    shares = logits.softmax(dim=1)
    is_class = functional.one_hot(classes, logits.shape[1]).movedim(-1, 1)
    over = (0, 2, 3)
    shared, sizes = (shares * is_class).sum(over), shares.sum(over) + is_class.sum(over)
    return 1 - ((2 * shared + 1) / (sizes + 1)).mean()


class _Pixels:
    """The confusion matrix of one evaluation."""

    def __init__(self, objective: Masks) -> None:
        self._objective = objective
        self._images, self._loss = 0, 0.0
        self._counts: Tensor | int = 0

    def add(self, outputs: Any, wanted: Tensor) -> None:
        self._images += len(wanted)
        self._loss += float(self._objective.loss(outputs, wanted)) * len(wanted)
        classes = outputs.shape[1]
        pairs = wanted.long() * classes + outputs.argmax(1)
        self._counts = self._counts + torch.bincount(pairs.flatten(), minlength=classes**2).reshape(classes, classes)

    def evaluation(self) -> Evaluation:
        assert isinstance(self._counts, Tensor), "no image was evaluated"
        shared = self._counts.diagonal().double()
        union = self._counts.sum(0) + self._counts.sum(1) - shared
        # A class that is nowhere, in no mask and no answer, has no IoU.
        mean_iou = (shared[union > 0] / union[union > 0]).mean()
        return Evaluation(float(mean_iou), self._loss / self._images)
