"""Checkpoints in the forms that trainers write, by name: each maker writes the weights of a network to a file."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Weights = Mapping[str, Tensor]
Maker = Callable[[nn.Module, Weights, Path], object]


def _with_prefix(prefix: str, weights: Weights) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in weights.items()}


def _without_counters(weights: Weights) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in weights.items() if not name.endswith("num_batches_tracked")}


def _pruned(network: nn.Module, weights: Weights, path: Path) -> None:
    """Leaves the network pruned, too, as its trainer had it."""
    from torch.nn.utils import prune

    for module in [one for one in network.modules() if isinstance(one, (nn.Conv2d, nn.Linear))]:
        prune.l1_unstructured(module, "weight", amount=0.3)  # type: ignore[no-untyped-call]
    torch.save({"state_dict": network.state_dict()}, path)
    for module in [one for one in network.modules() if isinstance(one, (nn.Conv2d, nn.Linear))]:
        prune.remove(module, "weight")  # type: ignore[no-untyped-call]


def _averaged(network: nn.Module, weights: Weights, path: Path) -> None:
    from torch.optim.swa_utils import AveragedModel

    torch.save(AveragedModel(network).state_dict(), path)


def _lightning(network: nn.Module, weights: Weights, path: Path) -> None:
    state = _with_prefix("model.", weights) | {"criterion.weight": torch.ones(5)}
    hyper_parameters = argparse.Namespace(learning_rate=0.1, folder=Path("runs"))
    torch.save(
        {"epoch": 9, "global_step": 90, "state_dict": state, "hyper_parameters": hyper_parameters, "callbacks": {}},
        path,
    )


def _saved(change: Callable[[Weights], Any]) -> Maker:
    return lambda network, weights, path: torch.save(change(weights), path)


_ARGUMENTS = argparse.Namespace(lr=0.1, epochs=90, out=Path("runs"))
MAKERS: dict[str, Maker] = {
    "state_dict": _saved(dict),
    "net": _saved(lambda weights: {"net": dict(weights), "acc": 91.5, "epoch": 10}),
    "namespace": _saved(lambda weights: {"model": dict(weights), "args": _ARGUMENTS, "epoch": 3}),
    "compiled_in_parallel": _saved(lambda weights: _with_prefix("module._orig_mod.", weights)),
    "lightning": _lightning,
    "averaged_model": _averaged,
    "pruned": _pruned,
    "no_counters": _saved(_without_counters),
    "whole_network": lambda network, weights, path: torch.save(network, path),
}
