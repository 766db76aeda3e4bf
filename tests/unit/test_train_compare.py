"""`convoy train --compare`: its words, and that each variant is the same training in another form."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from convoy.models.errors import FormRefused, JobError, UsageError
from convoy.models.train import compare, train
from convoy.models.train_options import TrainOptions
from convoy.models.training.variants import TrainingVariant, parse_variants

PLAIN = TrainOptions(dataset="digits", out=Path("cnn.safetensors"), device="cpu", epochs=1)


# --- the words


def test_a_variant_is_a_device_and_any_words_in_any_order() -> None:
    assert parse_variants(["cpu", "cuda:fp16", " cpu:compiled:channels_last:bf16", "cpu"]) == (
        TrainingVariant("cpu"),
        TrainingVariant("cuda", "fp16"),
        TrainingVariant("cpu", "bf16", "channels_last", "compiled"),
    )


def test_all_is_every_word_of_what_is_left_unsaid() -> None:
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
        ("cpu:fp32:bf16", "--compare cpu:fp32:bf16 says fp32 and bf16; a variant has one of them"),
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
    from convoy.models.fit import Trainer

    layouts: list[str] = []
    real = Trainer.take_kept

    def noting(trainer: Trainer) -> Any:
        weight = dict(trainer._network.named_parameters())["conv2.weight"]
        layouts.append("contiguous" if weight.is_contiguous() else "channels_last")
        return real(trainer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "take_kept", noting)
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
    import torch

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

    def refuses(network: Any, **rest: Any) -> Any:
        raise RuntimeError("torch.compile is not supported on this Python")

    monkeypatch.setattr(torch, "compile", refuses)
    with pytest.raises(FormRefused, match=r"does not work here: torch\.compile is not supported on this Python; train"):
        train(options(tmp_path, compile=True))


@pytest.mark.slow
def test_a_compiled_network_learns_and_writes_its_own_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as ever, but without the C++ that takes its time: the names are the same with it."""
    import torch
    from safetensors.numpy import load_file

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
