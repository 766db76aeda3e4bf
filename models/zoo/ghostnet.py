"""GhostNet for small images: half of each layer's channels are made from the other half by depthwise convolutions.

Source of the method: Han et al., GhostNet: More Features from Cheap Operations, 2020. The blocks are the original's,
with one downsampling step fewer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# (kernel, expanded, outputs, squeeze-and-excitation, stride) of each block.
_BLOCKS = (
    (3, 32, 32, False, 1),
    (3, 48, 32, False, 2),
    (3, 80, 32, False, 1),
    (5, 80, 48, True, 2),
    (5, 128, 48, True, 1),
    (3, 240, 80, False, 1),
    (3, 208, 80, False, 1),
    (3, 480, 112, True, 1),
    (3, 672, 112, True, 1),
    (5, 672, 160, True, 2),
    (5, 960, 160, False, 1),
    (5, 960, 160, True, 1),
)
_STEM, _LAST = 32, 960


class GhostModule(nn.Module):
    """A 1x1 convolution for half of the outputs, and a depthwise 3x3 convolution that makes the other half from them.

    float32 [N, inputs, H, W] -> [N, outputs, H, W]; `outputs` is even.
    """

    def __init__(self, inputs: int, outputs: int, *, relu: bool) -> None:
        super().__init__()
        half = outputs // 2
        self.primary = _layer(inputs, half, 1, relu=relu)
        self.cheap = _layer(half, half, 3, groups=half, relu=relu)

    def forward(self, images: Tensor) -> Tensor:
        primary = self.primary(images)
        return torch.cat([primary, self.cheap(primary)], dim=1)


class SqueezeExcite(nn.Module):
    """Scale each channel by a factor from 0 to 1, computed from the whole image (Hu et al., 2018)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        squeezed = max(8, channels // 4)
        self.factors = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, squeezed, 1),
            nn.ReLU(),
            nn.Conv2d(squeezed, channels, 1),
            nn.Hardsigmoid(),
        )

    def forward(self, images: Tensor) -> Tensor:
        scaled: Tensor = images * self.factors(images)
        return scaled


class GhostBottleneck(nn.Module):
    """Two ghost modules, with a depthwise convolution for downsampling in between, and a residual connection."""

    def __init__(self, inputs: int, kernel: int, expanded: int, outputs: int, excites: bool, stride: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [GhostModule(inputs, expanded, relu=True)]
        if stride > 1:
            layers.append(_layer(expanded, expanded, kernel, groups=expanded, stride=stride, relu=False))
        if excites:
            layers.append(SqueezeExcite(expanded))
        layers.append(GhostModule(expanded, outputs, relu=False))
        self.layers = nn.Sequential(*layers)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                _layer(inputs, inputs, kernel, groups=inputs, stride=stride, relu=False),
                _layer(inputs, outputs, 1, relu=False),
            )

    def forward(self, images: Tensor) -> Tensor:
        summed: Tensor = self.layers(images) + self.shortcut(images)
        return summed


class GhostNet(nn.Module):
    """float32 [N, 3, 32, 32], normalised -> float32 logits [N, num_classes]."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = [_layer(3, _STEM, 3, stride=2, relu=True)]
        inputs = _STEM
        for kernel, expanded, outputs, excites, stride in _BLOCKS:
            layers.append(GhostBottleneck(inputs, kernel, expanded, outputs, excites, stride))
            inputs = outputs
        layers.append(_layer(inputs, _LAST, 1, relu=True))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(_LAST, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.pool(self.features(images)).flatten(1))
        return logits


def _layer(inputs: int, outputs: int, kernel: int, *, groups: int = 1, stride: int = 1, relu: bool) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), *([nn.ReLU()] if relu else []))


def ghostnet(num_classes: int = 10) -> nn.Module:
    """A freshly initialised `GhostNet`."""
    return GhostNet(num_classes)
