"""The torch child: how it is asked, random weights, detectors, and networks that fold."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from export_fixtures import options

from convoy.app.pictures.answering import detections
from convoy.export.plan import make_plan
from convoy.export.sources import to_onnx, torch_process
from convoy.models import zoo
from convoy.models.errors import JobError
from convoy.models.geometry import ImagePlacement
from convoy.models.spec import ImageSpec, ModelSpec, TensorSpec
from convoy.models.tensors import TensorBytes
from convoy.models.weights.reading import misfit

SAMPLES = np.zeros((2, 8, 8, 3), np.uint8)


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str):
    """Run the export with `script` as the child; `folder` is the folder of the exchange there."""
    monkeypatch.setattr(
        torch_process, "_CHILD", ("-c", f"import os, sys, pathlib\nfolder = pathlib.Path(sys.argv[1])\n{script}")
    )
    exchange = tmp_path / "exchange"
    exchange.mkdir()
    return to_onnx.to_onnx(make_plan(options(tmp_path)), {"images": SAMPLES}, exchange)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("os.kill(os.getpid(), 9)", "killed, most likely because memory ran out"),
        ("print('first')\nprint('last words', flush=True)\nos._exit(3)", "died with exit code 3: last words"),
        ("import stat\nassert not stat.S_ISFIFO(os.fstat(0).st_mode), 'it is a pipe'", "it is a pipe"),
    ],
)
def test_a_child_that_dies_leaves_its_last_words(tmp_path, monkeypatch, capfd, script, words):
    with pytest.raises(JobError, match=words):
        run(tmp_path, monkeypatch, script)
    assert capfd.readouterr() == ("", "")


def test_an_interrupt_ends_the_child(tmp_path, monkeypatch):
    interrupt = "(folder / 'pid').write_text(str(os.getpid()))\nos.kill(os.getppid(), 2)\nimport signal; signal.pause()"
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, monkeypatch, interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "exchange" / "pid").read_text()), 0)


def test_weights_that_do_not_fit_are_listed():
    expected = {"conv.weight": (16, 3, 3, 3), "conv.bias": (16,), "fc.bias": (10,)}
    assert misfit(expected, expected) is None
    assert misfit({"conv.weight": (16, 1, 3, 3), "head.bias": (10,), "fc.bias": (10,)}, expected) == (
        "missing conv.bias; unknown head.bias; conv.weight is [16, 1, 3, 3] instead of [16, 3, 3, 3]"
    )
    many = {f"layer{index}": (1,) for index in range(9)}
    assert misfit({}, many) == "missing layer0, layer1, layer2, layer3, layer4 and 4 more"


torch = pytest.importorskip("torch")
torchvision = pytest.importorskip("torchvision")
untrained = pytest.importorskip("convoy.export.sources.torch_child.untrained")
detectors = pytest.importorskip("convoy.export.sources.torch_child.detectors")
in_form_for_inference = pytest.importorskip("convoy.export.sources.torch_child.networks").in_form_for_inference


def network(
    *, trained: bool, frozen: bool = False, fixed: float | None = None, hidden: bool = False, aux: bool = False
):
    """A convolution and a linear layer; loaded or drawn, and as people may leave them."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc = torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(4, 3)
            if aux:
                self.aux = torch.nn.Linear(4, 3)
            for parameter in (*self.conv.parameters(), *self.fc.parameters()) if trained else ():
                torch.nn.init.constant_(parameter, 0.1)
            for parameter in self.fc.parameters() if fixed is not None else ():
                torch.nn.init.constant_(parameter, fixed)
            if frozen:
                self.requires_grad_(False)

        def forward(self, images):
            with torch.set_grad_enabled(not hidden):
                features = torch.relu(self.conv(images))
            return self.fc(features.mean((2, 3)))

    return Net().eval()


def refuse(build) -> None:
    images = torch.linspace(-1, 1, 2 * 3 * 6 * 6).reshape(2, 3, 6, 6)
    made = build()
    wanted = [parameter.requires_grad for parameter in made.parameters()]
    try:
        untrained.refuse(made, build, lambda one: {"logits": one(images)}, "net.py:make")
    finally:
        assert [parameter.requires_grad for parameter in made.parameters()] == wanted


@pytest.mark.slow
@pytest.mark.parametrize("aux", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_loaded_weights_pass_with_heads_that_only_training_uses(aux, frozen):
    refuse(lambda: network(trained=True, aux=aux, frozen=frozen))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "named"),
    [
        ({}, "all of them"),
        ({"frozen": True}, "all of them"),
        # Every such network answers zero, whatever its convolution holds.
        ({"fixed": 0.0}, "conv.weight, conv.bias"),
        ({"aux": True}, "conv.weight, conv.bias, fc.weight"),
        ({"hidden": True, "frozen": True}, "fc.weight, fc.bias"),
        # Behind what has no gradients.
        ({"hidden": True, "fixed": 0.1}, r"conv\.weight, conv\.bias"),
    ],
)
def test_drawn_weights_are_refused_and_named(how, named):
    with pytest.raises(JobError, match=f"net.py:make gives are random, .*{named}.*--random-weights"):
        refuse(lambda: network(trained=False, **how))


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


