"""A validation part, the best epoch by it, and runs that are interrupted and go on as if nothing had been."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from training_fixtures import options, write_coloured

from convoy.models.checkpoint import read_checkpoint_header
from convoy.models.datasets import load_folder
from convoy.models.errors import JobError, UsageError
from convoy.models.samples import encode_png
from convoy.models.train import TrainProgress, train
from convoy.models.train_options import parse_validation
from convoy.models.training.epochs import EpochRecord
from convoy.models.training.held_out import hold_out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes that are told apart with some errors: a little more red, and a little more blue."""
    return write_images(tmp_path / "images", 60)


def write_images(root: Path, count: int, seed: int = 0) -> Path:
    return write_coloured(root, {"red": count, "blue": count}, size=(12, 12), noise=200, tint=None, seed=seed)


def interrupting(after: int) -> Callable[[TrainProgress], None]:
    """As Ctrl-C does, once that many epochs are done."""

    def report(progress: TrainProgress) -> None:
        if progress.stage == "training" and progress.done == after and progress.last is not None:
            raise KeyboardInterrupt

    return report


def record(epoch: int, accuracy: float | None, loss: float | None) -> EpochRecord:
    return EpochRecord(epoch, 0.1, 0.5, loss, accuracy, 1.0, 10.0, None, None)


# --- what is held out


@pytest.mark.parametrize("text", ["0", "1", "100%", "-0.1", "nan", "2.5"])
def test_what_is_no_share_is_named(text: str) -> None:
    with pytest.raises(UsageError, match=r"is no share of the training images; use one such as 0\.1"):
        parse_validation(text)


def test_a_share_a_percentage_and_a_folder_are_read(tmp_path: Path) -> None:
    assert (parse_validation("0.25"), parse_validation("25%"), parse_validation(str(tmp_path))) == (
        0.25,
        0.25,
        tmp_path,
    )
    with pytest.raises(UsageError, match="there is no such folder"):
        options(tmp_path, validation="gone")


def test_a_share_is_the_same_images_every_time_and_of_no_other_part(folder: Path) -> None:
    dataset = load_folder(folder)
    held = hold_out(dataset, "0.3")
    assert held == hold_out(dataset, "30%")
    assert {*held.training, *held.validation} == {*dataset.parts["train"]}
    assert not {*held.training} & {*held.validation}
    assert 0.15 < len(held.validation) / len(dataset.parts["train"]) < 0.45
    with pytest.raises(JobError, match="leaves 0 for validation"):
        hold_out(dataset, "1e-9")


def test_a_folder_gives_what_the_data_set_has_not(folder: Path, tmp_path: Path) -> None:
    other = write_images(tmp_path / "other", 5, seed=9)
    again = next((folder / "red").iterdir())
    (other / "red" / "again.png").write_bytes(again.read_bytes())
    held = hold_out(load_folder(folder), str(other))
    assert (len(held.validation), held.left_out) == (10, 1)
    assert {sample.label for sample in held.validation} == {0, 1}
    with pytest.raises(JobError, match="put others there"):
        hold_out(load_folder(folder), str(folder))
    (other / "green").mkdir()
    (other / "green" / "1.png").write_bytes(encode_png(np.zeros((4, 4, 3), np.uint8)))
    with pytest.raises(JobError, match="classes that the model lacks: green"):
        hold_out(load_folder(folder), str(other))


def test_the_best_epoch_is_the_most_accurate_then_the_surest_then_the_first() -> None:
    assert record(2, 0.9, 0.5).is_better_than(record(1, 0.8, 0.1))
    assert record(2, 0.9, 0.4).is_better_than(record(1, 0.9, 0.5))
    assert not record(2, 0.9, 0.5).is_better_than(record(1, 0.9, 0.5))
    assert record(2, None, None).is_better_than(record(1, None, None))


# --- the best epoch


