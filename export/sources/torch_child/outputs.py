"""How a network is called, and its outputs as tensors by name: a tensor, a dict, a tuple, or nested ones.

    a tensor [N, classes]            logits
    any other tensor                 output
    a dict, a dataclass              its keys; out, aux
    a tuple or a list                output0, output1, ...; a named tuple's own names
    one inside another               features.0, heads.boxes

None is ignored.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from convoy.export.sources.layouts import outputs_read
from convoy.export.sources.torch_job import LOGITS, OUTPUT
from convoy.models.errors import JobError
from convoy.models.samples import some
from convoy.models.tasks import Layout


def call(network: torch.nn.Module, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> Any:
    """The network's own answer; several inputs are passed by the names of `forward()`. Raises JobError."""
    if len(tensors) == 1:
        return network(tensors[0])
    return network(**dict(zip(names, tensors, strict=True)))


def check_names(network: torch.nn.Module, names: Sequence[str], *, is_program: bool) -> None:
    """Raise JobError if several inputs are not named as the parameters of `forward()`."""
    if len(names) == 1 or is_program:
        return
    parameters = inspect.signature(network.forward).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return
    known = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    needed = [one.name for one in parameters if one.name in known and one.default is one.empty]
    if not set(needed) <= set(names) <= set(known):
        raise JobError(
            f"the network's forward() takes {some(known)}, and the inputs are {some(list(names))}; rename the inputs"
        )


def named(output: Any, inputs: Sequence[str]) -> dict[str, torch.Tensor]:
    """The tensors by name, none with a name of `inputs`. Raises JobError if there are none, or other values."""
    found: dict[str, torch.Tensor] = {}
    for path, one in _leaves(output, ""):
        if not isinstance(one, torch.Tensor):
            where = f" in {path!r}" if path else ""
            raise JobError(
                f"the network returns a {type(one).__name__}{where}; it must return tensors [N, ...], or dicts, tuples "
                "and lists of them"
            )
        found[f"{path}_out" if path in inputs else path] = one
    if not found:
        raise JobError("the network returns nothing; it must return tensors [N, ...]")
    if set(found) in ({""}, {f"{OUTPUT}0"}):
        (tensor,) = found.values()
        return {(LOGITS if tensor.ndim == 2 else OUTPUT): tensor}
    return found


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if value is None:
        return
    if isinstance(value, Mapping):
        items = [(str(key), one) for key, one in value.items()]
    elif hasattr(value, "_fields"):
        items = list(zip(value._fields, value, strict=True))
    elif dataclasses.is_dataclass(value):
        items = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    elif isinstance(value, tuple | list):
        items = [(f"{index}" if path else f"{OUTPUT}{index}", one) for index, one in enumerate(value)]
    else:
        yield path, value
        return
    for key, one in items:
        yield from _leaves(one, f"{path}.{key}" if path else key)


class NotBatchedError(JobError):
    """The network cannot take several samples at once; one may work."""


def of_one(output: Any, inputs: Sequence[str]) -> dict[str, torch.Tensor]:
    """The tensors by name of a network that got a single sample, each [1, ...]; those without a row get one.

    For a list of one dict, as detectors return, the names are the dict's. Raises JobError as `named` does.
    """
    if isinstance(output, torch.Tensor):
        row = output if output.ndim and len(output) == 1 else output[None]
        return {(LOGITS if row.ndim == 2 else OUTPUT): row}
    alone = output[0] if isinstance(output, list) and len(output) == 1 and isinstance(output[0], Mapping) else output
    found = named(alone, inputs)
    if alone is output:
        return {name: one if one.ndim and len(one) == 1 else one[None] for name, one in found.items()}
    return {name: one[None] for name, one in found.items()}


def read_by(layout: Layout | None, found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The outputs that the layout reads; all of them if there is none."""
    if layout is None:
        return found
    names = outputs_read(layout, {name: one.shape for name, one in found.items()})
    return {name: one for name, one in found.items() if name in names}


def check_batch(outputs: Mapping[str, torch.Tensor], count: int, output: Any) -> None:
    """Raise JobError if an output does not have a row for each of `count` samples."""
    if isinstance(output, list) and len(output) == count and all(isinstance(one, Mapping) for one in output):
        raise NotBatchedError(
            "the network returns a dict for each sample, so that it cannot be batched; return tensors [N, ...] for all "
            "samples together: a detector its boxes [N, K, 4] and scores [N, K, classes], and leave what overlaps to "
            "the server (--task detect)"
        )
    for name, tensor in outputs.items():
        if tensor.ndim < 1 or len(tensor) != count:
            raise NotBatchedError(
                f"the network returns {name} {list(tensor.shape)} for {count} samples, so that it cannot be batched; "
                "it must return [N, ...], a row for each sample"
            )
