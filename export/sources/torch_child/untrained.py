"""Weights that were drawn and not loaded: those that another seed makes others.

A factory may load its weights itself or forget to, and a file of Python does not say which. So it is called once more
with every generator at another place: what it loads is the same, what it draws is not. Knows torch's generators; knows
nothing of accuracy.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from export.sources.torch_job import some
from models.errors import JobError

if TYPE_CHECKING:
    import torch

_OTHER_SEED = 0x5EED


def refuse(network: torch.nn.Module, build_again: Callable[[], torch.nn.Module], shown: str) -> None:
    """Raises JobError where `build_again` makes a network with other weights under another seed."""
    drawn = _drawn(network, build_again)
    if drawn:
        whole = len(drawn) == sum(1 for _ in network.parameters())
        raise JobError(
            f"the weights that {shown} gives are random, for they change with the seed "
            f"({'all of them' if whole else some(drawn)}); pass --weights FILE, load them in the function, or "
            "pass --random-weights to export an untrained network"
        )


def _drawn(network: torch.nn.Module, build_again: Callable[[], torch.nn.Module]) -> list[str]:
    """The names of the parameters that are others the second time; empty where that cannot be seen."""
    import torch

    try:
        with _other_seed():
            again = dict(build_again().named_parameters())
    except Exception:  # the user's code need not work twice; then accuracy must tell
        return []
    return [
        name
        for name, parameter in network.named_parameters()
        if name in again and again[name].shape == parameter.shape and not torch.equal(parameter, again[name])
    ]


@contextmanager
def _other_seed() -> Iterator[None]:
    """Every generator elsewhere, and not to be brought back by the user's own seed."""
    import torch

    seed_torch = torch.manual_seed
    state = torch.get_rng_state()
    torch.manual_seed(_OTHER_SEED)
    np.random.seed(_OTHER_SEED)
    random.seed(_OTHER_SEED)
    # A factory that sets a seed draws the same every time; its weights are no less random for that.
    torch.manual_seed = torch.random.manual_seed = lambda seed: seed_torch(int(seed) ^ _OTHER_SEED)
    try:
        yield
    finally:
        torch.manual_seed = torch.random.manual_seed = seed_torch
        torch.set_rng_state(state)