@pytest.mark.slow
def test_the_weights_that_are_written_are_those_of_the_best_epoch(folder: Path) -> None:
    import torch
    from safetensors.torch import load_file

    from convoy.models import zoo
    from convoy.models.images import preprocess

    result = train(options(folder, validation="0.3", epochs=6, optimizer="sgd", learning_rate=0.3))
    accuracies = [one.validation_accuracy for one in result.epochs]
    assert None not in accuracies
    assert result.kept.validation_accuracy == max(accuracies)  # type: ignore[type-var]
    assert result.kept.epoch < 6, "the last epoch happens to be the best; the test says nothing"
    training = result.header.training
    assert (training.best_epoch, training.validation_accuracy) == (result.kept.epoch, result.kept.validation_accuracy)
    held = hold_out(load_folder(folder), "0.3")
    assert result.header.split["validation"].images == len(held.validation)
    assert result.header.split["train"].images == len(held.training)
    network = zoo.create("simple_cnn", 2)
    network.load_state_dict(load_file(result.out))
    image = replace(result.header.image, front="float32_nchw")
    inputs = torch.from_numpy(np.stack([preprocess(sample.encoded(), image) for sample in held.validation]))
    right = (network(inputs).argmax(1).numpy() == [sample.label for sample in held.validation]).mean()
    assert right == pytest.approx(result.kept.validation_accuracy)


# --- interrupted, and on


KILLS_ITSELF = """
import os, sys
from convoy.models import train_command
plain = train_command._reporter
def reporter(bars):
    report = plain(bars)
    def told(progress):
        report(progress)
        if progress.stage == "training" and progress.done == 2:
            os.kill(os.getpid(), int(sys.argv[1]))
    return told
train_command._reporter = reporter
from convoy.command import main
main(sys.argv[2:])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kill", "exit_code"), [pytest.param(signal.SIGINT, 1, marks=pytest.mark.long), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_after_a_kill_the_same_command_goes_on(folder: Path, kill: signal.Signals, exit_code: int) -> None:
    whole, out = folder.parent / "whole.safetensors", folder.parent / "cnn.safetensors"
    command = ["train", str(folder), "--epochs", "3", "--batch-size", "16", "--device", "cpu", "--resume", "--out"]
    train(options(folder, epochs=3, out=whole))
    killed = subprocess.run(
        [sys.executable, "-c", KILLS_ITSELF, str(int(kill)), *command, str(out)], capture_output=True, text=True
    )
    assert killed.returncode == exit_code
    if kill == signal.SIGINT:
        assert killed.stderr.startswith("convoy: interrupted after epoch 2 of 3; its weights (")
        assert killed.stderr.endswith("the same command with --resume goes on\n")
        assert len(killed.stderr.splitlines()) == 1
        assert read_checkpoint_header(out) is not None
    else:
        assert not out.exists()
    on = [sys.executable, "-m", "convoy", *command, str(out)]
    done = subprocess.run(on, capture_output=True, text=True, check=True)
    assert "going on after epoch 2 of 3" in done.stdout
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.slow
def test_an_interrupted_run_does_not_replace_the_weights_of_a_whole_one(folder: Path) -> None:
    out = train(options(folder, epochs=1)).out
    before = out.read_bytes()
    result = train(options(folder), interrupting(1))
    assert result.out == out.with_name("cnn.interrupted.safetensors")
    assert read_checkpoint_header(result.out) == result.header
    assert out.read_bytes() == before
    assert train(options(folder, resume=True)).out == out


@pytest.mark.slow
def test_another_run_does_not_go_on_from_it(folder: Path) -> None:
    train(options(folder), interrupting(1))
    with pytest.raises(JobError, match="was started with --epochs 4, not 5; say the same, or leave --resume out"):
        train(options(folder, resume=True, epochs=5))
    with pytest.raises(JobError, match=r"was started with --lr None, not 0\.001"):
        train(options(folder, resume=True, learning_rate=0.001))
    write_images(folder, 20, seed=5)
    with pytest.raises(JobError, match=r"was started with .* images"):
        train(options(folder, resume=True))
    says = []
    train(options(folder, epochs=1), lambda progress: says.append(progress.says))
    assert any("from which --resume goes on; this one starts anew" in text for text in says)


@pytest.mark.slow
def test_a_broken_file_of_a_run_is_one_line(folder: Path) -> None:
    asked = options(folder, resume=True)
    asked.beside("resume").write_bytes(b"PK nothing")
    with pytest.raises(JobError, match="is no unfinished run that can be read") as caught:
        train(asked)
    assert "\n" not in str(caught.value)
