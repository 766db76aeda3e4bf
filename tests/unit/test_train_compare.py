"""Variants of one training, what its recipe computes, and the processes that read its images."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import training_fixtures
from safetensors.numpy import load_file
from training_fixtures import write_coloured

from convoy.models import zoo
from convoy.models.errors import FormRefused, JobError, UsageError
from convoy.models.samples import DecodedPart
from convoy.models.train import TrainProgress, balanced, compare, imbalance, train
from convoy.models.train_options import TrainOptions
from convoy.models.training.feed import MemoryFeed
from convoy.models.training.schedule import START_FACTOR, factor
from convoy.models.training.variants import TrainingVariant, parse_variants

torch = pytest.importorskip("torch")
fit = pytest.importorskip("convoy.models.fit")
PLAIN = TrainOptions(dataset="digits", out=Path("cnn.safetensors"), device="cpu", epochs=1)


# --- the words


def test_a_variant_is_a_device_and_any_words_in_any_order_or_all() -> None:
    assert parse_variants(["cpu", "cuda:fp16", " cpu:compiled:channels_last:bf16", "cpu"]) == (
        TrainingVariant("cpu"),
        TrainingVariant("cuda", "fp16"),
        TrainingVariant("cpu", "bf16", "channels_last", "compiled"),
    )

    everything = parse_variants(["cpu:all"])
    assert len(everything) == len(set(everything)) == 3 * 2 * 2
    assert [str(one) for one in parse_variants(["cuda:bf16:all"])] == [
        "cuda:bf16:contiguous:eager",
        "cuda:bf16:contiguous:compiled",
        "cuda:bf16:channels_last:eager",
        "cuda:bf16:channels_last:compiled",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tpu", "--compare tpu names no device; use cpu or cuda, and after colons fp32|bf16|fp16, "),
        ("bf16", "--compare bf16 names no device"),
        ("", "names no device"),
        (
            "cpu:int8",
            r"--compare cpu:int8: int8 is not known; use cpu or cuda, .*contiguous\|channels_last, eager\|comp",
        ),
        ("cpu:", "--compare cpu:: nothing after a colon is not known"),
        ("cpu:fp32:bf16", "--compare cpu:fp32:bf16 has both fp32 and bf16; use one of them"),
    ],
)
def test_wrong_words_are_named_with_what_is_right(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_variants([text])


def test_what_a_variant_leaves_unsaid_the_other_options_say() -> None:
    asked = replace(PLAIN, amp=True, channels_last=True)
    assert TrainingVariant("cpu").options(asked) == asked
    assert TrainingVariant("cuda", "fp16", "contiguous", "compiled").options(asked) == replace(
        PLAIN, device="cuda", precision="fp16", channels_last=False, compile=True
    )


# --- training


def options(tmp_path: Path, **changes: Any) -> TrainOptions:
    return replace(PLAIN, out=tmp_path / "cnn.safetensors", **changes)


@pytest.mark.long
def test_precisions_and_layouts_learn_the_same_on_a_cpu(tmp_path: Path) -> None:
    layouts: list[str] = []
    real = fit.Trainer.take_kept

    def noting(trainer: Any) -> Any:
        weight = dict(trainer._network.named_parameters())["conv2.weight"]
        layouts.append("contiguous" if weight.is_contiguous() else "channels_last")
        return real(trainer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit.Trainer, "take_kept", noting)
        rows = compare(options(tmp_path), ["cpu:all:eager"])
    results = [row.result for row in rows if row.result is not None]
    assert [(one.precision, one.layout, one.is_compiled) for one in results] == [
        (precision, layout, False)
        for precision in ("fp32", "bf16", "fp16")
        for layout in ("contiguous", "channels_last")
    ]
    assert list(dict.fromkeys(layouts[::2])) == ["contiguous", "channels_last"]
    accuracies = [one.header.test_accuracy for one in results]
    losses = [one.epochs[0].loss for one in results]
    assert max(accuracies) - min(accuracies) < 0.05
    # The same seed and the same order of images: what differs is rounding.
    assert max(losses) - min(losses) < 0.05 * losses[0]


def broken_backend(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("no working C++ compiler\n\nSet TORCHDYNAMO_VERBOSE=1 for the internal stack trace")


@pytest.mark.slow
def test_a_network_that_does_not_compile_is_a_row_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda network, **rest: real(network, backend=broken_backend, **rest))
    compiled, plain = compare(options(tmp_path), ["cpu:compiled", "cpu"])
    assert plain.result is not None
    assert compiled.result is None
    assert compiled.unavailable.startswith("torch.compile does not work here: backend='broken_backend' raised:")
    assert "no working C++ compiler" in compiled.unavailable
    assert "\n" not in compiled.unavailable
    assert "TORCHDYNAMO" not in compiled.unavailable
    with pytest.raises(JobError, match=r"none of cpu:compiled can train here: torch\.compile does not"):
        compare(options(tmp_path), ["cpu:compiled"])

    monkeypatch.setattr(
        torch, "compile", Mock(side_effect=RuntimeError("torch.compile is not supported on this Python"))
    )
    with pytest.raises(FormRefused, match=r"does not work here: torch\.compile is not supported on this Python; train"):
        train(options(tmp_path, compile=True))


@pytest.mark.slow
def test_a_compiled_network_learns_and_writes_its_own_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as ever, but without the C++ that takes its time: the names are the same with it."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda network, **rest: real(network, backend="aot_eager", **rest))
    plain = train(options(tmp_path, ema=0.9))
    names = set(load_file(plain.out))
    compiled = train(options(tmp_path, ema=0.9, compile=True))
    assert compiled.is_compiled
    assert set(load_file(compiled.out)) == names
    assert compiled.epochs[0].loss == pytest.approx(plain.epochs[0].loss, rel=0.01)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler; run apt-get install g++")
def test_a_network_is_compiled_by_this_machines_compiler(tmp_path: Path) -> None:
    plain, compiled = compare(options(tmp_path), ["cpu", "cpu:bf16:channels_last:compiled"])
    assert compiled.result is not None, compiled.unavailable
    assert (compiled.result.precision, compiled.result.layout) == ("bf16", "channels_last")
    assert compiled.result.is_compiled
    assert compiled.result.epochs[0].loss == pytest.approx(plain.result.epochs[0].loss, rel=0.05)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Many images of one class and few of the other, hard to tell apart."""
    return write_coloured(tmp_path / "images", {"red": 90, "blue": 18}, size=(12, 12), noise=220, tint=None)


