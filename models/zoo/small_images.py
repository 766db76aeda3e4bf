"""torchvision's networks for images of 32 pixels, with the same weight names.

The originals are for 224 pixels and halve them five times, which would leave too little of 32 pixels for the last
layers; so one downsampling step is left out. ResNet-18 is unchanged. EfficientNet, RegNet, ConvNeXt and DenseNet are
smaller than published, so that a CPU trains them in minutes.

Sources: He et al., Deep Residual Learning, 2015; Sandler et al., MobileNetV2, 2018; Howard et al., Searching for
MobileNetV3, 2019; Tan and Le, EfficientNet, 2019; Radosavovic et al., Designing Network Design Spaces, 2020; Liu et
al., A ConvNet for the 2020s, 2022; Huang et al., Densely Connected Convolutional Networks, 2016.
"""

from __future__ import annotations

from functools import partial
from typing import cast

from torch import nn
from torchvision.models import ConvNeXt, DenseNet, EfficientNet, MobileNetV2, MobileNetV3, RegNet, ResNet
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.efficientnet import MBConvConfig
from torchvision.models.mobilenetv3 import InvertedResidualConfig
from torchvision.models.regnet import BlockParams
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
# (input, kernel, expanded, output, squeeze-and-excitation, activation, stride) of MobileNetV3-Large; the original's
# seventh has stride 2.
_LARGE_V3 = (
    (16, 3, 16, 16, False, "RE", 1),
    (16, 3, 64, 24, False, "RE", 2),
    (24, 3, 72, 24, False, "RE", 1),
    (24, 5, 72, 40, True, "RE", 2),
    (40, 5, 120, 40, True, "RE", 1),
    (40, 5, 120, 40, True, "RE", 1),
    (40, 3, 240, 80, False, "HS", 1),
    (80, 3, 200, 80, False, "HS", 1),
    (80, 3, 184, 80, False, "HS", 1),
    (80, 3, 184, 80, False, "HS", 1),
    (80, 3, 480, 112, True, "HS", 1),
    (112, 3, 672, 112, True, "HS", 1),
    (112, 5, 672, 160, True, "HS", 2),
    (160, 5, 960, 160, True, "HS", 1),
    (160, 5, 960, 160, True, "HS", 1),
)
# (expansion, kernel, stride, input, output, blocks) of EfficientNet-B0; the original's fourth has stride 2.
_B0 = (
    (1, 3, 1, 32, 16, 1),
    (6, 3, 2, 16, 24, 2),
    (6, 5, 2, 24, 40, 2),
    (6, 3, 1, 40, 80, 3),
    (6, 5, 1, 80, 112, 3),
    (6, 5, 2, 112, 192, 4),
    (6, 3, 1, 192, 320, 1),
)


def resnet18(num_classes: int = 10) -> nn.Module:
    """float32 [N, 3, 32, 32], normalised -> float32 logits [N, num_classes]."""
    network: nn.Module = ResNet(BasicBlock, [2, 2, 2, 2], num_classes=num_classes)
    return network


def mobilenet_v2(num_classes: int = 10) -> nn.Module:
    """float32 [N, 3, 32, 32], normalised -> float32 logits [N, num_classes]."""
    network: nn.Module = MobileNetV2(num_classes=num_classes, inverted_residual_setting=_STAGES, dropout=0.0)
    return network


def mobilenet_v3(num_classes: int = 10) -> nn.Module:
    """MobileNetV3-Large: float32 [N, 3, 32, 32], normalised -> float32 logits [N, num_classes]."""
    blocks = [InvertedResidualConfig(*row, 1, 1.0) for row in _LARGE_V3]
    # A tenth of this is the published momentum, for running means over thousands of steps; here there are far fewer.
    norm = partial(nn.BatchNorm2d, eps=0.001, momentum=0.1)
    network: nn.Module = MobileNetV3(blocks, 1280, num_classes=num_classes, dropout=0.0, norm_layer=norm)
    return network


def efficientnet_b0(num_classes: int = 10) -> nn.Module:
    """EfficientNet-B0, half as wide: float32 [N, 3, 32, 32], normalised -> float32 logits [N, num_classes]."""
    blocks = [MBConvConfig(*row, width_mult=0.5, depth_mult=1.0) for row in _B0]
    network: nn.Module = EfficientNet(blocks, dropout=0.0, stochastic_depth_prob=0.0, num_classes=num_classes)
    return network


def regnet(num_classes: int = 10) -> nn.Module:
    """A RegNetY of 24 to 152 channels: float32 [N, 3, 32, 32], normalised -> float32 logits [N, num_classes]."""
    blocks = BlockParams.from_init_params(depth=10, w_0=24, w_a=20.0, w_m=2.3, group_width=8, se_ratio=0.25)
    network = RegNet(blocks, num_classes=num_classes, stem_width=24)
    network.stem[0].stride = (1, 1)
    return cast("nn.Module", network)


def convnext(num_classes: int = 10) -> nn.Module:
    """A ConvNeXt of 32 to 256 channels, with patches of 2 x 2 pixels.

    float32 [N, 3, 32, 32], normalised -> float32 logits [N, num_classes].
    """
    blocks = [
        CNBlockConfig(32, 64, 1),
        CNBlockConfig(64, 128, 1),
        CNBlockConfig(128, 256, 3),
        CNBlockConfig(256, None, 1),
    ]
    network = ConvNeXt(blocks, num_classes=num_classes, layer_scale=1.0)
    network.features[0][0] = nn.Conv2d(3, 32, kernel_size=2, stride=2)
    # The published weights begin at 0.02 and blocks at a millionth, for wide layers and hundreds of epochs. Layers with
    # as few inputs as here would pass nothing on and learn nothing in a few epochs.
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="linear")
    return cast("nn.Module", network)


def densenet(num_classes: int = 10) -> nn.Module:
    """A DenseNet of three blocks, in which each layer reads the outputs of all layers before it.

    float32 [N, 3, 32, 32], normalised -> float32 logits [N, num_classes].
    """
    network = DenseNet(16, (4, 6, 8), num_init_features=32, bn_size=2, num_classes=num_classes)
    network.features.pool0 = nn.Identity()
    return cast("nn.Module", network)
