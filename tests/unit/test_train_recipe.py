"""How the network learns: each option of the recipe does what its name says, and goes on after an interrupt."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import training_fixtures
from training_fixtures import write_coloured

from convoy.models.errors import UsageError
from convoy.models.train import TrainProgress, balanced, imbalance, train
from convoy.models.train_options import TrainOptions
from convoy.models.training.schedule import START_FACTOR, factor


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Many images of one class and few of the other, hard to tell apart."""
    return write_coloured(tmp_path / "images", {"red": 90, "blue": 18}, size=(12, 12), noise=220, tint=None)


options = partial(training_fixtures.options, epochs=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "linear"}, "--schedule linear is not known; use one of: one_cycle, cosine, step"),
        ({"class_weights": "all"}, "--class-weights all is not known"),
        ({"warm_up": 1.0}, "--lr-warm-up is a share"),
        ({"label_smoothing": -0.1}, "--label-smoothing is a share"),
        ({"weight_decay": float("nan")}, "--weight-decay must be 0 or above"),
        ({"ema": 1.0}, "--ema is a decay between 0 and 1"),
    ],
)
def test_a_wrong_option_is_named_with_what_is_right(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        options(Path("digits"), **changes)


# --- the learning rate


@pytest.mark.parametrize("schedule", ["one_cycle", "cosine", "step"])
@pytest.mark.parametrize("warm_up", [0.0, 0.1, 0.5])
def test_every_schedule_rises_to_its_peak_and_never_again(schedule: Any, warm_up: float) -> None:
    factors = [factor(schedule, step / 200, warm_up) for step in range(201)]
    peak = round(200 * warm_up)
    assert factors[peak] == 1
    assert factors[:peak] == sorted(factors[:peak])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert factors[0] == (START_FACTOR if warm_up else 1)


def test_steps_are_tenths_in_equal_stages() -> None:
    found = [factor("step", step / 90, 0.0) for step in range(91)]
    assert [found.index(one) for one in sorted(set(found), reverse=True)] == [0, 30, 60]
    assert sorted(set(found)) == pytest.approx([0.01, 0.1, 1])
    assert factor("cosine", 1.0, 0.05) == pytest.approx(0)


# --- classes of different sizes


def test_balanced_classes_count_alike() -> None:
    weights = balanced([30, 10, 60])
    assert [weight * images for weight, images in zip(weights, [30, 10, 60], strict=True)] == pytest.approx(
        [100 / 3] * 3
    )
    assert balanced([10, 0, 30]) == pytest.approx([2, 0, 2 / 3])


def test_unequal_classes_are_said_with_what_helps() -> None:
    plain = TrainOptions("digits", Path("cnn.safetensors"))
    said = imbalance(("cat", "dog"), [10, 90], plain)
    assert said == (
        "the classes are unequal: 10 images of cat to learn from, 90 of dog; "
        "--class-weights balanced lets each class count alike"
    )
    assert imbalance(("cat", "dog"), [10, 29], plain) == ""
    assert imbalance(("cat", "dog"), [10, 90], replace(plain, class_weights="balanced")) == ""
    assert "0 images of cat" in imbalance(("cat", "dog"), [0, 90], replace(plain, class_weights="balanced"))


# --- what each option does


@pytest.mark.slow
def test_the_recipe_is_what_torch_computes_with_these_numbers(folder: Path) -> None:
    """One step of SGD without warm-up, by hand."""
    import torch

    from convoy.models import fit, zoo
    from convoy.models.samples import DecodedPart
    from convoy.models.training.feed import MemoryFeed

    rng = np.random.default_rng(1)
    part = DecodedPart(rng.integers(0, 255, (8, 32, 32, 3), np.uint8), np.arange(8) % 2, ())
    network = fit.seeded(0, lambda: zoo.create("simple_cnn", 2))
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    plan = fit.FitPlan(
        "sgd", 0.1, 8, 8, 1, 0, "fp32", False, (0.5,) * 3, (0.5,) * 3, 0.01, 0.2, "step", 0.0, 0.5, (1.0, 3.0)
    )
    trainer = fit.Trainer(network, plan, torch.device("cpu"))
    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in network.named_parameters():
        parameter.register_hook(lambda gradient, name=name: gradients.update({name: gradient.clone()}))
    trainer.fit(MemoryFeed(part), None, lambda record: None)
    for name, parameter in network.named_parameters():
        gradient = gradients[name] + 0.01 * before[name]
        expected = before[name] - 0.1 * (gradient + 0.9 * gradient)  # Nesterov's first step
        assert torch.allclose(parameter, expected, atol=1e-6)
        # torch's average begins with the weights after the first step.
        assert torch.allclose(trainer._answering.state_dict()[name], expected, atol=1e-6)


@pytest.mark.slow
def test_mixed_precision_on_a_cpu_is_bf16_and_the_weights_stay_fp32(folder: Path) -> None:
    from safetensors.numpy import load_file

    result = train(options(folder, amp=True))
    assert result.precision == "bf16"
    assert {array.dtype for array in load_file(result.out).values()} == {np.dtype(np.float32)}
    assert np.isfinite(result.epochs[-1].loss)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"schedule": "cosine", "ema": 0.9, "validation": "0.3", "class_weights": "balanced"},
        {"schedule": "step", "warm_up": 0.2, "optimizer": "sgd", "amp": True},
        # It has dropout and running statistics.
        pytest.param({"arch": "torchvision:mobilenet_v3_small", "image_size": 32, "ema": 0.9}, marks=pytest.mark.long),
    ],
    ids=lambda changes: "-".join(changes),
)
def test_with_every_option_a_run_that_goes_on_ends_the_same(folder: Path, changes: dict[str, Any]) -> None:
    def interrupt(progress: TrainProgress) -> None:
        if progress.stage == "training" and progress.done == 1 and progress.last is not None:
            raise KeyboardInterrupt

    whole = options(folder, **changes)
    expected = train(whole).out.read_bytes()
    whole.out.unlink()
    assert train(whole, interrupt).is_interrupted
    assert train(replace(whole, resume=True)).out.read_bytes() == expected
