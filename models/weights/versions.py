"""The versions of a network's parts, which torch keeps beside the tensors of a state_dict, as its `_metadata`.

A part may read older tensors of its own otherwise, or refuse those of no version, as torchvision's MNASNet does. Files
of safetensors have none. Knows names; knows nothing of what a version means.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

# What is said of each part, by its name; the network itself is called "".
Versions = Mapping[str, Mapping[str, Any]]


def versions_of(state: object) -> Versions:
    """Those that a state_dict carries; empty where it has none. Its file may be untrusted."""
    found = getattr(state, "_metadata", None)
    if not isinstance(found, Mapping):
        return {}
    return {name: said for name, said in found.items() if isinstance(name, str) and isinstance(said, Mapping)}


def with_versions(
    tensors: Mapping[str, torch.Tensor], own: Versions, found: Versions | None = None
) -> OrderedDict[str, torch.Tensor]:
    """A state_dict to load: of each part the version that was `found`, else the network's `own`.

    Its tensors have the network's own names and shapes, so that no older form is to be expected of them.
    """
    state = OrderedDict(tensors)
    state._metadata = {**own, **(found or {})}  # type: ignore[attr-defined]
    return state


def renamed(versions: Versions, change: Callable[[str], str | None]) -> Versions:
    """The versions under new names; `change` gets and gives a part's name with a dot behind it, or None to drop it.

    Where two parts get one name, as a wrapper and what it wraps, the longer name's version stays.
    """
    changed: dict[str, Mapping[str, Any]] = {}
    for name in sorted(versions, key=len):
        new = change(f"{name}." if name else "")
        if new is not None:
            changed[new.removesuffix(".")] = versions[name]
    return changed
