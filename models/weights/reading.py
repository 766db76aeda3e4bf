"""Read a checkpoint of any origin for a network: which entry, which names, and whether it fits.

Reads only tensors: safetensors, or torch's files with `weights_only`. Objects of missing or forbidden classes become
inert stand-ins, whose names are reported. `convoy train` and `convoy export` accept the same files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from convoy.models.errors import JobError
from convoy.models.samples import some
from convoy.models.weights import names
from convoy.models.weights.versions import versions_of, with_versions

Shapes = Mapping[str, tuple[int, ...]]


def misfit(found: Shapes, expected: Shapes) -> str | None:
    """What is missing, unknown or of another shape; None if the weights fit."""
    missing = [name for name in expected if name not in found]
    unknown = [name for name in found if name not in expected]
    differing = [
        f"{name} is {list(found[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    problems = [
        f"{what}{some(names)}"
        for what, names in (("missing ", missing), ("unknown ", unknown), ("", differing))
        if names
    ]
    return "; ".join(problems) or None


_UNKNOWN = re.compile(r"Unsupported global: GLOBAL (\S+) was not an allowed global")


class _Kind(type):
    def __eq__(cls, other: object) -> bool:
        # Only what is equal to a dict may be filled like one, and a user's class may be a kind of dict.
        return cls is other or other is dict

    __hash__ = type.__hash__


class StandIn(metaclass=_Kind):
    """A stand-in for an object of a foreign class; it keeps the object's state and does nothing."""

    def __new__(cls, *args: object, **kwargs: object) -> StandIn:
        return object.__new__(cls)

    def __setitem__(self, key: object, value: object) -> None:
        """A kind of dict is filled, and not read."""

    def __setstate__(self, state: object) -> None:
        self.state = state


def load_tensors(path: Path) -> tuple[Any, list[str]]:
    """The contents of the file, on the CPU, and the names of the classes that were left out.

    Raises JobError if it cannot be read this way, such as for whole programs.
    """
    foreign: list[str] = []
    while True:
        try:
            with torch.serialization.safe_globals([(StandIn, name) for name in foreign]):
                return torch.load(path, map_location="cpu", weights_only=True), foreign
        except Exception as error:  # a zip, pickle or storage error, by format; torch's advice is to trust the file
            unknown = _UNKNOWN.search(str(error))
            name = "" if unknown is None else unknown[1] if "." in unknown[1] else f"builtins.{unknown[1]}"
            # Each is found by reading the file once more.
            if not name or name in foreign or len(foreign) == 100:
                raise JobError(
                    f"{path.name} does not hold plain tensors; save the network's state_dict as safetensors"
                ) from error
            foreign.append(name)


def tensors_of_module(value: object) -> Iterator[tuple[str, Any]]:
    """The state_dict of a network that was saved whole, by name; empty if it is not one."""
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


# Where trainers keep the weights, the clearest names first.
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


class FoundWeights(NamedTuple):
    """The tensors of `file`, and what was chosen or left out; as torch's state_dict they may carry the versions of the
    network's parts.
    """

    file: str
    tensors: Mapping[str, torch.Tensor]
    said: list[str]


class FittedWeights(NamedTuple):
    """Tensors under the network's names: a state_dict with the versions of its parts. `said` lists what was chosen,
    changed and left out, empty if the file is used as it is; `has_head` means that they include the head.
    """

    tensors: dict[str, torch.Tensor]
    said: str
    has_head: bool


def fitted(
    found: FoundWeights,
    expected: Mapping[str, torch.Tensor],
    *,
    advice: str = "",
    head: frozenset[str] = frozenset(),
    may_have_head: bool = True,
) -> FittedWeights:
    """The weights for a network whose tensors are `expected`. Raises JobError with what does not fit, and `advice`.

    Those named `head` are used if all exist with the network's shapes, unless `may_have_head` is False: then they are
    for other classes and left out.
    """
    body = {name: tensor for name, tensor in expected.items() if name not in head}
    weights, versions, changes = names.fitted(found.tensors, body, versions_of(found.tensors))
    has_head = may_have_head and all(name in weights and weights[name].shape == expected[name].shape for name in head)
    if not has_head:
        weights = {name: tensor for name, tensor in weights.items() if name not in head}
    problem = misfit(
        {name: tuple(tensor.shape) for name, tensor in weights.items()},
        {name: tuple(tensor.shape) for name, tensor in (expected if has_head else body).items()},
    )
    if problem is not None:
        raise JobError(f"the weights in {found.file} do not fit the network: {problem}{advice}")
    whole = [] if found.said or not changes else [found.file]
    state = with_versions(weights, versions_of(expected), versions)
    return FittedWeights(state, "; ".join([*whole, *found.said, *changes]), has_head)


def read_weights(path: Path, key: str | None = None) -> FoundWeights:
    """The tensors of a `.safetensors` or a `.pth` file; `key` names the entry, with dots for nested ones.

    Raises JobError if the file is missing or does not contain plain tensors.
    """
    if not path.is_file():
        raise JobError(f"there is no checkpoint at {path}; check the path, or run `convoy train`")
    if path.suffix == ".safetensors":
        from safetensors.torch import load

        try:
            return FoundWeights(path.name, load(path.read_bytes()), [])
        except Exception as error:  # safetensors raises several kinds
            raise JobError(f"cannot read {path.name} as safetensors ({error}); check the file") from error
    content, classes = load_tensors(path)
    skipped = [f"objects of {some(classes)} in it were not read"] if classes else []
    own = _weights_of(content)
    if own is not None:
        if key is not None:
            raise JobError(f"{path.name} is a single state_dict without an entry {key!r}; remove --weights-key")
        return FoundWeights(path.name, own, [path.name, *skipped] if skipped else [])
    entries = dict(_entries(content))
    if not entries:
        among = f" (among objects of {some(classes)}, which may run code and are not read)" if classes else ""
        raise JobError(f"{path.name} holds no state_dict{among}; save model.state_dict() as safetensors")
    if key is not None and key not in entries:
        raise JobError(f"{path.name} has no weights under {key!r}; it has {some(list(entries))}")
    taken = key or next((usual for usual in _USUAL if usual in entries), next(iter(entries)))
    others = [name for name in entries if name != taken]
    return FoundWeights(
        path.name, entries[taken], [_told(taken, others, path.name, is_asked_for=key is not None), *skipped]
    )


def _told(taken: str, others: list[str], file: str, *, is_asked_for: bool) -> str:
    if not others:
        return f"{taken!r} of {file}"
    chosen = "as --weights-key says" if is_asked_for else "--weights-key takes another"
    return f"{taken!r} of {file}, which also has {some(others)}; {chosen}"


def _weights_of(value: Any) -> dict[str, torch.Tensor] | None:
    """The named tensors of a value: itself, or those of a network that was saved whole."""
    if isinstance(value, dict):
        is_weights = bool(value) and all(isinstance(one, torch.Tensor) for one in value.values())
        return value if is_weights else None
    return dict(tensors_of_module(value)) or None


def _entries(found: Any, prefix: str = "", depth: int = 3) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Every set of named tensors in the file, by its keys joined with dots."""
    if not isinstance(found, dict) or depth == 0:
        return
    for key, value in found.items():
        if not isinstance(key, str):  # an optimiser numbers the parameters whose averages it keeps
            continue
        weights = _weights_of(value)
        # A set of scalars is a trainer's notes; a network's weights are never only scalars.
        if weights is not None and any(tensor.ndim for tensor in weights.values()):
            yield f"{prefix}{key}", weights
        else:
            yield from _entries(value, f"{prefix}{key}.", depth - 1)
