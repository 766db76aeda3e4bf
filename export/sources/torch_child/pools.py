"""Pools that the exporter cannot express, or gets wrong, replaced while it traces the network.

An adaptive pool with windows of several sizes is computed axis by axis, a window at a time; a custom divisor becomes a
factor. Only if heights and widths are known numbers. The network's own answers do not use these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional


@contextmanager
def exportable() -> Iterator[None]:
    """Replace such pools of `torch.nn.functional`, which torch's layers call, until the end of the block."""
    others: dict[str, Callable[..., Any]] = {}
    for rank in (1, 2, 3):
        others[f"adaptive_max_pool{rank}d"] = _adaptive(f"adaptive_max_pool{rank}d", rank, torch.amax)
        others[f"adaptive_avg_pool{rank}d"] = _adaptive(f"adaptive_avg_pool{rank}d", rank, torch.mean)
    for rank in (2, 3):
        others[f"avg_pool{rank}d"] = _averaging(f"avg_pool{rank}d", rank)
    before = {name: getattr(functional, name) for name in others}
    for name, other in others.items():
        setattr(functional, name, other)
    try:
        yield
    finally:
        for name, original in before.items():
            setattr(functional, name, original)


def _adaptive(name: str, rank: int, reduced: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    original = getattr(functional, name)

    def pool(input: torch.Tensor, output_size: Any, return_indices: bool = False) -> Any:
        given = list(input.shape[-rank:])
        wanted = [output_size] * rank if isinstance(output_size, int) else list(output_size)
        sizes = [size if want is None else want for size, want in zip(given, wanted, strict=True)]
        numbers = all(isinstance(size, int) for size in (*given, *sizes))
        if return_indices or not numbers or all(a % b == 0 for a, b in zip(given, sizes, strict=True)):
            more = (return_indices,) if return_indices else ()
            return original(input, output_size, *more)
        for axis, (size, want) in enumerate(zip(given, sizes, strict=True), -rank):
            ends = [(index * size // want, -(-(index + 1) * size // want)) for index in range(want)]
            windows = [input.narrow(axis, start, end - start) for start, end in ends]
            input = torch.cat([reduced(window, axis, keepdim=True) for window in windows], dim=axis)
        return input

    return pool


def _averaging(name: str, rank: int) -> Callable[..., Any]:
    original = getattr(functional, name)

    def pool(
        input: torch.Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        given = list(input.shape[-rank:])
        if divisor_override is None or not all(isinstance(size, int) for size in given):
            return original(input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
        means = original(input, kernel_size, stride, padding, ceil_mode, True)
        counts = _counts(given, kernel_size, stride, padding, list(means.shape[-rank:]), rank)
        return means * (counts / divisor_override)

    return pool


def _counts(given: list[int], kernel_size: Any, stride: Any, padding: Any, sizes: list[int], rank: int) -> torch.Tensor:
    """How many values each mean covers, padding included, [..., height, width]."""
    steps = kernel_size if stride is None or stride == () else stride
    kernels, strides, pads = (
        [one] * rank if isinstance(one, int) else list(one) * (rank // len(one))
        for one in (kernel_size, steps, padding)
    )
    counts = torch.ones([1] * rank)
    for axis in range(rank):
        starts = torch.arange(sizes[axis]) * strides[axis]
        own = torch.clamp(starts + kernels[axis], max=given[axis] + 2 * pads[axis]) - starts
        shape = [1] * rank
        shape[axis] = -1
        counts = counts * own.reshape(shape)
    return counts.float()
