"""Small networks as users write them, a factory each: the file that the matrix exports as `nets.py:NAME`.

Imports torch and nothing of ours, for it runs in a folder of its own. Each takes float32 [N, 3, 32, 32] where its
name or docstring says nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn

CLASSES = 5


def conv(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1, dilation: int = 1) -> nn.Module:
    padding = dilation * (kernel // 2)
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation, groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


def head(inputs: int, *last: nn.Module, classes: int = CLASSES) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes), *last)


class Applied(nn.Module):
    """A function of the images and of some modules."""

    def __init__(self, function: Callable[..., object], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, images: Tensor) -> object:
        return self.function(images, *self.parts)


def plain() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 6 * 6, CLASSES),
    )


def grey() -> nn.Module:
    """float32 [N, 1, 32, 32]."""
    return nn.Sequential(conv(1, 8), head(8))


def oblong() -> nn.Module:
    """float32 [N, 3, 24, 40]."""
    return nn.Sequential(conv(3, 8), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(8 * 6 * 10, CLASSES))


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = conv(3, 8), nn.Sequential(conv(8, 8), conv(8, 8)), head(8)

    def forward(self, images: Tensor) -> object:
        features = self.stem(images)
        return self.head(F.relu(self.body(features) + features))


def residual() -> nn.Module:
    return _Residual()


def bottleneck() -> nn.Module:
    body = nn.Sequential(conv(16, 4, 1), conv(4, 4), conv(4, 16, 1))
    return Applied(lambda x, a, b, end: end(a(x) + b(a(x))), conv(3, 16, stride=2), body, head(16))


def dense() -> nn.Module:
    def joined(x: Tensor, a: nn.Module, b: nn.Module, end: nn.Module) -> object:
        first = torch.cat([x, a(x)], 1)
        return end(torch.cat([first, b(first)], 1))

    return Applied(joined, conv(3, 8), conv(11, 8), head(19))


def depthwise() -> nn.Module:
    return nn.Sequential(conv(3, 16), conv(16, 16, groups=16), conv(16, 32, 1), head(32))


def inverted_residual() -> nn.Module:
    body = nn.Sequential(nn.Conv2d(8, 32, 1), nn.ReLU6(), nn.Conv2d(32, 32, 3, 1, 1, groups=32), nn.Hardswish())
    return Applied(lambda x, a, b, c, end: end(a(x) + c(b(a(x)))), conv(3, 8), body, nn.Conv2d(32, 8, 1), head(8))


def squeeze_and_excitation() -> nn.Module:
    gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 4, 1), nn.SiLU(), nn.Conv2d(4, 16, 1), nn.Sigmoid())
    return Applied(lambda x, a, g, end: end(a(x) * g(a(x))), conv(3, 16), gate, head(16))


def inception() -> nn.Module:
    branches = (conv(3, 4, 1), conv(3, 4, 3), conv(3, 4, 5), nn.MaxPool2d(3, 1, 1))
    return Applied(lambda x, a, b, c, d, end: end(torch.cat([a(x), b(x), c(x), d(x)], 1)), *branches, head(15))


def dilated() -> nn.Module:
    return nn.Sequential(conv(3, 8), conv(8, 8, dilation=2), conv(8, 8, dilation=4), head(8))


def channel_shuffle() -> nn.Module:
    return nn.Sequential(conv(3, 8), conv(8, 8, groups=4), nn.ChannelShuffle(4), conv(8, 8, groups=4), head(8))


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


def lazy() -> nn.Module:
    """Its last layer learns how many inputs it has when it first runs."""
    return nn.Sequential(conv(3, 8), nn.AvgPool2d(8), nn.Flatten(), nn.LazyLinear(CLASSES))


def maximum_over_the_map() -> nn.Module:
    return Applied(lambda x, a, end: end(a(x).amax((2, 3))), conv(3, 8), nn.Linear(8, CLASSES))


def group_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.GELU(), head(8))


def instance_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True), nn.ELU(), head(8))


def layer_norm() -> nn.Module:
    def normalised(x: Tensor, a: nn.Module, norm: nn.Module, end: nn.Module) -> object:
        return end(norm(a(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2))

    return Applied(normalised, nn.Conv2d(3, 8, 4, 4), nn.LayerNorm(8), head(8))


def local_response_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.LocalResponseNorm(5), nn.Softplus(), head(8))


def weight_norm() -> nn.Module:
    from torch.nn.utils.parametrizations import weight_norm as normed

    return nn.Sequential(normed(nn.Conv2d(3, 8, 3)), nn.PReLU(8), head(8))


def activations() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Mish(), nn.Conv2d(8, 8, 3), nn.Softsign(), nn.Tanh(), nn.CELU(), head(8)
    )


def dropout() -> nn.Module:
    return nn.Sequential(conv(3, 8), nn.Dropout2d(0.5), head(8, nn.Dropout(0.3)))


def softmax_at_the_end() -> nn.Module:
    return nn.Sequential(conv(3, 8), head(8, nn.Softmax(dim=1)))


def log_softmax_at_the_end() -> nn.Module:
    return nn.Sequential(conv(3, 8), head(8, nn.LogSoftmax(dim=1)))


def sigmoid_at_the_end() -> nn.Module:
    return nn.Sequential(conv(3, 8), head(8, nn.Sigmoid()))


def one_output() -> nn.Module:
    return nn.Sequential(conv(3, 8), head(8, classes=1))


def self_attention() -> nn.Module:
    def attended(x: Tensor, a: nn.Module, attention: nn.Module, end: nn.Module) -> object:
        tokens = a(x).flatten(2).transpose(1, 2)
        return end((tokens + attention(tokens, tokens, tokens, need_weights=False)[0]).mean(1))

    attention = nn.MultiheadAttention(16, 4, batch_first=True)
    return Applied(attended, nn.Conv2d(3, 16, 8, 8), attention, nn.Linear(16, CLASSES))


class _VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, 8)
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        self.position = nn.Parameter(torch.zeros(1, 17, 16))
        self.encoder = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, images: Tensor) -> object:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(tokens.shape[0], -1, -1), tokens], 1) + self.position
        return self.head(self.encoder(tokens)[:, 0])


def vision_transformer() -> nn.Module:
    return _VisionTransformer()


def mixer() -> nn.Module:
    def mixed(x: Tensor, a: nn.Module, over_tokens: nn.Module, over_channels: nn.Module, end: nn.Module) -> object:
        tokens = a(x).flatten(2)
        tokens = (tokens + over_tokens(tokens)).transpose(1, 2)
        return end((tokens + over_channels(tokens)).mean(1))

    return Applied(mixed, nn.Conv2d(3, 8, 8, 8), nn.Linear(16, 16), nn.Linear(8, 8), nn.Linear(8, CLASSES))


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


def branch_on_the_shape() -> nn.Module:
    return Applied(lambda x, a, end: end(a(x) if x.shape[-1] > 16 else a(F.pad(x, (4, 4, 4, 4)))), conv(3, 8), head(8))


def flipped_views() -> nn.Module:
    return Applied(lambda x, a, end: (end(a(x)) + end(a(x.flip(3)))) / 2, conv(3, 8), head(8))


def spectrum() -> nn.Module:
    return Applied(lambda x, end: end(torch.fft.rfft2(x).abs()), head(3))


def colours() -> nn.Module:
    """Trained, as it were: which of red, green and blue is strongest; the other classes never are."""
    linear = nn.Linear(3, CLASSES)
    with torch.no_grad():
        linear.weight.zero_()
        linear.weight[:3] = 20 * torch.eye(3)
        linear.bias.copy_(torch.tensor([0.0, 0.0, 0.0, -40.0, -40.0]))
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear)


def any_size() -> nn.Module:
    return nn.Sequential(conv(3, 8), conv(8, 8, stride=2), head(8))


def half() -> nn.Module:
    return plain().half()


def bfloat16() -> nn.Module:
    return plain().bfloat16()


def trains_itself() -> nn.Module:
    return Applied(lambda x, a, end: end(a.train()(x)), conv(3, 8), head(8))


def scripted() -> object:
    return torch.jit.script(plain())


def length_of_the_batch() -> nn.Module:
    return Applied(lambda x, a, end: end(a(x).reshape(len(x), -1)), conv(3, 8, stride=8), nn.Linear(8 * 16, CLASSES))


def branch_on_the_values() -> nn.Module:
    return Applied(lambda x, a, end: end(a(x)) if float(x.mean()) > 0 else end(a(-x)), conv(3, 8), head(8))


def eigenvalues() -> nn.Module:
    return Applied(lambda x: torch.linalg.eigvals(x[:, 0, :5, :5]).abs())


def two_outputs() -> nn.Module:
    return Applied(lambda x, a, one, two: (one(a(x)), two(a(x))), conv(3, 8), head(8), head(8))


def dictionary() -> nn.Module:
    return Applied(lambda x, a, end: {"logits": end(a(x)), "features": a(x)}, conv(3, 8), head(8))


class _TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = plain()

    def forward(self, images: Tensor, weights: Tensor) -> object:
        return self.body(images) * weights


def two_inputs() -> nn.Module:
    return _TwoInputs()


def feature_map() -> nn.Module:
    return nn.Sequential(conv(3, 8))


def no_module() -> object:
    return {"state_dict": plain().state_dict()}


def fails() -> nn.Module:
    raise RuntimeError("the data of this machine are not mounted")


def maps() -> nn.Module:
    return Applied(lambda x, a, end: {"out": end(a(x)), "aux": a(x)}, conv(3, 8), nn.Conv2d(8, CLASSES, 1))


def detector() -> nn.Module:
    """Boxes as fractions of the sides, [N, 16, 4], and a score for each of three classes, [N, 16, 3]."""

    def answer(x: Tensor, a: nn.Module, boxes: nn.Module, scores: nn.Module) -> object:
        cells = a(x)
        return {
            "places": boxes(cells).flatten(2).mT.sigmoid(),
            "found": scores(cells).flatten(2).mT.sigmoid(),
        }

    return Applied(answer, conv(3, 8, stride=8), nn.Conv2d(8, 4, 1), nn.Conv2d(8, 3, 1))


def signal() -> nn.Module:
    return Applied(
        lambda x, a, end: end(torch.relu(a(x)).mean(2)), nn.Conv1d(2, 8, 5, padding=2), nn.Linear(8, CLASSES)
    )


def one_by_one() -> nn.Module:
    return Applied(lambda x, a, end: end(a(x)).reshape(1, CLASSES), conv(3, 8), head(8))
