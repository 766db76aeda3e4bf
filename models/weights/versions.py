"""The versions of a network's parts, which torch keeps in a state_dict as its `_metadata`.

By its version, a part may read older tensors differently or refuse them, as torchvision's MNASNet does. safetensors
files have none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

# The metadata of each part, by name; the network itself is called "".
Versions = Mapping[str, Mapping[str, Any]]


def versions_of(state: object) -> Versions:
    """The versions in a state_dict; empty if it has none. Its file may be untrusted."""
    found = getattr(state, "_metadata", None)
    if not isinstance(found, Mapping):
        return {}
    return {name: said for name, said in found.items() if isinstance(name, str) and isinstance(said, Mapping)}


def with_versions(
    tensors: Mapping[str, torch.Tensor], own: Versions, found: Versions | None = None
) -> OrderedDict[str, torch.Tensor]:
    """A state_dict to load: each part has the version that was `found`, or else the network's `own`.

    Its tensors have the network's names and shapes, so no older form is expected.
    """
    state = OrderedDict(tensors)
    state._metadata = {**own, **(found or {})}  # type: ignore[attr-defined]
    return state


def renamed(versions: Versions, change: Callable[[str], str | None]) -> Versions:
    """The versions under new names; `change` maps a part's name with a trailing dot to another, or to None to drop it.

    If two parts get the same name, as a wrapper and its contents, the longer name's version stays.
    """
    changed: dict[str, Mapping[str, Any]] = {}
    for name in sorted(versions, key=len):
        new = change(f"{name}." if name else "")
        if new is not None:
            changed[new.removesuffix(".")] = versions[name]
    return changed
