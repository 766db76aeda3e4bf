"""Checkpoints as trainers leave them, by name, all of one network with weights that no other one has by chance.

Knows torch's files and their habits. Knows nothing of what export makes of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from convoy.export.matrix.made import networks
from convoy.export.matrix.made.originals import trained, write_networks, write_truth

Weights = Mapping[str, Tensor]
Maker = Callable[[nn.Module, Weights, Path], object]
# What is not called `.pth`, where the name tells how it is read.
_SUFFIXES = {"safetensors": ".safetensors", "half_safetensors": ".safetensors"}


def with_prefix(prefix: str, weights: Weights) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in weights.items()}


def without_counters(weights: Weights) -> dict[str, Tensor]:
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
    state = with_prefix("model.", weights) | {"criterion.weight": torch.ones(networks.CLASSES)}
    hyper_parameters = argparse.Namespace(learning_rate=0.1, folder=Path("runs"))
    torch.save(
        {"epoch": 9, "global_step": 90, "state_dict": state, "hyper_parameters": hyper_parameters, "callbacks": {}},
        path,
    )


def _cut_off(network: nn.Module, weights: Weights, path: Path) -> None:
    torch.save(dict(weights), path)
    path.write_bytes(path.read_bytes()[:-1000])


def _torchscript(network: nn.Module, weights: Weights, path: Path) -> None:
    torch.jit.trace(network, torch.rand(1, 3, 32, 32)).save(path)  # type: ignore[no-untyped-call]


def _saved(change: Callable[[Weights], Any], **options: Any) -> Maker:
    return lambda network, weights, path: torch.save(change(weights), path, **options)


_ARGUMENTS = argparse.Namespace(lr=0.1, epochs=90, out=Path("runs"))
MAKERS: dict[str, Maker] = {
    "state_dict": _saved(dict),
    "safetensors": lambda network, weights, path: save_file(dict(weights), path),
    "half_safetensors": lambda network, weights, path: save_file({n: t.half() for n, t in weights.items()}, path),
    "old_format": _saved(dict, _use_new_zipfile_serialization=False),
    "net": _saved(lambda weights: {"net": dict(weights), "acc": 91.5, "epoch": 10}),
    "state_dict_inside": _saved(lambda weights: {"state_dict": dict(weights), "epoch": 10}),
    "namespace": _saved(lambda weights: {"model": dict(weights), "args": _ARGUMENTS, "epoch": 3}),
    "numpys_numbers": _saved(lambda weights: {"model": dict(weights), "best": np.float64(0.91), "epoch": 3}),
    "average_beside": _saved(
        lambda weights: {"model": {n: t * 0 for n, t in weights.items()}, "model_ema": dict(weights)}
    ),
    "data_parallel": _saved(lambda weights: with_prefix("module.", weights)),
    "compiled": _saved(lambda weights: with_prefix("_orig_mod.", weights)),
    "compiled_in_parallel": _saved(lambda weights: with_prefix("module._orig_mod.", weights)),
    "any_prefix": _saved(lambda weights: with_prefix("backbone.encoder.", weights)),
    "lightning": _lightning,
    "averaged_model": _averaged,
    "pruned": _pruned,
    "no_counters": _saved(without_counters),
    "whole_network": lambda network, weights, path: torch.save(network, path),
    "two_networks": _saved(lambda weights: with_prefix("student.", weights) | with_prefix("teacher.", weights)),
    "other_classes": _saved(
        lambda weights: dict(weights) | {"head.2.weight": torch.ones(7, 8), "head.2.bias": torch.ones(7)}
    ),
    "half_of_it": _saved(lambda weights: dict(list(weights.items())[:3])),
    "no_weights": _saved(lambda weights: {"epoch": 3, "args": _ARGUMENTS}),
    "torchscript": _torchscript,
    "cut_off": _cut_off,
}


def write(name: str, folder: Path) -> str:
    """The checkpoint `name` of `residual`, the file of the factories and the truth; the checkpoint's file name."""
    network = trained("residual")
    file = f"{name}{_SUFFIXES.get(name, '.pth')}"
    MAKERS[name](network, network.state_dict(), folder / file)
    if name == "half_safetensors":  # the file has no others, so these are the weights now
        network.half().float()
    write_networks(folder)
    write_truth(network, folder)
    return file
