"""Networks of torchvision, and weights to begin with: what is taken, what is drawn anew, what is refused."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import training_fixtures
from safetensors.torch import load_file
from training_fixtures import write_coloured

from convoy.models.checkpoint import read_checkpoint_header
from convoy.models.errors import JobError, UsageError
from convoy.models.train import default_rate, train
from convoy.models.zoo import create

torch = pytest.importorskip("torch")
networks = pytest.importorskip("convoy.models.training.networks")
Weights = Mapping[str, torch.Tensor]
Maker = Callable[[torch.nn.Module, Weights, Path], object]


def _with_prefix(prefix: str, weights: Weights) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in weights.items()}


def _pruned(network: torch.nn.Module, weights: Weights, path: Path) -> None:
    """Leaves the network pruned, too, as its trainer had it."""
    from torch.nn.utils import prune

    layers = [one for one in network.modules() if isinstance(one, (torch.nn.Conv2d, torch.nn.Linear))]
    for module in layers:
        prune.l1_unstructured(module, "weight", amount=0.3)  # type: ignore[no-untyped-call]
    torch.save({"state_dict": network.state_dict()}, path)
    for module in layers:
        prune.remove(module, "weight")  # type: ignore[no-untyped-call]


def _saved(change: Callable[[Weights], Any]) -> Maker:
    return lambda network, weights, path: torch.save(change(weights), path)


_ARGUMENTS = argparse.Namespace(lr=0.1, epochs=90, out=Path("runs"))
MAKERS: dict[str, Maker] = {
    "state_dict": _saved(dict),
    "net": _saved(lambda weights: {"net": dict(weights), "acc": 91.5, "epoch": 10}),
    "namespace": _saved(lambda weights: {"model": dict(weights), "args": _ARGUMENTS, "epoch": 3}),
    "compiled_in_parallel": _saved(lambda weights: _with_prefix("module._orig_mod.", weights)),
    "lightning": _saved(
        lambda weights: {
            "epoch": 9,
            "global_step": 90,
            "state_dict": _with_prefix("model.", weights) | {"criterion.weight": torch.ones(5)},
            "hyper_parameters": argparse.Namespace(learning_rate=0.1, folder=Path("runs")),
            "callbacks": {},
        }
    ),
    "averaged_model": lambda network, weights, path: torch.save(
        torch.optim.swa_utils.AveragedModel(network).state_dict(), path
    ),
    "pruned": _pruned,
    "no_counters": _saved(
        lambda weights: {name: one for name, one in weights.items() if not name.endswith("num_batches_tracked")}
    ),
    "whole_network": lambda network, weights, path: torch.save(network, path),
}


SMALL = "torchvision:shufflenet_v2_x0_5"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_coloured(tmp_path / "images", {"red": 30, "green": 30})


options = partial(training_fixtures.options, epochs=1)


def test_what_has_learned_already_moves_a_tenth_as_far() -> None:
    tuned = options(Path("digits"), weights="cnn.pth")
    assert default_rate(tuned) == pytest.approx(default_rate(options(Path("digits"))) / 10)
    assert default_rate(replace(tuned, freeze=True)) == default_rate(options(Path("digits")))


# --- which tensors are the head


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "head"),
    [
        ("simple_cnn", {"classifier.weight", "classifier.bias"}),
        ("torchvision:resnet18", {"fc.weight", "fc.bias"}),
        ("torchvision:squeezenet1_1", {"classifier.1.weight", "classifier.1.bias"}),
        ("torchvision:regnet_y_400mf", {"fc.weight", "fc.bias"}),
        ("torchvision:inception_v3", {"AuxLogits.fc.weight", "AuxLogits.fc.bias", "fc.weight", "fc.bias"}),
    ],
)
def test_the_head_is_what_the_number_of_classes_shapes(arch: str, head: set[str]) -> None:
    state = torch.random.get_rng_state()
    assert networks.head(arch, 64) == head  # ResNet has layers with 64 outputs
    assert torch.equal(torch.random.get_rng_state(), state)


# --- torchvision's networks


@pytest.mark.slow
def test_a_network_of_torchvision_gets_a_head_for_the_data(folder: Path) -> None:
    result = train(options(folder, arch=SMALL, image_size=32))
    header = read_checkpoint_header(result.out)
    assert (header.architecture, header.labels) == (SMALL, ("green", "red"))
    assert (header.image.height, header.image.width, header.image.resize_mode) == (32, 32, "shorter_side")
    assert header.image.resize_px == 37  # 32 * 256 / 224, as published
    assert header.image.mean != (0.485, 0.456, 0.406)  # nothing learned with that
    assert load_file(result.out)["fc.weight"].shape[0] == 2


@pytest.mark.long
def test_a_network_with_a_second_head_learns_from_both(folder: Path) -> None:
    result = train(options(folder, arch="torchvision:googlenet", image_size=64, batch_size=32))
    assert np.isfinite(result.epochs[-1].loss)
    assert load_file(result.out)["aux1.fc2.weight"].shape[0] == 2


@pytest.mark.slow
def test_what_torchvision_has_not_or_does_not_take_is_said_before_an_image_is_read(folder: Path) -> None:
    with pytest.raises(UsageError, match="no classification model 'resnet19'; it has resnet"):
        train(options(folder, arch="torchvision:resnet19"))
    with pytest.raises(
        JobError, match=r"torchvision:maxvit_t does not accept images of 100x100 .*; change --image-size"
    ):
        train(options(folder, arch="torchvision:maxvit_t", image_size=100))


# --- weights to begin with


@pytest.mark.long
def test_only_the_head_learns_where_the_rest_is_frozen(folder: Path, tmp_path: Path) -> None:
    other = write_coloured(tmp_path / "other", {"red": 30, "green": 30, "blue": 30})
    first = train(options(other, arch="resnet18", out=tmp_path / "first.safetensors"))
    second = train(options(folder, arch="resnet18", weights=str(first.out), freeze=True))
    before, after = load_file(first.out), load_file(second.out)
    assert {name for name in before if before[name].shape != after[name].shape} == {"fc.weight", "fc.bias"}
    unchanged = {name for name in before if name not in ("fc.weight", "fc.bias")}
    assert all((before[name] == after[name]).all() for name in unchanged)  # running statistics, too
    assert second.header.image == first.header.image  # as the frozen layers are used to
    assert second.header.training.started_from.startswith("first.safetensors, sha256 ")
    assert second.header.training.is_frozen


@pytest.mark.slow
def test_weights_of_the_same_classes_bring_their_head(folder: Path) -> None:
    first = train(options(folder, epochs=3))
    again = train(options(folder, weights=str(first.out), learning_rate=1e-12, out=folder.parent / "again.safetensors"))
    before, after = load_file(first.out), load_file(again.out)
    assert all(np.allclose(before[name], after[name], atol=1e-6) for name in before)


# Training takes the forms that export takes, and says the same of them.
WILD = {
    "lightning": "'state_dict' of .*; the prefix 'model.' was taken off the names; criterion.weight without it",
    "namespace": "'model' of .*; objects of argparse.Namespace, pathlib.PosixPath in it were not read$",
    "compiled_in_parallel": "'_orig_mod.' of torch.compile .*; the prefix 'module.' was taken off",
    "pruned": "the pruning masks of conv1.weight, .* were applied",
    "no_counters": "20 missing num_batches_tracked were set to 0",
    "whole_network": "objects of .*ResNet.* were not read$",
    "averaged_model": "the prefix 'module.' was taken off the names; n_averaged without it left out",
    "net": "^'net' of net.pth$",
    "state_dict": "^$",
}


@pytest.mark.slow
@pytest.mark.parametrize(("form", "classes"), [*((form, 2) for form in WILD), ("net", 3), ("lightning", 3)])
def test_training_begins_with_whatever_checkpoints_export_takes(form: str, classes: int, tmp_path: Path) -> None:
    torch.manual_seed(1)
    trained, fresh = create("resnet18", 2).eval(), create("resnet18", classes)
    with torch.no_grad():
        for norm in (one for one in trained.modules() if isinstance(one, torch.nn.BatchNorm2d)):
            norm.running_mean.normal_()  # type: ignore[union-attr]
    path = tmp_path / f"{form}.pth"
    MAKERS[form](trained, trained.state_dict(), path)
    labels = ("a", "b", "c")[:classes]
    start = networks.read_start(options(tmp_path, arch="resnet18", weights=str(path)), labels)
    filled = networks.fill(fresh, start, networks.head("resnet18", classes))
    assert filled.has_head == (classes == 2)
    assert re.search(WILD[form], filled.said)
    for name, tensor in trained.state_dict().items():
        if not name.endswith("num_batches_tracked") and (filled.has_head or not name.startswith("fc.")):
            assert torch.equal(fresh.state_dict()[name], tensor), name


@pytest.mark.slow
def test_another_entry_of_a_checkpoint_is_taken_where_it_is_named(tmp_path: Path) -> None:
    made = create("simple_cnn", 2)
    ours = {name: tensor + 1 for name, tensor in made.state_dict().items()}
    torch.save({"model": made.state_dict(), "model_ema": ours}, tmp_path / "two.pth")
    asked = options(tmp_path, weights=str(tmp_path / "two.pth"), weights_key="model_ema")
    networks.fill(made, networks.read_start(asked, ("a", "b")), frozenset())
    assert torch.equal(made.state_dict()["conv1.weight"], ours["conv1.weight"])
    with pytest.raises(JobError, match=r"two\.pth has no weights under 'best'; it has model, model_ema"):
        networks.read_start(replace(asked, weights_key="best"), ("a", "b"))


@pytest.mark.slow
def test_weights_that_do_not_fit_are_named(folder: Path, tmp_path: Path) -> None:
    first = train(options(folder)).out
    with pytest.raises(JobError, match="holds the weights of simple_cnn, not of resnet18; pass --arch simple_cnn"):
        train(options(folder, arch="resnet18", weights=str(first)))
    tensors = load_file(first)
    torch.save(tensors | {"more": torch.zeros(2)}, tmp_path / "more.pth")
    with pytest.raises(JobError, match=r"more\.pth do not fit the network: unknown more; check --arch"):
        train(options(folder, weights=str(tmp_path / "more.pth")))
    with pytest.raises(JobError, match=r"there is no checkpoint at .*gone\.pth; check the path"):
        train(options(folder, weights=str(tmp_path / "gone.pth")))


@pytest.mark.slow
def test_published_weights_bring_their_way_to_see_and_no_head(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision import models

    published = models.get_model_weights("shufflenet_v2_x0_5").DEFAULT
    drawn = models.get_model("shufflenet_v2_x0_5", weights=None).state_dict()
    monkeypatch.setattr(type(published), "get_state_dict", lambda self, **how: drawn)
    result = train(options(folder, arch=SMALL, image_size=32, weights="imagenet", freeze=True))
    assert result.header.image.mean == (0.485, 0.456, 0.406)
    assert (load_file(result.out)["conv1.0.weight"] == drawn["conv1.0.weight"]).all()

    offline = Mock(side_effect=OSError("no route to host"))
    monkeypatch.setattr(type(published), "get_state_dict", offline)
    with pytest.raises(JobError, match=r"cannot be downloaded \(no route to host\); pass --weights FILE"):
        train(options(folder, arch=SMALL, weights="imagenet"))
