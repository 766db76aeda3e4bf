"""ResNet-18 and MobileNetV2 for images of 32 pixels: torchvision's networks, weights' names included.

ResNet-18 is as it is and halves 32 pixels to one. MobileNetV2's depthwise layers want to see more than that, so
one of its halvings is left out.

Sources: He et al., Deep Residual Learning, 2015; Sandler et al., MobileNetV2, 2018.
"""

from __future__ import annotations

from torch import nn
from torchvision.models import MobileNetV2, ResNet
from torchvision.models.resnet import BasicBlock

# (expansion, channels, blocks, stride) of each stage; the original's fourth has stride 2.
_STAGES = [
    [1, 16, 1, 1],
    [6, 24, 2, 2],
    [6, 32, 3, 2],
    [6, 64, 4, 1],
    [6, 96, 3, 1],
    [6, 160, 3, 2],
    [6, 320, 1, 1],
]


def resnet18(num_classes: int = 10) -> nn.Module:
    """float32 [N, 3, 32, 32], normalised -> float32 logits [N, num_classes]."""
    network: nn.Module = ResNet(BasicBlock, [2, 2, 2, 2], num_classes=num_classes)
    return network


def mobilenet_v2(num_classes: int = 10) -> nn.Module:
    """float32 [N, 3, 32, 32], normalised -> float32 logits [N, num_classes]."""
    network: nn.Module = MobileNetV2(num_classes=num_classes, inverted_residual_setting=_STAGES, dropout=0.0)
    return network
