"""Detect weights that were drawn and not loaded: those that change with another seed.

A factory may load its weights itself or forget to, and its Python file does not say which. So it is called once more
with other random states: what it loads stays the same, what it draws changes. Parts that do not affect the answers,
such as a head for training only, may be random. `draw` makes such weights, to test a graph.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

from convoy.export.sources.torch_job import RANDOM_WEIGHTS_ADVICE as ADVICE
from convoy.models.errors import JobError
from convoy.models.samples import some

_OTHER_SEED = 0x5EED

Answer = Callable[["torch.nn.Module"], Mapping[str, "torch.Tensor"]]


def refuse(network: torch.nn.Module, build_again: Callable[[], torch.nn.Module], answer: Answer, shown: str) -> None:
    """Raise JobError if `build_again` gives other weights under another seed, and the answers depend on them.

    `network` is in evaluation mode; `answer` returns a network's outputs for a few samples.
    """
    try:
        with _other_seed():
            again = build_again()
    except Exception:  # the user's code need not work twice; then accuracy must tell
        return
    drawn = _that_differ(network, again)
    if not drawn:
        return
    with torch.random.fork_rng(devices=[]):
        reached = _reached(network, drawn, answer)
        # What is computed without gradients affects the answers unnoticed.
        if not reached and _answer_alike(network, again.eval(), answer):
            return
    names = reached or list(drawn)
    whole = len(names) == sum(1 for _ in network.parameters())
    raise JobError(
        f"the weights that {shown} gives are random, for they change with the seed "
        f"({'all of them' if whole else some(names)}); {ADVICE}"
    )


def is_drawn(network: torch.nn.Module, build_again: Callable[[], torch.nn.Module]) -> bool:
    """Whether `build_again` gives other values under another seed for all parameters that are not constant."""
    try:
        with _other_seed():
            again = build_again()
    except Exception:  # the user's code need not work twice
        return False
    varied = [name for name, one in network.named_parameters() if not bool((one == one.flatten()[:1]).all())]
    return bool(varied) and set(varied) <= set(_that_differ(network, again))


def _that_differ(network: torch.nn.Module, again: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters of the network whose values differ the second time."""
    others = dict(again.named_parameters())
    return {
        name: parameter
        for name, parameter in network.named_parameters()
        if name in others and others[name].shape == parameter.shape and not torch.equal(parameter, others[name])
    }


def _reached(network: torch.nn.Module, drawn: Mapping[str, torch.nn.Parameter], answer: Answer) -> list[str]:
    """The names of those that the answers depend on, as far as gradients show."""
    trained = {name: parameter.requires_grad for name, parameter in drawn.items()}
    try:
        for parameter in drawn.values():
            parameter.requires_grad_(True)
        with torch.enable_grad():
            total = torch.stack([one.sum() for one in answer(network).values() if one.requires_grad]).sum()
            gradients = torch.autograd.grad(total, list(drawn.values()), allow_unused=True)
    except Exception:  # a network without gradients, or one that does not take the images, which is reported later
        return []
    finally:
        for name, parameter in drawn.items():
            parameter.requires_grad_(trained[name])
    return [name for name, gradient in zip(drawn, gradients, strict=True) if gradient is not None]


def _answer_alike(network: torch.nn.Module, again: torch.nn.Module, answer: Answer) -> bool:
    """Whether both give the same answers; also if one of them cannot answer, which is reported later."""

    def answers(one: torch.nn.Module) -> Mapping[str, torch.Tensor]:
        torch.manual_seed(0)
        with torch.inference_mode():
            return answer(one)

    try:
        first, second = answers(network), answers(again)
        return all(torch.allclose(first[name], second[name], rtol=1e-5, atol=1e-7) for name in first)
    except Exception:  # it is the user's code
        return True


@contextmanager
def _other_seed() -> Iterator[None]:
    """Set every generator to another state that the user's own seed cannot restore."""
    seed_torch = torch.manual_seed
    state = torch.get_rng_state()
    torch.manual_seed(_OTHER_SEED)
    np.random.seed(_OTHER_SEED)
    random.seed(_OTHER_SEED)
    # A factory that sets a seed draws the same every time; its weights are still random.
    torch.manual_seed = torch.random.manual_seed = lambda seed: seed_torch(int(seed) ^ _OTHER_SEED)
    try:
        yield
    finally:
        torch.manual_seed = torch.random.manual_seed = seed_torch
        torch.set_rng_state(state)


def draw(network: torch.nn.Module, run: Callable[[], object]) -> None:
    """Random weights under which no output is constant: the samples that `run` uses set the statistics.

    Fresh networks hide errors: ViT's head and class token start at zero, LayerScale at 1e-6, biases at 0, norms at 1,
    and a running variance of 1 lets the values of a deep network vanish or explode.
    """
    with torch.inference_mode():
        for parameter in network.parameters():
            if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
                parameter.copy_(_in_place_of_constant(parameter))
        # Some networks cache values computed from their weights until they train, such as LeViT its attention biases.
        network.train()
        network.eval()
        norms = [m for m in network.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # so that the statistics are those of these images, not of a moving average
            norm.train()
        run()
        for norm in norms:
            norm.eval()


def _in_place_of_constant(parameter: torch.Tensor) -> torch.Tensor:
    value = float(parameter.flatten()[0])
    if value == 0:
        fan_in = math.prod(parameter.shape[1:]) if parameter.ndim > 1 else 100
        return torch.randn_like(parameter) / math.sqrt(fan_in)
    # The scale of a norm, or a LayerScale that would switch its branch off.
    return torch.empty_like(parameter).uniform_(0.5, 1.5) * (value if value > 1e-2 else 1)
