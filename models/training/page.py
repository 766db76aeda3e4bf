"""A training as one self-contained HTML page: the result, the course, and the settings."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree.ElementTree import Element

from convoy.models.checkpoint import CheckpointHeader, TrainingRecord
from convoy.models.page.axis import Axis, number, spanning
from convoy.models.page.chart import Chart, Point
from convoy.models.page.markup import Content, card, element, page, section, table
from convoy.models.training import words
from convoy.models.training.epochs import EpochRecord

STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
_MOST_CLASSES = 40
_EPOCHS = "epochs done"


@dataclass(frozen=True, slots=True)
class TrainingStory:
    """The contents of the page. `out` is the checkpoint; `images_by_class` counts the training images, by label."""

    out: Path
    header: CheckpointHeader
    training: TrainingRecord
    epochs: Sequence[EpochRecord]
    kept: EpochRecord
    images_by_class: Sequence[int]
    device: str
    layout: str
    is_compiled: bool
    total_s: float


def render(story: TrainingStory) -> str:
    """The whole page."""
    body = element(
        "main",
        _head(story),
        _stopped(story),
        element("div", *_cards(story), class_="cards"),
        *section("How it learned", _curves(story)),
        *section("Epochs", _epochs(story)),
        *section("Images", _images(story)),
        *section("How it was trained", _recipe(story)),
    )
    return page(f"{story.out.stem}: training", body, STYLE)


def _head(story: TrainingStory) -> Element:
    header, training = story.header, story.training
    where = f"on {story.device} in {training.precision}, {story.layout}{', compiled' if story.is_compiled else ''}"
    what = f"{header.architecture} on {header.dataset}, {len(header.labels)} classes; {where}"
    return element("header", element("h1", f"{story.out.stem}: training"), element("p", what, class_="lead"))


def _stopped(story: TrainingStory) -> Element | None:
    training = story.training
    if training.epochs_done == training.epochs:
        return None
    text = f"after {training.epochs_done} of {training.epochs} epochs; run the same command with --resume to continue"
    return element("p", element("b", "Interrupted"), text, class_="verdict")


def _cards(story: TrainingStory) -> Iterator[Element]:
    header, epochs, kept = story.header, story.epochs, story.kept
    of_test = f"of {header.split['test'].images:,} images"
    if header.task == "classify":
        yield card("test accuracy", words.percent(header.test_accuracy), of_test)
    else:
        yield card(f"test {header.measure}", words.percent(header.test_accuracy), of_test)
    if kept.validation_accuracy is None:
        yield card("weights", f"epoch {kept.epoch}", "the last; nothing was held out to choose")
    else:
        right = f"{words.percent(kept.validation_accuracy)} of {header.split['validation'].images:,} validation images"
        yield card("best epoch", f"{kept.epoch} of {len(epochs)}", right)
    median_s = statistics.median(one.epoch_s for one in epochs)
    speed = statistics.median(one.images_per_s for one in epochs)
    yield card("an epoch takes", f"{number(median_s)} s", f"{number(speed)} images/s; medians")
    held = "allocated on the GPU" if story.device == "cuda" else "of the process"
    yield card("peak memory", words.memory(words.peak_memory_bytes(epochs)), held)
    whole = (
        "of all epochs, by the device's counter"
        if words.total_energy_j(epochs) is not None
        else "no counter is readable"
    )
    yield card("energy", words.energy(words.total_energy_j(epochs)), whole)


def _curves(story: TrainingStory) -> Element:
    return element("div", _loss(story), _accuracy(story), _rate(story), _speed(story), class_="charts")


def _x(story: TrainingStory) -> Axis:
    last = len(story.epochs)
    marked = tuple(float(one) for one in range(last + 1)) if last <= 8 else None
    return Axis(_EPOCHS, 0, last, marked=marked)


def _draw(chart: Chart, points: Sequence[Point], colour: str, means: str = "") -> None:
    """A line, or a dot if there is only one point."""
    if len(points) == 1:
        chart.dot(*points[0], means or chart.name, f"dot {colour}", means)
    else:
        chart.line(points, f"line {colour}", means)


def _loss(story: TrainingStory) -> Element:
    learned = [(one.epoch, one.loss) for one in story.epochs]
    seen = [(one.epoch, one.validation_loss) for one in story.epochs if one.validation_loss is not None]
    chart = Chart(
        "Loss",
        f"Loss after each epoch; {number(learned[0][1])} after the first, {number(learned[-1][1])} after the last.",
        _x(story),
        spanning("loss", [value for _, value in (*learned, *seen)], from_zero=False),
    )
    _draw(chart, learned, "k0", "training")
    if seen:
        _draw(chart, seen, "k1", "validation")
        _mark_best(chart, story, story.kept.validation_loss)
    weighted = story.training.label_smoothing or story.training.class_weights != "none"
    note = (
        "Training: distorted images, with smoothed labels or weights of classes; validation: plain." if weighted else ""
    )
    return chart.figure(note if seen else "")


def _accuracy(story: TrainingStory) -> Element | None:
    seen = [(one.epoch, 100 * one.validation_accuracy) for one in story.epochs if one.validation_accuracy is not None]
    if not seen or story.kept.validation_accuracy is None:
        return None
    lowest, highest = min(value for _, value in seen), max(value for _, value in seen)
    room = max(1.0, 0.08 * (highest - lowest))
    what, axis = "Share of the validation images that are right", "validation images right, %"
    if story.header.task != "classify":
        what, axis = f"The {story.header.measure} of the validation images", f"{story.header.measure}, %"
    chart = Chart(
        "Accuracy" if story.header.task == "classify" else "Quality",
        f"{what} after each epoch; at most {highest:.2f} %.",
        _x(story),
        Axis(axis, max(0.0, lowest - room), min(100.0, highest + room)),
    )
    _draw(chart, seen, "k1")
    _mark_best(chart, story, 100 * story.kept.validation_accuracy)
    return chart.figure()


def _mark_best(chart: Chart, story: TrainingStory, value: float | None) -> None:
    if value is not None:
        chart.dot(story.kept.epoch, value, f"epoch {story.kept.epoch}: {number(value)}", "dot k2", "best epoch")


def _rate(story: TrainingStory) -> Element:
    rates = [(one.epoch - 1, one.learning_rate) for one in story.epochs]
    about = f"The learning rate at the first step of each epoch, {story.training.schedule}."
    chart = Chart("Learning rate", about, _x(story), spanning("learning rate", [value for _, value in rates]))
    _draw(chart, rates, "k3")
    return chart.figure()


def _speed(story: TrainingStory) -> Element:
    speeds = [(one.epoch, one.images_per_s) for one in story.epochs]
    about = "Images learned from per second in each epoch."
    chart = Chart("Speed", about, _x(story), spanning("images / s", [value for _, value in speeds]))
    _draw(chart, speeds, "k0")
    return chart.figure()


def _epochs(story: TrainingStory) -> Element:
    headings = (
        "epoch",
        "loss",
        "validation loss",
        "validation, right" if story.header.task == "classify" else "validation, quality",
        "learning rate",
        "s",
        "images / s",
        "peak memory",
        "energy",
    )
    cells = [_row(one) for one in story.epochs]
    told = [at for at in range(len(headings)) if any(row[at] not in ("–", words.NOT_KNOWN) for row in cells)]
    rows = table([headings[at] for at in told], [[row[at] for at in told] for row in cells])
    body = rows.find(".//tbody")
    assert body is not None
    body[story.kept.epoch - 1].set("class", "best")
    if len(story.epochs) <= 20:
        return rows
    return element("details", element("summary", f"all {len(story.epochs)} epochs"), rows)


def _row(one: EpochRecord) -> list[Content]:
    return [
        str(one.epoch),
        f"{one.loss:.4f}",
        "–" if one.validation_loss is None else f"{one.validation_loss:.4f}",
        words.percent(one.validation_accuracy),
        number(one.learning_rate),
        number(one.epoch_s),
        number(one.images_per_s),
        words.memory(one.peak_memory_bytes),
        words.energy(one.energy_j),
    ]


def _images(story: TrainingStory) -> Element:
    parts = table(
        ("part", "images", "sha256"),
        [[name, f"{part.images:,}", element("code", part.sha256[:12])] for name, part in story.header.split.items()],
    )
    by_class = sorted(zip(story.header.labels, story.images_by_class, strict=True), key=lambda one: -one[1])
    shown: list[list[Content]] = [[label, f"{images:,}"] for label, images in by_class[:_MOST_CLASSES]]
    if len(by_class) > _MOST_CLASSES:
        rest = by_class[_MOST_CLASSES:]
        shown.append([f"{len(rest)} more, with at most {rest[0][1]:,} each", f"{sum(images for _, images in rest):,}"])
    return element("div", parts, table(("class", "images to learn from"), shown), class_="pair")


def _recipe(story: TrainingStory) -> Element:
    training, header = story.training, story.header
    rate = f"at most {training.learning_rate:g}, {training.schedule}, warm-up {training.warm_up:.0%} of the run"
    rows: dict[str, str] = {
        "weights": str(story.out),
        "started from": training.started_from or "weights drawn at random",
        "what learned": "the head alone" if training.is_frozen else "all of the network",
        "optimiser": f"{training.optimizer}, weight decay {training.weight_decay:g}",
        "learning rate": rate,
        "batch": f"{training.batch_size} images",
        "label smoothing": f"{training.label_smoothing:g}",
        "class weights": training.class_weights,
        "average of weights": f"decay {training.ema_decay:g}" if training.ema_decay else "none",
        "images": f"{header.image.height}x{header.image.width}, {header.image.resize_mode.replace('_', ' ')}",
        "seed": str(header.seed),
        "time": f"{number(story.total_s)} s since the command was started, images read and measured included",
        "Convoy": header.convoy_version,
    }
    return table(("", ""), rows.items(), class_="words")
