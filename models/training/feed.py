"""Images in batches, in an order that is given, for whoever learns from them or measures.

Pixels are uint8 [n, H, W, C], labels int64 [n], both on the host. Knows nothing of epochs, networks or devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from convoy.models.samples import DecodedPart

Batch = tuple[Tensor, Tensor]


class Feed(Protocol):
    """`labels` are those of all images, in the order that the indices of a batch mean."""

    @property
    def labels(self) -> Tensor: ...

    def batches(self, order: Sequence[Tensor]) -> Iterator[Batch]:
        """One batch for each tensor of indices."""
        ...


class MemoryFeed:
    """Images that were decoded once and lie in memory."""

    def __init__(self, part: DecodedPart) -> None:
        self._images = torch.from_numpy(part.images)
        self.labels = torch.from_numpy(part.labels)

    def batches(self, order: Sequence[Tensor]) -> Iterator[Batch]:
        for chosen in order:
            yield self._images[chosen], self.labels[chosen]
