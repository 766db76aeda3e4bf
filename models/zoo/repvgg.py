"""RepVGG for small images: three parallel branches in training, one plain convolution in inference.

Source of the method: Ding et al., RepVGG: Making VGG-style ConvNets Great Again, 2021. The branches are linear, so
`reparameterize` can add them up into one kernel; the network's function stays the same.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

_STEM = 32


class RepVGGBlock(nn.Module):
    """float32 [N, inputs, H, W] -> [N, outputs, H / stride, W / stride]."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.stride = stride
        self.wide: nn.Module | None = _way(inputs, outputs, 3, stride)
        self.narrow: nn.Module | None = _way(inputs, outputs, 1, stride)
        self.straight: nn.Module | None = nn.BatchNorm2d(inputs) if inputs == outputs and stride == 1 else None
        self.fused: nn.Conv2d | None = None
        self.relu = nn.ReLU()

    def forward(self, images: Tensor) -> Tensor:
        if self.fused is not None:
            answer: Tensor = self.relu(self.fused(images))
            return answer
        ways = [way(images) for way in (self.wide, self.narrow, self.straight) if way is not None]
        summed: Tensor = self.relu(sum(ways[1:], ways[0]))
        return summed

    @torch.no_grad()
    def reparameterize(self) -> None:
        """Replace the three branches by one 3x3 convolution, as they are in evaluation mode."""
        if self.fused is not None:
            return
        assert isinstance(self.wide, nn.Sequential)
        assert isinstance(self.narrow, nn.Sequential)
        kernel, bias = _folded(self.wide)
        one_by_one, more = _folded(self.narrow)
        kernel, bias = kernel + functional.pad(one_by_one, [1, 1, 1, 1]), bias + more
        outputs, inputs = kernel.shape[:2]
        if isinstance(self.straight, nn.BatchNorm2d):
            identity = torch.zeros_like(kernel)
            identity[range(outputs), range(outputs), 1, 1] = 1
            straight, more = _normalised(identity, self.straight)
            kernel, bias = kernel + straight, bias + more
        self.fused = nn.Conv2d(inputs, outputs, 3, stride=self.stride, padding=1)
        self.fused.load_state_dict({"weight": kernel, "bias": bias})
        self.fused.train(self.training)
        self.wide = self.narrow = self.straight = None


def _way(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


def _folded(way: nn.Sequential) -> tuple[Tensor, Tensor]:
    """Kernel and bias of a convolution and its normalisation in one."""
    convolution, norm = way
    assert isinstance(convolution, nn.Conv2d)
    assert isinstance(norm, nn.BatchNorm2d)
    return _normalised(convolution.weight, norm)


def _normalised(kernel: Tensor, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Kernel and bias of a convolution with this kernel followed by this normalisation, in evaluation mode."""
    assert norm.running_var is not None
    assert norm.running_mean is not None
    factor = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    return kernel * factor[:, None, None, None], norm.bias - norm.running_mean * factor


class RepVGG(nn.Module):
    """float32 [N, 3, 32, 32], normalised -> float32 logits [N, num_classes]."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        blocks, inputs = [RepVGGBlock(3, _STEM)], _STEM
        # Channels and blocks of each stage; the first block of each halves the image.
        for outputs, count in ((48, 2), (96, 3), (160, 3)):
            for block in range(count):
                blocks.append(RepVGGBlock(inputs, outputs, stride=1 if block else 2))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(inputs, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.pool(self.blocks(images)).flatten(1))
        return logits


def repvgg(num_classes: int = 10) -> nn.Module:
    """A freshly initialised `RepVGG`."""
    return RepVGG(num_classes)