recipe_options = partial(training_fixtures.options, epochs=3)


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
        "the classes are unbalanced: 10 training images of cat, 90 of dog; "
        "--class-weights balanced gives each class the same weight"
    )
    assert imbalance(("cat", "dog"), [10, 29], plain) == ""
    assert imbalance(("cat", "dog"), [10, 90], replace(plain, class_weights="balanced")) == ""
    assert "0 training images of cat" in imbalance(("cat", "dog"), [0, 90], replace(plain, class_weights="balanced"))


# --- what each option does


@pytest.mark.slow
def test_the_recipe_is_what_torch_computes_with_these_numbers(folder: Path) -> None:
    """One step of SGD without warm-up, by hand."""
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
    result = train(recipe_options(folder, amp=True))
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

    whole = recipe_options(folder, **changes)
    expected = train(whole).out.read_bytes()
    whole.out.unlink()
    assert train(whole, interrupt).is_interrupted
    assert train(replace(whole, resume=True)).out.read_bytes() == expected


@pytest.fixture
def workers_folder(tmp_path: Path) -> Path:
    return write_coloured(tmp_path / "images", {"red": 100, "blue": 100}, size=(14, 18), noise=200, tint=30)


workers_options = partial(training_fixtures.options, epochs=2, validation="0.2", loader_workers=1)


@pytest.mark.slow
@pytest.mark.long
def test_workers_change_nothing_of_what_is_learned(workers_folder: Path) -> None:
    (workers_folder / "red" / "broken.png").write_bytes(b"broken 1")  # by its hash in the train part
    state = torch.random.get_rng_state()
    with_workers = train(workers_options(workers_folder))
    content = with_workers.out.read_bytes()
    assert with_workers.skipped == ("red/broken.png",)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert train(replace(workers_options(workers_folder), loader_workers=0)).out.read_bytes() == content


@pytest.mark.slow
@pytest.mark.long
def test_an_image_that_breaks_while_the_network_learns_is_named(workers_folder: Path) -> None:
    def break_all(progress: TrainProgress) -> None:
        if progress.stage == "training" and progress.done == 1:
            for path in workers_folder.glob("*/*.png"):
                path.write_bytes(b"broken")

    with pytest.raises(JobError, match=r"an image can no longer be read: .*\.png") as caught:
        train(workers_options(workers_folder), break_all)
    assert "\n" not in str(caught.value)
