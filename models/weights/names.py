"""Map the names of weights from other tools to the network's.

Wrappers add a prefix to every name, and pruning splits a tensor in two. What is certain is undone and reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import torch

from convoy.models.errors import JobError
from convoy.models.samples import some
from convoy.models.weights.versions import Versions, renamed

Tensors = Mapping[str, torch.Tensor]

# `torch.compile` adds this prefix to whatever it was given, which may be a part.
_COMPILED = "_orig_mod."
# Counts batches; does not affect answers.
_COUNTER = "num_batches_tracked"
# An entry that torch's averaged weights add.
_AVERAGED = "n_averaged"


class Renamed(NamedTuple):
    """Tensors, and versions of parts, under the network's names; `said` has a line for each change."""

    tensors: dict[str, torch.Tensor]
    versions: Versions
    said: list[str]


def fitted(found: Tensors, expected: Tensors, versions: Versions | None = None) -> Renamed:
    """The tensors under the network's names, as far as that is certain. `versions` are those of the file's parts.

    Raises JobError if several prefixes fit.
    """
    said: list[str] = []
    weights, own = _uncompiled(found, expected, versions or {}, said)
    weights = _unpruned(weights, expected, said)
    weights, own = _unwrapped(weights, expected, own, said)
    return Renamed(_counted(weights, expected, said), own, said)


def _uncompiled(
    found: Tensors, expected: Tensors, versions: Versions, said: list[str]
) -> tuple[dict[str, torch.Tensor], Versions]:
    plain = {name.replace(_COMPILED, ""): tensor for name, tensor in found.items()}
    if plain.keys() == found.keys() or any(_COMPILED in name for name in expected) or len(plain) < len(found):
        return dict(found), versions
    said.append(f"{_COMPILED!r} of torch.compile was taken off the names")
    return plain, renamed(versions, lambda name: name.replace(_COMPILED, ""))


def _unpruned(found: Tensors, expected: Tensors, said: list[str]) -> dict[str, torch.Tensor]:
    """Replace each pair that `torch.nn.utils.prune` leaves by its product."""
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


def _unwrapped(
    found: Tensors, expected: Tensors, versions: Versions, said: list[str]
) -> tuple[dict[str, torch.Tensor], Versions]:
    wanted = [name for name in expected if not name.endswith(_COUNTER)]
    if not wanted or all(name in found for name in wanted):
        return dict(found), versions
    prefixes = _whole_prefixes(found, expected, wanted)
    if len(prefixes) > 1:
        raise JobError(
            f"the weights hold the network more than once, under {some(prefixes)}; save the state_dict of one of them"
        )
    prefix = prefixes[0] if prefixes else _common_prefix(found, expected)
    if not prefix:
        return dict(found), versions
    weights = {name.removeprefix(prefix): tensor for name, tensor in found.items() if name.startswith(prefix)}
    said.append(f"the prefix {prefix!r} was taken off the names")
    others = [name for name in found if not name.startswith(prefix)]
    if others:
        said.append(f"{some(others)} without it left out")
    if not any(f"{name}.".startswith(prefix) for name in versions):
        return weights, versions  # names of tensors were changed by hand, and those of parts were not
    return weights, renamed(versions, lambda name: name.removeprefix(prefix) if name.startswith(prefix) else None)


def _whole_prefixes(found: Tensors, expected: Tensors, wanted: list[str]) -> list[str]:
    """Prefixes under which every wanted name exists; of several, those that also fit the shapes."""
    first = f".{wanted[0]}"
    prefixes = [name.removesuffix(wanted[0]) for name in found if name.endswith(first)]
    whole = [prefix for prefix in prefixes if all(f"{prefix}{name}" in found for name in wanted)]
    alike = [one for one in whole if all(found[f"{one}{name}"].shape == expected[name].shape for name in wanted)]
    return alike if len(whole) > 1 and alike else whole


def _common_prefix(found: Tensors, expected: Tensors) -> str:
    """A prefix of all names that the network's lack, so that error messages show the real difference."""
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
