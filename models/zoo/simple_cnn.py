"""The classic small CNN of CIFAR tutorials: two convolutions, two poolings, one linear layer."""

from __future__ import annotations

from torch import Tensor, nn


class SimpleCNN(nn.Module):
    """float32 [N, 3, 32, 32], normalised -> float32 logits [N, num_classes]."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        # Without padding 32 -> 30 -> 15 -> 13 -> 6, which gives the 32 * 6 * 6 features of the linear layer.
        self.conv1 = nn.Conv2d(3, 16, kernel_size=3)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(2)
        self.classifier = nn.Linear(32 * 6 * 6, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.pool(self.relu(self.conv1(images)))
        features = self.pool(self.relu(self.conv2(features)))
        logits: Tensor = self.classifier(features.flatten(1))
        return logits


def simple_cnn(num_classes: int = 10) -> nn.Module:
    """A freshly initialised `SimpleCNN`."""
    return SimpleCNN(num_classes)
