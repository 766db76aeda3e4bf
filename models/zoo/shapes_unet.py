"""A small U-Net: each pixel's class, from what is around it and from the picture's fine detail.

Source: Ronneberger et al., U-Net, 2015; with batch normalisation and padding, and strides instead of pools.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def _block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class _Up(nn.Module):
    """Twice the size, joined with what the way down had at that size."""

    def __init__(self, below: int, beside: int, outputs: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(below, outputs, 2, stride=2)
        self.join = _block(outputs + beside, outputs)

    def forward(self, below: Tensor, beside: Tensor) -> Tensor:
        joined: Tensor = self.join(torch.cat([self.up(below), beside], dim=1))
        return joined


class ShapesUNet(nn.Module):
    """float32 [N, 3, H, W], normalised, H and W multiples of 32 -> float32 logits [N, num_classes, H, W].

    Class 0 is the background.
    """

    def __init__(self, num_classes: int = 5) -> None:
        super().__init__()
        self.down2 = _block(3, 12, 2)
        self.down4 = _block(12, 24, 2)
        self.down8 = nn.Sequential(_block(24, 40, 2), _block(40, 40))
        self.down16 = nn.Sequential(_block(40, 56, 2), _block(56, 56))
        self.down32 = _block(56, 56, 2)
        self.up16 = _Up(56, 56, 36)
        self.up8 = _Up(36, 40, 40)
        self.up4 = _Up(40, 24, 24)
        self.up2 = _Up(24, 12, 12)
        # Features at full size would cost more than all the rest.
        self.classifier = nn.ConvTranspose2d(12, num_classes, 2, stride=2)

    def forward(self, images: Tensor) -> Tensor:
        by2 = self.down2(images)
        by4 = self.down4(by2)
        by8 = self.down8(by4)
        by16 = self.down16(by8)
        up8 = self.up8(self.up16(self.down32(by16), by16), by8)
        logits: Tensor = self.classifier(self.up2(self.up4(up8, by4), by2))
        return logits


def shapes_unet(num_classes: int = 5) -> nn.Module:
    """A freshly initialised `ShapesUNet`."""
    return ShapesUNet(num_classes)
