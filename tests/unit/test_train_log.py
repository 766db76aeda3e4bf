"""What a training leaves to read: a table, a page, scalars for TensorBoard; and what a machine tells of its cost."""

from __future__ import annotations

import csv
import importlib.util
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from convoy.models.checkpoint import CheckpointHeader, PartRecord, TrainingRecord
from convoy.models.errors import JobError
from convoy.models.samples import encode_png
from convoy.models.spec import ImageSpec
from convoy.models.train import TrainProgress, train
from convoy.models.train_command import run
from convoy.models.train_options import TrainOptions
from convoy.models.training.epochs import EpochRecord
from convoy.models.training.log import COLUMNS, EpochLog
from convoy.models.training.page import TrainingStory, render


def record(epoch: int, accuracy: float | None = None, energy_j: float | None = None) -> EpochRecord:
    loss = None if accuracy is None else 1 - accuracy
    return EpochRecord(epoch, 0.1 / epoch, 1 / epoch, loss, accuracy, 2.0, 50.0, 3 << 20, energy_j)


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
        log.add(record(epoch, accuracy=0.5))
    with (tmp_path / "log.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert [row["epoch"] for row in rows] == ["1", "2"]
    assert (rows[1]["validation_accuracy"], rows[1]["energy_j"]) == ("0.5", "")


def test_a_table_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"cannot write .*: No such file or directory; .* --no-log"):
        EpochLog(tmp_path / "gone" / "log.csv", None, []).add(record(1))


def test_tensorboard_that_is_not_there_is_said_before_the_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(JobError, match="not installed; pip install tensorboard"):
        EpochLog(None, tmp_path, [])


@pytest.mark.slow
def test_tensorboard_reads_what_was_written_for_it(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EpochLog(None, tmp_path, [record(1)])
    for epoch in (2, 3):
        log.add(record(epoch, accuracy=epoch / 10))
    log.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(one.step, pytest.approx(one.value)) for one in events.Scalars("accuracy/validation")] == [
        (2, 0.2),
        (3, 0.3),
    ]
    assert "cost/energy, J" not in events.Tags()["scalars"]


# --- the page


def test_the_page_tells_the_story_and_escapes_it() -> None:
    html = render(story([record(1, 0.5), record(2, 0.8), record(3, 0.7)], kept=2, planned=3))
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
    import torch

    from convoy.models.training.meters import EnergyMeter

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


@pytest.fixture
def options(tmp_path: Path) -> TrainOptions:
    rng = np.random.default_rng(0)
    for label in ("one", "two"):
        (tmp_path / "images" / label).mkdir(parents=True)
        for index in range(30):
            png = encode_png(rng.integers(0, 255, (8, 8, 3), np.uint8))
            (tmp_path / "images" / label / f"{index}.png").write_bytes(png)
    return TrainOptions(
        str(tmp_path / "images"), tmp_path / "cnn.safetensors", device="cpu", epochs=2, validation="0.3"
    )


@pytest.mark.slow
def test_a_training_leaves_a_table_and_a_page_beside_the_weights(options: TrainOptions) -> None:
    def interrupt(progress: TrainProgress) -> None:
        if progress.last is not None and progress.done == 1:
            raise KeyboardInterrupt

    train(options, interrupt)
    assert "Interrupted after 1 of 2 epochs" in text_of(options.beside("html").read_text())
    told = io.StringIO()
    run(replace(options, resume=True), None, Console(file=told, width=200))
    assert "Interrupted" not in text_of(options.beside("html").read_text())
    assert len(options.beside("csv").read_text().splitlines()) == 3
    assert re.search(r"an epoch took \S+ s, \S+ images/s; peak memory \S+ \wiB; energy", told.getvalue())
    assert {path.name for path in options.out.parent.iterdir()} == {
        "images",
        "cnn.safetensors",
        "cnn.training.csv",
        "cnn.training.html",
    }


@pytest.mark.slow
def test_who_wants_no_log_gets_none(options: TrainOptions) -> None:
    result = train(replace(options, log=False, epochs=1))
    assert result.page is None
    assert {path.name for path in options.out.parent.iterdir()} == {"images", "cnn.safetensors"}
    peak_bytes: Any = result.epochs[0].peak_memory_bytes
    assert 50 << 20 < peak_bytes < 64 << 30
