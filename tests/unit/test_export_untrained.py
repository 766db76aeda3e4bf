"""Weights that another seed makes others, and that the answers come from, are random."""

from __future__ import annotations

import pytest

from convoy.models.errors import JobError

torch = pytest.importorskip("torch")
untrained = pytest.importorskip("convoy.export.sources.torch_child.untrained")

pytestmark = pytest.mark.slow


def network(*, trained: bool, frozen: bool = False, zeros: bool = False, hidden: bool = False, aux: bool = False):
    """A convolution and a linear layer; loaded or drawn, and as people may leave them."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc = torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(4, 3)
            if aux:
                self.aux = torch.nn.Linear(4, 3)
            if trained:
                for own in (self.conv, self.fc):
                    for parameter in own.parameters():
                        torch.nn.init.constant_(parameter, 0.1)
            if zeros:
                torch.nn.init.zeros_(self.fc.weight)
                torch.nn.init.zeros_(self.fc.bias)
            if frozen:
                self.requires_grad_(False)

        def forward(self, images):
            if hidden:
                with torch.no_grad():
                    features = torch.relu(self.conv(images))
            else:
                features = torch.relu(self.conv(images))
            return self.fc(features.mean((2, 3)))

    return Net().eval()


def refuse(build) -> None:
    from convoy.export.sources.torch_child import untrained

    images = torch.linspace(-1, 1, 2 * 3 * 6 * 6).reshape(2, 3, 6, 6)
    made = build()
    wanted = [parameter.requires_grad for parameter in made.parameters()]
    try:
        untrained.refuse(made, build, lambda one: {"logits": one(images)}, "net.py:make")
    finally:
        assert [parameter.requires_grad for parameter in made.parameters()] == wanted


@pytest.mark.parametrize("aux", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_loaded_weights_pass_with_heads_that_only_training_uses(aux, frozen):
    refuse(lambda: network(trained=True, aux=aux, frozen=frozen))


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ({}, "all of them"),
        ({"frozen": True}, "all of them"),
        # Every such network answers zero, whatever its convolution holds.
        ({"zeros": True}, "conv.weight, conv.bias"),
        ({"aux": True}, "conv.weight, conv.bias, fc.weight"),
        ({"hidden": True, "frozen": True}, "fc.weight, fc.bias"),
    ],
)
def test_drawn_weights_are_refused_and_named(how, named):
    with pytest.raises(JobError, match=f"net.py:make gives are random, .*{named}.*--random-weights"):
        refuse(lambda: network(trained=False, **how))


def test_drawn_weights_are_seen_behind_what_has_no_gradients():
    def build():
        made = network(trained=False, hidden=True)
        torch.nn.init.constant_(made.fc.weight, 0.1)
        torch.nn.init.constant_(made.fc.bias, 0.1)
        return made

    with pytest.raises(JobError, match=r"conv\.weight, conv\.bias"):
        refuse(build)


class KeepsBiases(torch.nn.Module):
    """As LeViT: in evaluation it computes from its weights once, and forgets that when it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.biases = torch.nn.Parameter(torch.zeros(4))
        self.kept: torch.Tensor | None = None

    def train(self, mode: bool = True) -> KeepsBiases:
        self.kept = None if mode else self.kept
        return super().train(mode)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = 2 * self.biases
        return images.mean() + self.kept


def test_what_a_network_keeps_of_its_weights_is_forgotten_when_they_are_drawn():
    made, images = KeepsBiases().eval(), torch.ones(1)
    made(images)
    untrained.draw(made, lambda: made(images))
    with torch.inference_mode():
        assert torch.equal(made(images), 1 + 2 * made.biases)
