"""Resizing by plain sampling, without antialiasing.

Knows pixels and kernels; knows nothing of files or models. Pillow cannot do this: its `resize` always
antialiases, and its `transform` uses a sharper cubic than the one that models are trained with.

Source of the method: `torch.nn.functional.interpolate(antialias=False, align_corners=False)`, the definition
behind torchvision's tensor transforms. Output pixel i samples the input at (i + 0.5) * in / out - 0.5 with
the kernel at its own width, whatever the scale; samples beyond the border repeat it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Kernel:
    """Weight as a function of distance in pixels, zero from `reach` on."""

    weight: Callable[[Floats], Floats]
    reach: int


def _cubic(distance: Floats) -> Floats:
    """Keys' cubic convolution with a = -0.75, torch's choice."""
    a, x = -0.75, np.abs(distance)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((x - 5) * x + 8) * x * a - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))


def _lanczos(distance: Floats) -> Floats:
    return np.where(np.abs(distance) < 3, np.sinc(distance) * np.sinc(distance / 3), 0.0)


KERNELS = {
    "bilinear": Kernel(lambda distance: 1 - np.abs(distance), 1),
    "bicubic": Kernel(_cubic, 2),
    "lanczos": Kernel(_lanczos, 3),
}


def sample_without_antialias(
    pixels: npt.NDArray[np.uint8], size: tuple[int, int], window: tuple[int, int, int, int], kernel: str
) -> npt.NDArray[np.uint8]:
    """The part `window` (left, top, right, bottom) of `pixels` resized to `size` (width, height).

    `pixels` is uint8 [height, width] or [height, width, channels] and so is the result. `kernel` is a key
    of `KERNELS`. Only the pixels that the window needs are read.
    """
    left, top, right, bottom = window
    columns, column_weights = _taps(pixels.shape[1], size[0], range(left, right), KERNELS[kernel])
    rows, row_weights = _taps(pixels.shape[0], size[1], range(top, bottom), KERNELS[kernel])
    result = np.zeros((len(rows), len(columns), *pixels.shape[2:]))
    for i in range(rows.shape[1]):
        line = pixels[rows[:, i]]
        for j in range(columns.shape[1]):
            weights = row_weights[:, i, None] * column_weights[None, :, j]
            result += line[:, columns[:, j]] * (weights[..., None] if pixels.ndim == 3 else weights)
    return np.clip(np.rint(result), 0, 255).astype(np.uint8)


def _taps(in_px: int, out_px: int, wanted: range, kernel: Kernel) -> tuple[npt.NDArray[np.intp], Floats]:
    """Input indices [len(wanted), 2 * reach] along one axis and their weights, which sum to 1."""
    centres = (np.arange(wanted.start, wanted.stop) + 0.5) * (in_px / out_px) - 0.5
    taps = np.floor(centres)[:, None] + np.arange(1 - kernel.reach, 1 + kernel.reach)
    weights = kernel.weight(centres[:, None] - taps)
    return taps.clip(0, in_px - 1).astype(np.intp), weights / weights.sum(axis=1, keepdims=True)
