"""Small networks as users write them, a factory each, with operators that no network of torchvision has.

A copy of this file is the SOURCE of an export, so it imports torch and nothing of ours. Each network takes float32
[N, 3, 32, 32].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn

CLASSES = 5


def conv(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
    body = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
    return nn.Sequential(body, nn.BatchNorm2d(outputs), nn.ReLU())


def head(inputs: int) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


class Applied(nn.Module):
    """A function of the images and of some modules."""

    def __init__(self, function: Callable[..., object], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, images: Tensor) -> object:
        return self.function(images, *self.parts)


def transposed() -> nn.Module:
    return nn.Sequential(conv(3, 8, stride=2), nn.ConvTranspose2d(8, 8, 4, 2, 1), nn.LeakyReLU(0.1), head(8))


def pixel_shuffle() -> nn.Module:
    return nn.Sequential(conv(3, 16), nn.PixelUnshuffle(2), conv(64, 16), nn.PixelShuffle(2), head(4))


def u_net() -> nn.Module:
    def skipped(x: Tensor, a: nn.Module, b: nn.Module, c: nn.Module, end: nn.Module) -> object:
        fine = a(x)
        coarse = F.interpolate(b(F.max_pool2d(fine, 2)), scale_factor=2.0, mode="bilinear")
        return end(c(torch.cat([fine, coarse], 1)))

    return Applied(skipped, conv(3, 8), conv(8, 8), conv(16, 8), head(8))


def resized_inside() -> nn.Module:
    return Applied(
        lambda x, a, end: end(a(F.interpolate(x, size=(20, 28), mode="bicubic", align_corners=False))),
        conv(3, 8),
        head(8),
    )


def pools() -> nn.Module:
    rest = nn.MaxPool2d(3, 2, ceil_mode=True), nn.AvgPool2d(3, 2, 1, count_include_pad=False), nn.LPPool2d(2, 2)
    return nn.Sequential(conv(3, 8), *rest, nn.Flatten(), nn.Linear(8 * 4 * 4, CLASSES))


def norms_and_activations() -> nn.Module:
    from torch.nn.utils.parametrizations import weight_norm

    first = nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.GELU(), nn.InstanceNorm2d(8, affine=True), nn.ELU()
    second = weight_norm(nn.Conv2d(8, 8, 3)), nn.PReLU(8), nn.LocalResponseNorm(5), nn.Softplus()
    third = nn.Conv2d(8, 8, 3), nn.Mish(), nn.Dropout2d(0.5), nn.Softsign(), nn.CELU()
    return nn.Sequential(*first, *second, *third, head(8))


def vision_transformer() -> nn.Module:
    def attended(x: Tensor, patches: nn.Module, encoder: nn.Module, end: nn.Module) -> object:
        tokens = patches(x).flatten(2).transpose(1, 2)
        return end(encoder(tokens)[:, 0])

    encoder = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=True)
    return Applied(attended, nn.Conv2d(3, 16, 8, 8), encoder, nn.Linear(16, CLASSES))


def recurrent_over_columns() -> nn.Module:
    return Applied(
        lambda x, a, gru, end: end(gru(a(x).mean(2).transpose(1, 2))[0][:, -1]),
        conv(3, 8),
        nn.GRU(8, 12, batch_first=True),
        nn.Linear(12, CLASSES),
    )


def bilinear_pooling() -> nn.Module:
    return Applied(
        lambda x, a, end: end(torch.einsum("nchw,ndhw->ncd", a(x), a(x)).flatten(1) / 1024),
        conv(3, 6),
        nn.Linear(36, CLASSES),
    )


def unfolded() -> nn.Module:
    return Applied(lambda x, end: end(F.unfold(x, 4, stride=4).mean(2)), nn.Linear(48, CLASSES))


def branch_and_flip() -> nn.Module:
    def viewed(x: Tensor, a: nn.Module, end: nn.Module) -> object:
        wide = x if x.shape[-1] > 16 else F.pad(x, (4, 4, 4, 4))
        return (end(a(wide)) + end(a(wide.flip(3)))) / 2

    return Applied(viewed, conv(3, 8), head(8))


def spectrum() -> nn.Module:
    return Applied(lambda x, end: end(torch.fft.rfft2(x).abs()), head(3))
