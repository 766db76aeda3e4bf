"""Random distortions of training images.

Source of the method: small random affine maps, Simard, Steinkraus and Platt (2003).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional


def distort(images: Tensor, generator: torch.Generator, *, mirror: bool) -> Tensor:
    """Rotate, shift, scale and shear each image a little, and mirror every second one if `mirror`.

    `images` is float [N, C, H, W] on any device; so is the result. Random numbers are drawn on the CPU from
    `generator`, so a seed gives the same distortions on every device. Borders are repeated.
    """
    maps = _affine_maps(len(images), generator, mirror=mirror).to(images.device, images.dtype, non_blocking=True)
    grid = functional.affine_grid(maps, list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, padding_mode="border", align_corners=False)


def _affine_maps(count: int, generator: torch.Generator, *, mirror: bool) -> Tensor:
    """[count, 2, 3]: maps from output to input coordinates, both from -1 to 1."""

    def uniform(limit: float) -> Tensor:
        return (torch.rand(count, generator=generator) * 2 - 1) * limit

    angle = uniform(math.radians(12.0))
    scale_x, scale_y = 1 + uniform(0.1), 1 + uniform(0.1)
    shear = uniform(0.1)
    # A tenth of the side, because coordinates span 2.
    shift_x, shift_y = uniform(0.2), uniform(0.2)
    if mirror:
        scale_x = scale_x * (torch.randint(2, (count,), generator=generator) * 2 - 1)
    cos, sin = torch.cos(angle), torch.sin(angle)
    rows = (cos * scale_x, -sin + shear, shift_x, sin * scale_x, cos * scale_y, shift_y)
    return torch.stack(rows, dim=1).reshape(count, 2, 3)
