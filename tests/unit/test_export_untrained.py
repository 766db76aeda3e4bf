"""Weights that another seed makes others, and that the answers come from, are random."""

from __future__ import annotations

import pytest

from convoy.models.errors import JobError

torch = pytest.importorskip("torch")

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
