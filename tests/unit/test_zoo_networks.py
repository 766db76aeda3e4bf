"""The zoo's networks for small images: what they take and give, and that folding changes no answer."""

from __future__ import annotations

from typing import Any

import pytest

from convoy.models import zoo

pytestmark = pytest.mark.slow


def settled(name: str) -> Any:
    """A network whose normalisations have seen something, in evaluation mode."""
    import torch

    torch.manual_seed(1)
    network = zoo.create(name, 7)
    network.train()
    with torch.no_grad():
        for _ in range(3):
            network(torch.rand(8, 3, 32, 32) * 3 - 1)
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
            torch.nn.init.normal_(module.bias)
    return network.eval()


def convolutions(network: Any) -> list[Any]:
    import torch

    return [module for module in network.modules() if isinstance(module, torch.nn.Conv2d)]


@pytest.mark.parametrize("name", zoo.names())
def test_a_network_takes_images_of_32_pixels_in_any_number_and_may_be_copied_by_its_weights(name: str) -> None:
    import torch

    network = settled(name)
    images = torch.rand(5, 3, 32, 32)
    with torch.inference_mode():
        answers = network(images)
        assert answers.shape == (5, 7)
        torch.testing.assert_close(network(images[:1]), answers[:1], rtol=1e-3, atol=1e-5)
        copy = zoo.create(name, 7).eval()
        copy.load_state_dict(network.state_dict())
        torch.testing.assert_close(copy(images), answers)


@pytest.mark.parametrize("name", ["repvgg", "wide_range_silu", "wide_range_hardswish"])
def test_folding_changes_no_answer_and_may_be_asked_for_twice(name: str) -> None:
    import torch

    from convoy.export.sources.torch_child.networks import in_form_for_inference

    network, images = settled(name), torch.rand(6, 3, 32, 32) * 4 - 2
    with torch.inference_mode():
        before = network(images)
        said = in_form_for_inference(network)
        torch.testing.assert_close(network(images), before, rtol=1e-3, atol=1e-4)
        in_form_for_inference(network)
        torch.testing.assert_close(network(images), before, rtol=1e-3, atol=1e-4)
    assert said.startswith("folded for inference by reparameterize(): ")
    assert not any(module.training for module in network.modules())


def test_a_folded_repvgg_is_convolutions_of_three_by_three_and_nothing_else() -> None:
    import torch

    from convoy.export.sources.torch_child.networks import in_form_for_inference

    network = settled("repvgg")
    ways = len(convolutions(network))
    in_form_for_inference(network)
    assert len(convolutions(network)) == ways / 2
    assert {one.kernel_size for one in convolutions(network)} == {(3, 3)}
    assert not [one for one in network.modules() if isinstance(one, torch.nn.BatchNorm2d)]


def test_channels_of_a_folded_wide_range_network_lie_three_decades_apart() -> None:
    import torch

    network = settled("wide_range_silu")
    network.reparameterize()
    seen: list[Any] = []
    for layer in network.layers:
        layer.activation.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    with torch.inference_mode():
        network(torch.rand(64, 3, 32, 32) * 4 - 2)
    assert len(seen) == len(network.layers)
    for values in seen:
        spread = values.std(dim=(0, 2, 3))
        assert float(spread.max() / spread.min()) > 300


def test_a_network_whose_reparameterize_wants_arguments_is_left_alone() -> None:
    import torch

    from convoy.export.sources.torch_child.networks import in_form_for_inference

    class Sampler(torch.nn.Module):
        def reparameterize(self, mean: object, deviation: object) -> None:
            raise AssertionError

    assert in_form_for_inference(torch.nn.Sequential(Sampler())) == ""


def test_a_reparameterize_that_fails_is_named() -> None:
    import torch

    from convoy.export.sources.torch_child.networks import in_form_for_inference
    from convoy.models.errors import JobError

    class Broken(torch.nn.Module):
        def reparameterize(self) -> None:
            raise ValueError("no branch")

    with pytest.raises(JobError, match=r"reparameterize\(\) of Broken fails \(no branch\); mend it"):
        in_form_for_inference(torch.nn.Sequential(Broken()))
