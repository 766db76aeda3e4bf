"""A file of torch's whose tensors lie beside objects of classes that are not here, or that may not be run.

Reads with `weights_only`, where the file chooses from a list what may be called. What is not on the list is not
imported: a stand-in that does nothing takes its place, and its name is told.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from convoy.models.errors import JobError

_UNKNOWN = re.compile(r"Unsupported global: GLOBAL (\S+) was not an allowed global")
# Each is met by reading the file once more.
_MOST_CLASSES = 100


class _Kind(type):
    def __eq__(cls, other: object) -> bool:
        # Only what is equal to a dict may be filled like one, and a class of the user's may well be a kind of dict.
        return cls is other or other is dict

    __hash__ = type.__hash__


class StandIn(metaclass=_Kind):
    """What the file calls an object of a foreign class; it keeps the state that the object had, and does nothing."""

    def __new__(cls, *args: object, **kwargs: object) -> StandIn:
        return object.__new__(cls)

    def __setitem__(self, key: object, value: object) -> None:
        """A kind of dict is filled; nobody reads it."""

    def __setstate__(self, state: object) -> None:
        self.state = state


def load(path: Path) -> tuple[Any, list[str]]:
    """What the file holds, on the CPU, and the names of the classes that were left out.

    Raises JobError where it cannot be read so, such as for whole programs.
    """
    import torch

    foreign: list[str] = []
    while True:
        try:
            with torch.serialization.safe_globals([(StandIn, name) for name in foreign]):
                return torch.load(path, map_location="cpu", weights_only=True), foreign
        except Exception as error:  # a zip, pickle or storage error, by format; torch's advice is to trust the file
            unknown = _UNKNOWN.search(str(error))
            name = "" if unknown is None else unknown[1] if "." in unknown[1] else f"builtins.{unknown[1]}"
            if not name or name in foreign or len(foreign) == _MOST_CLASSES:
                raise JobError(
                    f"{path.name} is not plain tensors; save the network's state_dict as safetensors"
                ) from error
            foreign.append(name)


def tensors_of_module(value: object) -> Iterator[tuple[str, Any]]:
    """The state_dict of a network that was saved whole, by name; nothing for what is no such network."""
    import torch

    state = value.state if isinstance(value, StandIn) and hasattr(value, "state") else None
    if not isinstance(state, dict) or not isinstance(state.get("_modules"), dict):
        return
    passing = state.get("_non_persistent_buffers_set") or ()
    for kind in ("_parameters", "_buffers"):
        for name, tensor in (state.get(kind) or {}).items():
            if isinstance(tensor, torch.Tensor) and not (kind == "_buffers" and name in passing):
                yield name, tensor
    for child, module in state["_modules"].items():
        for name, tensor in tensors_of_module(module):
            yield f"{child}.{name}", tensor