@pytest.mark.slow
def test_what_a_network_keeps_of_its_weights_is_forgotten_when_they_are_drawn():
    made, images = KeepsBiases().eval(), torch.ones(1)
    made(images)
    untrained.draw(made, lambda: made(images))
    with torch.inference_mode():
        assert torch.equal(made(images), 1 + 2 * made.biases)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("name", "px"),
    [("ssdlite320_mobilenet_v3_large", 320), ("retinanet_resnet50_fpn", 128), ("fcos_resnet50_fpn", 128)],
)
def test_what_is_left_of_overlaps_is_torchvisions(name, px):
    from tests.support.torchvision_nets import THRESHOLD, detector, normalised

    images = torch.rand(2, 3, px, px, generator=torch.Generator().manual_seed(3))
    model = detector(name, 5, images)
    assert detectors.input_px(model) == (px, px)
    batched, of_pixels = detectors.Detector(model).eval(), detectors.Detector(model, takes_pixels=True).eval()
    with torch.inference_mode():
        outputs = batched(normalised(model, images))
        for key, one in of_pixels(images).items():
            torch.testing.assert_close(one, outputs[key], rtol=1e-4, atol=1e-3)
        theirs = model(list(images))
    image = ImageSpec.plain(px, px, 3, "uint8_nhwc")
    spec = ModelSpec(
        *("m", (TensorSpec("images", "UINT8", image.tensor_shape),)),
        tuple(TensorSpec(key, "FP32", tuple(one.shape[1:])) for key, one in outputs.items()),
        *(8, image, "none", ()),
        task="detect",
        detection=batched.detection,
    )
    for index, expected in enumerate(theirs):
        answers = {
            key: TensorBytes((1, *one.shape[1:]), memoryview(one[index].numpy().tobytes()))
            for key, one in outputs.items()
        }
        found = detections(answers, spec, ImagePlacement.of((px, px), image), THRESHOLD, None)
        assert len(found) == len(expected["boxes"]) > 10
        # Those of equal scores have no order of their own.
        mine = np.array([[one.class_id, *one.box, one.score] for one in found])
        exact = torch.cat([expected["labels"][:, None], expected["boxes"], expected["scores"][:, None]], 1).numpy()
        distances = np.abs(mine[:, None] - exact[None]).max(axis=2)
        assert sorted(distances.argmin(axis=1).tolist()) == list(range(len(exact)))
        assert distances.min(axis=1).max() < 0.02


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["fasterrcnn_mobilenet_v3_large_320_fpn", "keypointrcnn_resnet50_fpn"])
def test_two_stages_are_refused_inside_anything(name):
    from torchvision.models import get_model

    model = torch.nn.Sequential(get_model(name, weights=None, weights_backbone=None))
    with pytest.raises(JobError, match=r"net.py:make is a \w+RCNN, which works in two stages: .*; train .*ssdlite320"):
        detectors.refuse_two_stages(model, "net.py:make")
    detectors.refuse_two_stages(torch.nn.Identity(), "net.py:make")


def settled(name: str) -> Any:
    """A network whose normalisations have seen something, in evaluation mode."""
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


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in zoo.names() if zoo.entry(name).task == "classify"])
def test_a_network_takes_images_of_32_pixels_in_any_number_and_may_be_copied_by_its_weights(name: str) -> None:
    network = settled(name)
    images = torch.rand(5, 3, 32, 32)
    with torch.inference_mode():
        answers = network(images)
        assert answers.shape == (5, 7)
        torch.testing.assert_close(network(images[:1]), answers[:1], rtol=1e-3, atol=1e-5)
        copy = zoo.create(name, 7).eval()
        copy.load_state_dict(network.state_dict())
        torch.testing.assert_close(copy(images), answers)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["repvgg", "wide_range_silu", "wide_range_hardswish"])
def test_folding_changes_no_answer_and_may_be_asked_for_twice(name: str) -> None:
    network, images = settled(name), torch.rand(6, 3, 32, 32) * 4 - 2
    with torch.inference_mode():
        before = network(images)
        assert in_form_for_inference(network).startswith("folded for inference by reparameterize(): ")
        torch.testing.assert_close(network(images), before, rtol=1e-3, atol=1e-4)
        in_form_for_inference(network)
        torch.testing.assert_close(network(images), before, rtol=1e-3, atol=1e-4)
    assert not any(module.training for module in network.modules())


@pytest.mark.slow
def test_a_folded_repvgg_is_convolutions_of_three_by_three_and_nothing_else() -> None:
    network = settled("repvgg")
    ways = sum(isinstance(one, torch.nn.Conv2d) for one in network.modules())
    in_form_for_inference(network)
    left = [one.kernel_size for one in network.modules() if isinstance(one, torch.nn.Conv2d)]
    assert left == [(3, 3)] * (ways // 2)
    assert not [one for one in network.modules() if isinstance(one, torch.nn.BatchNorm2d)]


@pytest.mark.slow
def test_channels_of_a_folded_wide_range_network_lie_three_decades_apart() -> None:
    network = settled("wide_range_silu")
    network.reparameterize()
    seen: list[Any] = []
    for layer in network.layers:
        layer.activation.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    with torch.inference_mode():
        network(torch.rand(64, 3, 32, 32) * 4 - 2)
    assert len(seen) == len(network.layers)
    spreads = [values.std(dim=(0, 2, 3)) for values in seen]
    assert all(float(spread.max() / spread.min()) > 300 for spread in spreads)


@pytest.mark.slow
def test_a_reparameterize_that_fails_is_named_and_one_that_wants_arguments_is_left_alone() -> None:
    class Sampler(torch.nn.Module):
        def reparameterize(self, mean: object, deviation: object) -> None:
            raise AssertionError

    class Broken(torch.nn.Module):
        def reparameterize(self) -> None:
            raise ValueError("no branch")

    assert in_form_for_inference(torch.nn.Sequential(Sampler())) == ""
    with pytest.raises(JobError, match=r"reparameterize\(\) of Broken fails \(no branch\); mend it"):
        in_form_for_inference(torch.nn.Sequential(Broken()))
