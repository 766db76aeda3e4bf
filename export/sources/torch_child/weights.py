"""Weights for a network: from a file that may come from anywhere, or drawn at random to test a graph.

Reads tensors and nothing else: safetensors, or torch's files with `weights_only`. Knows which entry of a file to take;
knows nothing of registries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from convoy.export.sources.misfit import misfit
from convoy.export.sources.torch_child import names
from convoy.export.sources.torch_child.foreign import load as load_foreign
from convoy.export.sources.torch_child.foreign import tensors_of_module
from convoy.export.sources.torch_job import some
from convoy.models.errors import JobError

if TYPE_CHECKING:
    import torch

# Where trainers put the weights that they were training, the ones first that say so most clearly.
_USUAL = (
    "state_dict",
    "model_state_dict",
    "model",
    "state_dict.model",
    "model.state_dict",
    "model.model_state_dict",
    "state_dict.state_dict",
    "net",
    "network",
    "weights",
)


class _Found(NamedTuple):
    """The tensors of a file, and what was chosen or left out to have them."""

    tensors: dict[str, torch.Tensor]
    said: list[str]


def load_file(network: torch.nn.Module, path: Path, *, by_name: bool, key: str | None = None) -> str:
    """Fill the network; what was chosen, changed and left out of the file for that, empty where it fits as it is.

    Raises JobError when the file is not plain tensors, or listing what does not fit. Networks that are made `by_name`
    have as many outputs as there are labels. `key` names the entry, with dots where it lies in others.
    """
    found = _read(path, key)
    expected = network.state_dict()
    weights, changes = names.fitted(found.tensors, expected)
    problem = misfit(
        {name: tuple(tensor.shape) for name, tensor in weights.items()},
        {name: tuple(tensor.shape) for name, tensor in expected.items()},
    )
    if problem is not None:
        advice = "; if only the classes are others, pass their --labels" if by_name else ""
        raise JobError(f"the weights in {path.name} do not fit the network: {problem}{advice}")
    network.load_state_dict(weights)
    whole = [] if found.said or not changes else [path.name]
    return "; ".join([*whole, *found.said, *changes])


def _read(path: Path, key: str | None) -> _Found:
    if path.suffix == ".safetensors":
        from safetensors.torch import load

        try:
            return _Found(load(path.read_bytes()), [])
        except Exception as error:  # safetensors raises several kinds
            raise JobError(f"cannot read {path.name} as safetensors ({error}); check the file") from error
    content, foreign = load_foreign(path)
    skipped = [f"objects of {some(foreign)} in it were not read"] if foreign else []
    own = _weights_of(content)
    if own is not None:
        if key is not None:
            raise JobError(
                f"{path.name} is one state_dict, in which there is no entry {key!r}; leave --weights-key out"
            )
        return _Found(own, [path.name, *skipped] if skipped else [])
    entries = dict(_entries(content))
    if not entries:
        among = f" (among objects of {some(foreign)}, which may run code and are not read)" if foreign else ""
        raise JobError(f"{path.name} holds no state_dict{among}; save model.state_dict() as safetensors")
    if key is not None and key not in entries:
        raise JobError(f"{path.name} has no weights under {key!r}; it has {some(list(entries))}")
    taken = key or next((usual for usual in _USUAL if usual in entries), next(iter(entries)))
    others = [name for name in entries if name != taken]
    return _Found(entries[taken], [_told(taken, others, path.name, is_asked_for=key is not None), *skipped])


def _told(taken: str, others: list[str], file: str, *, is_asked_for: bool) -> str:
    if not others:
        return f"{taken!r} of {file}"
    chosen = "as --weights-key says" if is_asked_for else "--weights-key takes another"
    return f"{taken!r} of {file}, which also has {some(others)}; {chosen}"


def _weights_of(value: Any) -> dict[str, torch.Tensor] | None:
    """The named tensors that the value is, or has if it is a network that was saved whole."""
    import torch

    if isinstance(value, dict):
        is_weights = bool(value) and all(isinstance(one, torch.Tensor) for one in value.values())
        return value if is_weights else None
    return dict(tensors_of_module(value)) or None


def _entries(found: Any, prefix: str = "", depth: int = 3) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Every set of named tensors in the file, by its keys with dots between them."""
    if not isinstance(found, dict) or depth == 0:
        return
    for key, value in found.items():
        if not isinstance(key, str):  # an optimiser numbers the parameters that it keeps averages of
            continue
        weights = _weights_of(value)
        # A set of scalars is some trainer's notes; a network's weights are never that alone.
        if weights is not None and any(tensor.ndim for tensor in weights.values()):
            yield f"{prefix}{key}", weights
        else:
            yield from _entries(value, f"{prefix}{key}.", depth - 1)


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
