"""Depthwise separable networks whose channels differ in scale by three decades: the worst case for per-tensor INT8.

The layers are MobileNet's (Howard et al., 2017) with SiLU or Hardswish. Before each activation a channel is multiplied
by a random gain from 0.03 to 30, and divided by it afterwards. So a channel is anything from nearly linear to nearly a
ReLU, and the network learns like any other. `reparameterize` folds the gains into the normalisation before and the
convolution after, which leaves the function unchanged: then the channels themselves differ by three decades, as those
of published networks may (Nagel et al., Data-Free Quantization, 2019, section 3).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

_STEM = 32
_DECADES = 3.0


class GainedLayer(nn.Module):
    """A convolution, its normalisation and an activation whose channels have gains.

    float32 [N, inputs, H, W] -> [N, outputs, H / stride, W / stride]. `gains` is float32 [outputs].
    """

    def __init__(self, convolution: nn.Conv2d, activation: nn.Module) -> None:
        super().__init__()
        channels = convolution.out_channels
        self.convolution = convolution
        self.norm = nn.BatchNorm2d(channels)
        self.activation = activation
        powers = torch.linspace(-_DECADES / 2, _DECADES / 2, channels)[torch.randperm(channels)]
        self.register_buffer("gains", 10**powers)
        self.gains: Tensor
        self.is_folded = False

    def forward(self, images: Tensor) -> Tensor:
        values = self.norm(self.convolution(images))
        if self.is_folded:
            folded: Tensor = self.activation(values)
            return folded
        gains = self.gains[:, None, None]
        answer: Tensor = self.activation(values * gains) / gains
        return answer

    def fold(self, reader: nn.Conv2d | nn.Linear) -> None:
        """Fold the gains into the normalisation, and their inverses into the layers that read this one."""
        self.norm.weight.mul_(self.gains)
        self.norm.bias.mul_(self.gains)
        if isinstance(reader, nn.Conv2d) and reader.groups > 1:
            reader.weight.div_(self.gains[:, None, None, None])
        else:
            reader.weight.div_(self.gains.reshape(1, -1, *[1] * (reader.weight.ndim - 2)))
        self.is_folded = True


class WideRangeNet(nn.Module):
    """float32 [N, 3, 32, 32], normalised -> float32 logits [N, num_classes]."""

    def __init__(self, num_classes: int, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        layers: list[nn.Module] = [GainedLayer(_convolution(3, _STEM, 3, stride=2), activation())]
        inputs = _STEM
        # Outputs and stride of each pair of a depthwise and a 1x1 convolution.
        for outputs, stride in ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
            layers.append(GainedLayer(_convolution(inputs, inputs, 3, stride=stride, groups=inputs), activation()))
            layers.append(GainedLayer(_convolution(inputs, outputs, 1), activation()))
            inputs = outputs
        self.layers = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(inputs, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.pool(self.layers(images)).flatten(1))
        return logits

    @torch.no_grad()
    def reparameterize(self) -> None:
        """Fold all gains, so that the channels differ in scale without factors beside the activations."""
        layers = [layer for layer in self.layers if isinstance(layer, GainedLayer)]
        readers: list[nn.Conv2d | nn.Linear] = [*(layer.convolution for layer in layers[1:]), self.classifier]
        for layer, reader in zip(layers, readers, strict=True):
            if not layer.is_folded:
                layer.fold(reader)


def _convolution(inputs: int, outputs: int, kernel: int, *, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)


def wide_range_silu(num_classes: int = 10) -> nn.Module:
    """A freshly initialised `WideRangeNet` with SiLU."""
    return WideRangeNet(num_classes, nn.SiLU)


def wide_range_hardswish(num_classes: int = 10) -> nn.Module:
    """A freshly initialised `WideRangeNet` with Hardswish."""
    return WideRangeNet(num_classes, nn.Hardswish)
