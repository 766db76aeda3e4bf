"""A training that is interrupted and goes on, its best epoch, and what it leaves to read."""

from __future__ import annotations

import csv
import importlib.util
import io
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors.torch import load_file
from training_fixtures import options, write_coloured

from convoy.models import zoo
from convoy.models.checkpoint import CheckpointHeader, PartRecord, TrainingRecord, read_checkpoint_header
from convoy.models.datasets import load_folder
from convoy.models.errors import JobError, UsageError
from convoy.models.images import preprocess
from convoy.models.samples import encode_png
from convoy.models.spec import ImageSpec
from convoy.models.train import TrainProgress, train
from convoy.models.train_command import run
from convoy.models.train_options import parse_validation
from convoy.models.training.epochs import EpochRecord
from convoy.models.training.held_out import hold_out
from convoy.models.training.log import COLUMNS, EpochLog
from convoy.models.training.meters import EnergyMeter
from convoy.models.training.page import TrainingStory, render

torch = pytest.importorskip("torch")


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
    return EpochRecord(epoch, 0.1 / epoch, 1 / epoch, loss, accuracy, 2.0, 50.0, 3 << 20, energy_j=None)


# --- what is held out


def test_a_share_a_percentage_and_a_folder_are_read_and_all_else_is_named(tmp_path: Path) -> None:
    assert [parse_validation(text) for text in ("0.25", "25%", str(tmp_path))] == [0.25, 0.25, tmp_path]
    for text in ("0", "1", "100%", "-0.1", "nan", "2.5"):
        with pytest.raises(UsageError, match=r"is not a share of the training images; use a share such as 0\.1"):
            parse_validation(text)
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
    with pytest.raises(JobError, match="use other images"):
        hold_out(load_folder(folder), str(folder))
    (other / "green").mkdir()
    (other / "green" / "1.png").write_bytes(encode_png(np.zeros((4, 4, 3), np.uint8)))
    with pytest.raises(JobError, match="classes unknown to the model: green"):
        hold_out(load_folder(folder), str(other))


def test_the_best_epoch_is_the_most_accurate_then_the_surest_then_the_first() -> None:
    assert record(2, 0.9, 0.5).is_better_than(record(1, 0.8, 0.1))
    assert record(2, 0.9, 0.4).is_better_than(record(1, 0.9, 0.5))
    assert not record(2, 0.9, 0.5).is_better_than(record(1, 0.9, 0.5))
    assert record(2, None, None).is_better_than(record(1, None, None))


# --- the best epoch


@pytest.mark.slow
def test_the_weights_that_are_written_are_those_of_the_best_epoch(folder: Path) -> None:
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
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it
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
        assert killed.stderr.endswith("run the same command with --resume to continue\n")
        assert len(killed.stderr.splitlines()) == 1
        assert read_checkpoint_header(out) is not None
    else:
        assert not out.exists()
    on = [sys.executable, "-m", "convoy", *command, str(out)]
    done = subprocess.run(on, capture_output=True, text=True, check=True)
    assert "resuming after epoch 2 of 3" in done.stdout
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
    with pytest.raises(JobError, match="was started with --epochs 4, not 5; use the same, or remove --resume"):
        train(options(folder, resume=True, epochs=5))
    with pytest.raises(JobError, match=r"was started with --lr None, not 0\.001"):
        train(options(folder, resume=True, learning_rate=0.001))
    write_images(folder, 20, seed=5)
    with pytest.raises(JobError, match=r"was started with .* images"):
        train(options(folder, resume=True))
    says = []
    train(options(folder, epochs=1), lambda progress: says.append(progress.says))
    assert any("--resume would continue it, this run starts again" in text for text in says)


@pytest.mark.slow
def test_a_broken_file_of_a_run_is_one_line(folder: Path) -> None:
    asked = options(folder, resume=True)
    asked.beside("resume").write_bytes(b"PK nothing")
    with pytest.raises(JobError, match="is not a readable unfinished run") as caught:
        train(asked)
    assert "\n" not in str(caught.value)


def log_record(epoch: int, accuracy: float | None = None) -> EpochRecord:
    return record(epoch, accuracy, None if accuracy is None else 1 - accuracy)


def story(epochs: list[EpochRecord], kept: int, planned: int) -> TrainingStory:
    training = TrainingRecord(
        epochs=planned,
        epochs_done=len(epochs),
        best_epoch=kept,
        validation_accuracy=epochs[kept - 1].validation_accuracy,
        precision="fp32",
        optimizer="sgd",
        learning_rate=0.1,
        batch_size=16,
        schedule="cosine",
        warm_up=0.05,
        weight_decay=0.0,
        label_smoothing=0.1,
        class_weights="none",
        ema_decay=0.0,
        started_from="",
        is_frozen=False,
    )
    header = CheckpointHeader(
        architecture="simple_cnn",
        labels=("<cat>", "dog"),
        image=ImageSpec.plain(32, 32, 3, "uint8_nhwc"),
        dataset="pets",
        split={part: PartRecord(10, "a" * 64) for part in ("train", "calibration", "test", "validation")},
        convoy_version="0.1.0",
        seed=0,
        test_accuracy=0.9,
        training=training,
    )
    return TrainingStory(
        out=Path("pets.safetensors"),
        header=header,
        training=training,
        epochs=epochs,
        kept=epochs[kept - 1],
        images_by_class=(7, 3),
        device="cpu",
        layout="channels_last",
        is_compiled=True,
        total_s=9.0,
    )


