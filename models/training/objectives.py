"""What a network learns: how targets follow a distortion, the loss, and how its answers are measured.

`convoy.models.fit` has the loop; it knows nothing of classes, boxes or masks.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from convoy.models.augment import distort


class Evaluation(NamedTuple):
    """`accuracy` is the objective's measure, from 0 to 1; `loss` is the mean over images, in float32."""

    accuracy: float
    loss: float


class Tally(Protocol):
    """Sums over the batches of one evaluation."""

    def add(self, outputs: Any, wanted: Tensor) -> None:
        """Count the answers of a network in evaluation mode."""
        ...

    def evaluation(self) -> Evaluation: ...


class Objective(Protocol):
    """Images are float [n, C, H, W] from 0 to 1; `wanted` is the batch of targets, [n, ...], on the same device."""

    def distorted(self, images: Tensor, wanted: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random changes that make other images of the same things. Numbers are drawn on the CPU."""
        ...

    def loss(self, outputs: Any, wanted: Tensor) -> Tensor:
        """The mean loss of a batch, a scalar."""
        ...

    def tally(self) -> Tally:
        """An empty tally."""
        ...


class Classes:
    """One class of several. `wanted` is int64 [n]; outputs are logits [n, C].

    `weight` has one loss factor per class. The measure is the fraction of images whose highest logit is at their label;
    the loss of an evaluation is plain cross-entropy.
    """

    def __init__(self, weight: Tensor | None, label_smoothing: float, *, mirror: bool) -> None:
        self._loss = nn.CrossEntropyLoss(weight, label_smoothing=label_smoothing)
        self._mirror = mirror

    def distorted(self, images: Tensor, wanted: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return distort(images, generator, mirror=self._mirror), wanted

    def loss(self, outputs: Any, wanted: Tensor) -> Tensor:
        if isinstance(outputs, Tensor):
            loss: Tensor = self._loss(outputs.float(), wanted)
            return loss
        # GoogLeNet and Inception also learn from auxiliary heads, which their named tuple names.
        loss = self._loss(outputs.logits.float(), wanted)
        for name, logits in outputs._asdict().items():
            if name != "logits" and logits is not None:
                # The weight of an auxiliary head's loss (Szegedy et al., 2014).
                loss = loss + 0.3 * self._loss(logits.float(), wanted)
        return loss

    def tally(self) -> Tally:
        return _RightOnes()


class _RightOnes:
    def __init__(self) -> None:
        self._images = 0
        self._right: Tensor | int = 0
        self._loss: Tensor | int = 0

    def add(self, outputs: Any, wanted: Tensor) -> None:
        # Sums stay on the device, which is waited for once, at the end.
        self._images += len(wanted)
        self._right = self._right + (outputs.argmax(1) == wanted).sum()
        self._loss = self._loss + functional.cross_entropy(outputs, wanted, reduction="sum").double()

    def evaluation(self) -> Evaluation:
        return Evaluation(float(self._right) / self._images, float(self._loss) / self._images)


def mirrored(count: int, generator: torch.Generator) -> Tensor:
    """Which of `count` images are mirrored left to right: every second one, bool [count]."""
    return torch.randint(2, (count,), generator=generator, dtype=torch.uint8).bool()


def mirror(images: Tensor, chosen: Tensor) -> Tensor:
    """Mirror the `chosen` of images or masks [n, ..., W] left to right."""
    chosen = chosen.to(images.device).reshape(-1, *[1] * (images.ndim - 1))
    return torch.where(chosen, images.flip(-1), images)
