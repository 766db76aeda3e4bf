"""A small anchor-free detector, for pictures of 160x160 and objects of 16 pixels and more.

A backbone halves the picture five times; two steps upwards bring what is large to the grid of 8 pixels, whose every
cell answers with one box and the score of each class.

Sources: Tian et al., FCOS, 2019 (a box as its four distances from a cell); Lin et al., Feature Pyramid Networks, 2017.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

STRIDE_PX = 8
# The share of cells with an object that the network expects at its start (Lin et al., Focal Loss, 2017).
_PRIOR = 0.01


def _block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class ShapesDetector(nn.Module):
    """float32 [N, 3, H, W], normalised, H and W multiples of 32.

    For inference the answer is `detections`, float32 [N, 4 + C, K]: centre, width and height in pixels of the input,
    and C scores from 0 to 1, for each of K = H/8 * W/8 cells, row by row. For training it is float32 [N, 4 + C, H/8,
    W/8]: the logarithm of the distances of the left, top, right and bottom side in cells, and C logits.
    """

    def __init__(self, num_classes: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(_block(3, 16, 2), _block(16, 24, 2))
        self.cells8 = nn.Sequential(_block(24, 48, 2), _block(48, 48))
        self.cells16 = _block(48, 64, 2)
        self.cells32 = _block(64, 64, 2)
        self.from32 = nn.Conv2d(64, 64, 1)
        self.join16 = _block(64, 48)
        self.join8 = _block(48, 48)
        self.boxes = nn.Sequential(_block(48, 48), nn.Conv2d(48, 4, 1))
        last = nn.Conv2d(48, num_classes, 1)
        assert last.bias is not None
        nn.init.constant_(last.bias, -math.log(1 / _PRIOR - 1))
        self.scores = nn.Sequential(_block(48, 48), last)

    def forward(self, images: Tensor) -> Tensor | dict[str, Tensor]:
        cells8 = self.cells8(self.stem(images))
        cells16 = self.cells16(cells8)
        above = functional.interpolate(self.from32(self.cells32(cells16)), scale_factor=2.0, mode="nearest")
        above = functional.interpolate(self.join16(cells16 + above), scale_factor=2.0, mode="nearest")
        cells = self.join8(cells8 + above)
        boxes, scores = self.boxes(cells), self.scores(cells)
        if self.training:
            return torch.cat([boxes, scores], dim=1)
        return {"detections": torch.cat([centred(boxes), scores.sigmoid().flatten(2)], dim=1)}


def corners(distances: Tensor) -> Tensor:
    """The sides of boxes from float [N, 4, h, w], logarithms of distances in cells.

    The result is float [N, 4, h * w]: x1, y1, x2, y2 in pixels of the input.
    """
    height, width = distances.shape[2:]
    x = torch.arange(width, device=distances.device, dtype=distances.dtype) + 0.5
    y = torch.arange(height, device=distances.device, dtype=distances.dtype) + 0.5
    # Untrained weights would overflow.
    cells = distances.clamp(-6, 6).exp()
    left, top, right, bottom = cells.unbind(1)
    sides = (x - left, y[:, None] - top, x + right, y[:, None] + bottom)
    return torch.stack(sides, dim=1).flatten(2) * STRIDE_PX


def centred(distances: Tensor) -> Tensor:
    """The same as centre, width and height in pixels, float [N, 4, h * w]."""
    first, last = corners(distances).chunk(2, dim=1)
    return torch.cat([(first + last) / 2, last - first], dim=1)


def shapes_detector(num_classes: int = 4) -> nn.Module:
    """A freshly initialised `ShapesDetector`."""
    return ShapesDetector(num_classes)
