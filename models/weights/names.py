"""The names of other people's weights, and those that the network has for them.

Wrappers put something before every name, and pruning makes two tensors of one. What is certain is undone and told.
Knows names, shapes and one product; knows no file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from convoy.models.errors import JobError
from convoy.models.samples import some

if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, torch.Tensor]

# `torch.compile` puts this before the names of whatever it was given, which may be a part.
_COMPILED = "_orig_mod."
# How often batches were counted; answers do not come from it.
_COUNTER = "num_batches_tracked"
# What torch's moving average of weights counts beside them.
_AVERAGED = "n_averaged"


def fitted(found: Tensors, expected: Tensors) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors under the network's own names as far as they are sure, and a line for each thing that was done.

    Raises JobError where several prefixes fit.
    """
    said: list[str] = []
    weights = _uncompiled(found, expected, said)
    weights = _unpruned(weights, expected, said)
    weights = _unwrapped(weights, expected, said)
    return _counted(weights, expected, said), said


def _uncompiled(found: Tensors, expected: Tensors, said: list[str]) -> dict[str, torch.Tensor]:
    plain = {name.replace(_COMPILED, ""): tensor for name, tensor in found.items()}
    if plain.keys() == found.keys() or any(_COMPILED in name for name in expected) or len(plain) < len(found):
        return dict(found)
    said.append(f"{_COMPILED!r} of torch.compile was taken off the names")
    return plain


def _unpruned(found: Tensors, expected: Tensors, said: list[str]) -> dict[str, torch.Tensor]:
    """The product of each pair that `torch.nn.utils.prune` leaves, in the place of the pair."""
    stems = [name.removesuffix("_orig") for name in found if name.endswith("_orig")]
    pruned = [
        stem for stem in stems if f"{stem}_mask" in found and stem not in found and f"{stem}_orig" not in expected
    ]
    if not pruned:
        return dict(found)
    pairs = {f"{stem}_{half}" for stem in pruned for half in ("orig", "mask")}
    weights = {name: tensor for name, tensor in found.items() if name not in pairs}
    for stem in pruned:
        weights[stem] = found[f"{stem}_orig"] * found[f"{stem}_mask"].to(found[f"{stem}_orig"].dtype)
    said.append(f"the pruning masks of {some(pruned)} were applied")
    return weights


def _unwrapped(found: Tensors, expected: Tensors, said: list[str]) -> dict[str, torch.Tensor]:
    wanted = [name for name in expected if not name.endswith(_COUNTER)]
    if not wanted or all(name in found for name in wanted):
        return dict(found)
    prefixes = _whole_prefixes(found, expected, wanted)
    if len(prefixes) > 1:
        raise JobError(
            f"the weights hold the network more than once, under {some(prefixes)}; save the state_dict of one of them"
        )
    prefix = prefixes[0] if prefixes else _common_prefix(found, expected)
    if not prefix:
        return dict(found)
    weights = {name.removeprefix(prefix): tensor for name, tensor in found.items() if name.startswith(prefix)}
    said.append(f"the prefix {prefix!r} was taken off the names")
    others = [name for name in found if not name.startswith(prefix)]
    if others:
        said.append(f"{some(others)} without it left out")
    return weights


def _whole_prefixes(found: Tensors, expected: Tensors, wanted: list[str]) -> list[str]:
    """Those under which every wanted name is there; of several, those that fit the shapes, too."""
    first = f".{wanted[0]}"
    prefixes = [name.removesuffix(wanted[0]) for name in found if name.endswith(first)]
    whole = [prefix for prefix in prefixes if all(f"{prefix}{name}" in found for name in wanted)]
    alike = [one for one in whole if all(found[f"{one}{name}"].shape == expected[name].shape for name in wanted)]
    return alike if len(whole) > 1 and alike else whole


def _common_prefix(found: Tensors, expected: Tensors) -> str:
    """What every name begins with and none of the network's does, so that what differs is told by its own name."""
    prefix = ""
    while True:
        inside = [name.removeprefix(prefix) for name in found if name.startswith(prefix) and name != _AVERAGED]
        heads = Counter(name.partition(".")[0] for name in inside if "." in name)
        (head, count), *_ = heads.most_common(1) or [("", 0)]
        if count < len(inside) or any(name.startswith(f"{head}.") for name in expected):
            return prefix
        prefix += f"{head}."


def _counted(found: Tensors, expected: Tensors, said: list[str]) -> dict[str, torch.Tensor]:
    missing = {name: expected[name] for name in expected if name.endswith(_COUNTER) and name not in found}
    unknown = {name for name in found if name.endswith(_COUNTER) and name not in expected}
    if missing:
        said.append(f"{len(missing)} missing {_COUNTER} were set to 0, on which no answer depends")
    if unknown:
        said.append(f"{len(unknown)} {_COUNTER} that the network does not have were left out")
    kept = {name: tensor for name, tensor in found.items() if name not in unknown}
    return kept | {name: tensor.new_zeros(()) for name, tensor in missing.items()}