def text_of(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html.partition("<body>")[2]))


# --- the table


def test_the_table_has_a_line_for_each_epoch_and_an_empty_cell_for_what_is_not_known(tmp_path: Path) -> None:
    log = EpochLog(tmp_path / "log.csv", None, [])
    assert not (tmp_path / "log.csv").exists()
    for epoch in (1, 2):
        log.add(log_record(epoch, accuracy=0.5))
    with (tmp_path / "log.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert [row["epoch"] for row in rows] == ["1", "2"]
    assert (rows[1]["validation_accuracy"], rows[1]["energy_j"]) == ("0.5", "")


def test_a_table_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"cannot write .*: No such file or directory; .* --no-log"):
        EpochLog(tmp_path / "gone" / "log.csv", None, []).add(log_record(1))


def test_tensorboard_that_is_not_there_is_said_before_the_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(JobError, match="not installed; pip install tensorboard"):
        EpochLog(None, tmp_path, [])


@pytest.mark.slow
def test_tensorboard_reads_what_was_written_for_it(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EpochLog(None, tmp_path, [log_record(1)])
    for epoch in (2, 3):
        log.add(log_record(epoch, accuracy=epoch / 10))
    log.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(one.step, pytest.approx(one.value)) for one in events.Scalars("accuracy/validation")] == [
        (2, 0.2),
        (3, 0.3),
    ]
    assert "cost/energy, J" not in events.Tags()["scalars"]


# --- the page


def test_the_page_tells_the_story_and_escapes_it() -> None:
    html = render(story([log_record(1, 0.5), log_record(2, 0.8), log_record(3, 0.7)], kept=2, planned=3))
    text = text_of(html)
    assert "<cat>" not in html
    assert "90.00 %" in text
    assert "on cpu in fp32, channels_last, compiled" in text
    assert "2 of 3" in text
    assert "80.00 % of 10 validation images" in text
    assert "not known" in text  # energy
    assert "Interrupted" not in text
    assert html.count("<svg") > 4
    assert 'tr class="best"><th scope="row">2<' in html
    assert not re.search(r"(src|href)=", html)


# --- what the machine tells


@pytest.mark.slow
def test_energy_is_the_sum_over_processors_and_counters_begin_anew(tmp_path: Path) -> None:
    def counters(*values_uj: int) -> None:
        for number, value_uj in enumerate(values_uj):
            folder = tmp_path / f"intel-rapl:{number}"
            folder.mkdir(exist_ok=True)
            (folder / "energy_uj").write_text(f"{value_uj}\n")
            (folder / "max_energy_range_uj").write_text("10000000\n")
        (tmp_path / "intel-rapl:0:0").mkdir(exist_ok=True)  # a part of what the first tells

    assert EnergyMeter(torch.device("cpu"), tmp_path / "nothing").used_j() is None
    counters(1_000_000, 9_000_000)
    meter = EnergyMeter(torch.device("cpu"), tmp_path)
    meter.start()
    counters(3_000_000, 500_000)
    assert meter.used_j() == pytest.approx(2 + 1.5)
    counters(4_000_000, 600_000)
    assert meter.used_j() == pytest.approx(3 + 1.6)
    (tmp_path / "intel-rapl:0" / "energy_uj").unlink()  # or may not be read
    assert meter.used_j() is None


# --- all of it


@pytest.mark.slow
def test_a_training_leaves_a_table_and_a_page_beside_the_weights_unless_no_log_is_wanted(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", 30)
    short_run = options(folder, epochs=2, validation="0.3")
    result = train(replace(short_run, log=False, epochs=1))
    assert result.page is None
    assert {path.name for path in tmp_path.iterdir()} == {"images", "cnn.safetensors"}
    peak_bytes: Any = result.epochs[0].peak_memory_bytes
    assert 50 << 20 < peak_bytes < 64 << 30
    result.out.unlink()
    train(short_run, interrupting(1))
    assert "Interrupted after 1 of 2 epochs" in text_of(short_run.beside("html").read_text())
    told = io.StringIO()
    run(replace(short_run, resume=True), None, Console(file=told, width=200))
    assert "Interrupted" not in text_of(short_run.beside("html").read_text())
    assert len(short_run.beside("csv").read_text().splitlines()) == 3
    assert re.search(r"an epoch took \S+ s, \S+ images/s; peak memory \S+ \wiB; energy", told.getvalue())
    left = ["cnn.safetensors", "cnn.training.csv", "cnn.training.html", "images"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left
