"""Weights for a network: from a file that may come from anywhere, or drawn at random to test a graph.

Reads tensors and nothing else: safetensors, or torch's files with `weights_only`. Knows nothing of registries.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from export.sources.misfit import misfit
from models.errors import JobError

if TYPE_CHECKING:
    import torch


def load_file(network: torch.nn.Module, path: Path, *, by_name: bool) -> None:
    """Raises JobError when the file is not plain tensors, or listing what does not fit.

    Networks that are made `by_name` have as many outputs as there are labels.
    """
    weights = _without_prefix(_read(path))
    expected = network.state_dict()
    problem = misfit(
        {name: tuple(tensor.shape) for name, tensor in weights.items()},
        {name: tuple(tensor.shape) for name, tensor in expected.items()},
    )
    if problem is not None:
        advice = "; if only the classes are others, pass their --labels" if by_name else ""
        raise JobError(f"the weights in {path.name} do not fit the network: {problem}{advice}")
    network.load_state_dict(weights)


def _read(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load

        try:
            return load(path.read_bytes())
        except Exception as error:  # safetensors raises several kinds
            raise JobError(f"cannot read {path.name} as safetensors ({error}); check the file") from error
    import torch

    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a zip, pickle or storage error, by format; torch's advice is to trust the file
        raise JobError(f"{path.name} is not plain tensors; save the network's state_dict as safetensors") from error
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise JobError(f"{path.name} holds no state_dict; save model.state_dict() as safetensors")
    return found


def _without_prefix(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    # DataParallel names every tensor of the network it wraps "module.something".
    if all(name.startswith("module.") for name in weights):
        return {name.removeprefix("module."): tensor for name, tensor in weights.items()}
    return weights


def draw(network: torch.nn.Module, images: torch.Tensor) -> None:
    """Random weights under which no output is constant: float32 `images` [N, C, H, W] set the statistics.

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
        network(images)
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
