"""Weights drawn at random, to test a graph. Knows layers; knows nothing of files and registries."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def draw(network: torch.nn.Module, run: Callable[[], object]) -> None:
    """Random weights under which no output is constant: the samples that `run` shows the network set the statistics.

    Fresh networks hide errors: ViT's head and class token start at zero, LayerScale at 1e-6, biases at 0, norms
    at 1, and a running variance of 1 lets the values of a deep network vanish or explode.
    """
    import torch

    with torch.inference_mode():
        for parameter in network.parameters():
            if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
                parameter.copy_(_in_place_of_constant(parameter))
        norms = [m for m in network.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # so that the statistics are those of these images, not of a moving average
            norm.train()
        run()
        for norm in norms:
            norm.eval()


def _in_place_of_constant(parameter: torch.Tensor) -> torch.Tensor:
    import torch

    value = float(parameter.flatten()[0])
    if value == 0:
        fan_in = math.prod(parameter.shape[1:]) if parameter.ndim > 1 else 100
        return torch.randn_like(parameter) / math.sqrt(fan_in)
    # The scale of a norm, or a LayerScale that would switch its branch off.
    return torch.empty_like(parameter).uniform_(0.5, 1.5) * (value if value > 1e-2 else 1)
