"""Training: from a data set and a network to a checkpoint with a complete header.

Knows the order of the work; `convoy.models.fit` trains. It prints nothing and reports through a callback. Images are
read through `convoy.models.images`, so the accuracy on the test part is that of the server's own code. torch is
imported only when training starts.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from convoy.models import zoo
from convoy.models.checkout import pip_install
from convoy.models.checkpoint import (
    CheckpointHeader,
    TrainingRecord,
    convoy_version,
    read_checkpoint_header,
    refuse_unwritable,
    write_checkpoint,
    write_whole,
)
from convoy.models.datasets import load
from convoy.models.errors import FormRefused, JobError, UsageError
from convoy.models.samples import Dataset
from convoy.models.shapes.shape_set import MASK_CLASSES, SHAPES, named_set
from convoy.models.tasks import Task
from convoy.models.train_options import TORCHVISION, Layout, Optimizer, TrainOptions, TrainPrecision
from convoy.models.training.epochs import EpochRecord
from convoy.models.training.held_out import hold_out
from convoy.models.training.log import EpochLog, refuse_no_tensorboard
from convoy.models.training.page import TrainingStory, render
from convoy.models.training.schedule import WARM_UP_SHARES
from convoy.models.training.variants import TrainingVariant, parse_variants

if TYPE_CHECKING:
    import torch

    from convoy.models.fit import FitPlan, Trainer
    from convoy.models.training.networks import InitialNetwork
    from convoy.models.training.objectives import Objective
    from convoy.models.training.split_data import SplitData
    from convoy.models.training.unfinished import UnfinishedFile

LEARNING_RATES: dict[Optimizer, float] = {"adamw": 0.004, "sgd": 0.05}
WEIGHT_DECAYS: dict[Optimizer, float] = {"adamw": 0.05, "sgd": 5e-4}
EPOCHS: dict[Task, int] = {"classify": 60, "detect": 12, "segment": 12}
BATCH_SIZES: dict[Task, int] = {"classify": 64, "detect": 16, "segment": 16}
# A mirrored photograph shows the same thing. A mirrored digit does not, and a class of a user's folder need not.
_MIRRORED_SOURCES = frozenset({"cifar10"})
# Larger images are evaluated in batches of the training size, to save memory.
_EVALUATION_BATCH, _SMALL_IMAGE_PIXELS = 256, 64 * 64


@dataclass(frozen=True, slots=True)
class TrainProgress:
    """The progress of a run: images read, or epochs done and the last of them (None before the first).

    `says` is a message to show once.
    """

    stage: Literal["reading images", "drawing images", "training"]
    done: int
    total: int
    last: EpochRecord | None = None
    says: str = ""

    @property
    def loss(self) -> float | None:
        """The mean loss of the last epoch."""
        return None if self.last is None else self.last.loss


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The result. Accuracy, in the header, is a fraction; `epoch_s` is the median over the epochs, `total_s` includes
    reading the images. `precision` is that of the forward pass; `skipped` names broken images.

    `out` is the checkpoint with the weights of `kept`, the best of `epochs`, of which there are fewer than planned if
    the run was interrupted. `images_by_class` counts the training images by label. `page` shows everything.
    """

    out: Path
    header: CheckpointHeader
    total_s: float
    epoch_s: float
    device: str
    precision: TrainPrecision
    layout: Layout
    is_compiled: bool
    skipped: tuple[str, ...]
    epochs: tuple[EpochRecord, ...]
    kept: EpochRecord
    is_interrupted: bool
    images_by_class: tuple[int, ...]
    page: Path | None


@dataclass(frozen=True, slots=True)
class Compared:
    """One row of a comparison: the result of this variant, or one line on why there is none."""

    variant: TrainingVariant
    result: TrainResult | None
    unavailable: str | None


Report = Callable[[TrainProgress], None]


def train(options: TrainOptions, report: Report = lambda progress: None) -> TrainResult:
    """Train, measure the best epoch on the test part and write the checkpoint to `options.out`.

    On a CPU, the same seed, thread count and torch version give the same weights, also if the run was interrupted and
    resumed. Raises UsageError for a missing data set; FormRefused if the device is missing, training diverges, or the
    network does not compile or fit into memory; JobError if torch is missing, images are missing or broken, or a file
    cannot be written. An interrupt before the end of the first epoch leaves no file; a later one ends the training with
    the best epoch so far.
    """
    started_s = time.perf_counter()
    _require_torch()
    from convoy.models import fit
    from convoy.models.training.unfinished import UnfinishedFile

    device = fit.choose_device(options.device)
    refuse_unwritable(options.out)
    if options.tensorboard is not None:
        refuse_no_tensorboard()
    shapes = named_set(options.dataset)
    dataset = load(options.dataset, options.data_root) if shapes is None else None
    initial = _initial_network(options, _labels(options, dataset), report)
    data = _data(options, dataset, initial, report)
    plan = _plan(options, data, initial, device)
    if plan.precision == "bf16" and device.type == "cpu" and not _has_bf16():
        _tell(report, "this processor has no BF16 instructions, so training may be slower than in fp32")
    trainer = fit.Trainer(initial.network, plan, device, _objective(options, data))
    unfinished = UnfinishedFile(options.beside("resume"), _asked(options, data, initial))
    _take_up(trainer, unfinished, options, report)
    log = EpochLog(options.beside("csv") if options.log else None, options.tensorboard, trainer.records)
    is_interrupted = False
    try:
        trainer.fit(data.training, data.validation, _after_epoch(trainer, unfinished, log, options, report))
    except KeyboardInterrupt:
        if trainer.kept is None:
            raise
        is_interrupted = True
        unfinished.write_waiting()
    finally:
        log.close()
    kept = trainer.take_kept()
    accuracy = trainer.evaluate(data.test).accuracy
    header = _header(options, data, trainer, accuracy, initial.started_from)
    out = _place(options.out, is_interrupted=is_interrupted)
    write_checkpoint(out, trainer.weights(), header)
    if not is_interrupted:
        unfinished.remove()
    result = TrainResult(
        out=out,
        header=header,
        total_s=time.perf_counter() - started_s,
        epoch_s=statistics.median(record.epoch_s for record in trainer.records),
        device=device.type,
        precision=plan.precision,
        layout=trainer.layout,
        is_compiled=plan.is_compiled,
        skipped=data.skipped,
        epochs=tuple(trainer.records),
        kept=kept.record,
        is_interrupted=is_interrupted,
        images_by_class=data.images_by_class,
        page=options.beside("html") if options.log else None,
    )
    _write_page(result)
    return result


def compare(
    options: TrainOptions, variants: Sequence[str], report: Report = lambda progress: None
) -> tuple[Compared, ...]:
    """Train each of `variants`, such as "cpu" and "cuda:fp16:compiled", once, with everything else equal.

    A variant that cannot be trained here gives a row that says why. The checkpoint of the last successful variant is
    kept. Raises UsageError for an unknown variant, JobError if none trained, and otherwise as `train` does.
    """
    wanted = parse_variants(variants)
    if options.resume:
        raise UsageError("--compare trains each variant from the first epoch; remove --resume")
    rows = []
    for variant in wanted:
        try:
            result = train(variant.options(options), report)
        except FormRefused as error:
            rows.append(Compared(variant, None, str(error)))
            continue
        if result.is_interrupted:
            raise KeyboardInterrupt
        rows.append(Compared(variant, result, None))
    if all(row.result is None for row in rows):
        raise JobError(f"none of {', '.join(map(str, wanted))} can train here: {rows[0].unavailable}")
    return tuple(rows)


def _has_bf16() -> bool:
    """Whether Linux reports BF16 for this processor; on other systems no one is warned."""
    try:
        return "bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return True


def _require_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise JobError(f"training needs torch, which is not installed; {pip_install('export')}")


def _initial_network(options: TrainOptions, labels: tuple[str, ...], report: Report) -> InitialNetwork:
    """The network at its start, made before images are read so that misfits are found early."""
    from convoy.models import fit
    from convoy.models.training import networks

    start = None if options.weights is None else networks.read_start(options, labels)
    image, is_settled = networks.image_of(options.arch, options.image_size, start)
    network = fit.seeded(options.seed, lambda: networks.build(options.arch, len(labels), image))
    if start is None:
        return networks.InitialNetwork(network, image, is_settled)
    head = networks.head(options.arch, len(labels))
    filled = networks.fill(network, start, head)
    if filled.said:
        _tell(report, f"weights: {filled.said}")
    if not filled.has_head:
        _tell(report, f"the head is new, for {len(labels)} classes; all else begins with {options.weights}")
    started_from = "; ".join(filter(None, (start.says, filled.said)))
    return networks.InitialNetwork(network, image, is_settled, started_from, head if options.freeze else None)


def _labels(options: TrainOptions, dataset: Dataset | None) -> tuple[str, ...]:
    """The classes of the data set, or those of the shapes if there is none."""
    if dataset is not None:
        return dataset.labels
    return SHAPES if options.task == "detect" else MASK_CLASSES


def _data(options: TrainOptions, dataset: Dataset | None, initial: InitialNetwork, report: Report) -> SplitData:
    """The images of the data set, or drawn shapes if there is none."""
    if dataset is not None:
        return _split_data(options, dataset, initial, report)
    from convoy.models.training.drawn_data import draw_split_data

    return draw_split_data(
        options.dataset,
        _labels(options, None),
        options.task,
        initial.image,
        is_settled=initial.is_settled,
        validation=options.validation,
        progress=lambda done, total: report(TrainProgress("drawing images", done, total)),
    )


def _objective(options: TrainOptions, data: SplitData) -> Objective | None:
    """What a detector or a network for masks learns; None for a classifier."""
    if options.task == "detect":
        from convoy.models.training.detecting import Boxes

        said = zoo.entry(options.arch).detection
        assert said is not None
        return Boxes(data.image.height, said)
    if options.task == "segment":
        from convoy.models.training.segmenting import Masks

        return Masks()
    return None


def _split_data(options: TrainOptions, dataset: Dataset, initial: InitialNetwork, report: Report) -> SplitData:
    from convoy.models.training.split_data import read_split_data

    held_out = hold_out(dataset, options.validation)
    if held_out.left_out:
        _tell(
            report,
            f"{held_out.left_out} images of {options.validation} are also in the data set and were removed from it",
        )

    def progress(done: int, total: int) -> None:
        report(TrainProgress("reading images", done, total))

    data = read_split_data(dataset, held_out, initial.image, initial.is_settled, options.loader_workers, progress)
    if text := imbalance(data.labels, data.images_by_class, options):
        _tell(report, text)
    return data


def balanced(images_by_class: Sequence[int]) -> tuple[float, ...]:
    """One factor per class, so that all classes have equal weight and the mean over all images is 1."""
    present = sum(1 for images in images_by_class if images)
    return tuple(sum(images_by_class) / (present * images) if images else 0.0 for images in images_by_class)


def imbalance(labels: Sequence[str], images_by_class: Sequence[int], options: TrainOptions) -> str:
    """A note on classes with very different numbers of training images; empty if they are similar."""
    fewest, most = min(images_by_class), max(images_by_class)
    # The ratio of the largest to the smallest class from which on to say so.
    if most < 3 * fewest or (options.class_weights != "none" and fewest):
        return ""
    rare, common = labels[images_by_class.index(fewest)], labels[images_by_class.index(most)]
    advice = "--class-weights balanced gives each class the same weight" if fewest else f"add images of {rare}"
    return f"the classes are unbalanced: {fewest} training images of {rare}, {most} of {common}; {advice}"


def default_rate(options: TrainOptions) -> float:
    """The default peak learning rate: a tenth for weights that have already learned."""
    is_tuned = options.weights is not None and not options.freeze
    return LEARNING_RATES[options.optimizer] * (0.1 if is_tuned else 1)


def _plan(options: TrainOptions, data: SplitData, initial: InitialNetwork, device: torch.device) -> FitPlan:
    from convoy.models import fit

    is_gpu = device.type == "cuda"
    is_mixed = is_gpu if options.amp is None else options.amp
    image = data.image
    batch_size = options.batch_size or BATCH_SIZES[options.task]
    is_small = image.height * image.width <= _SMALL_IMAGE_PIXELS
    return fit.FitPlan(
        optimizer=options.optimizer,
        learning_rate=options.learning_rate or default_rate(options),
        batch_size=batch_size,
        evaluation_batch=_EVALUATION_BATCH if is_small else batch_size,
        epochs=options.epochs or EPOCHS[options.task],
        seed=options.seed,
        precision=options.precision or (fit.mixed_precision(device) if is_mixed else "fp32"),
        mirror=options.dataset in _MIRRORED_SOURCES,
        mean=image.mean,
        std=image.std,
        weight_decay=WEIGHT_DECAYS[options.optimizer] if options.weight_decay is None else options.weight_decay,
        label_smoothing=options.label_smoothing if options.task == "classify" else 0.0,
        schedule=options.schedule,
        warm_up=WARM_UP_SHARES[options.schedule] if options.warm_up is None else options.warm_up,
        ema_decay=options.ema,
        class_weights=None if options.class_weights == "none" else balanced(data.images_by_class),
        trained=initial.learns,
        channels_last=is_gpu if options.channels_last is None else options.channels_last,
        is_compiled=options.compile,
    )


def _asked(options: TrainOptions, data: SplitData, initial: InitialNetwork) -> dict[str, str]:
    """Everything that determines what is learned, by option name."""
    images = {f"{part} images": f"{record.images} of {record.sha256[:12]}" for part, record in data.split.items()}
    return options.deciding() | images | ({"weights": initial.started_from} if initial.started_from else {})


def _take_up(trainer: Trainer, unfinished: UnfinishedFile, options: TrainOptions, report: Report) -> None:
    """Continue an interrupted run if `--resume` asks for it. Raises JobError if it is another run."""
    if not options.resume:
        if unfinished.path.exists():
            _tell(
                report,
                f"{unfinished.path} has an interrupted run; --resume would continue it, this run starts again",
            )
        return
    found = unfinished.read()
    if found is None:
        _tell(report, f"there is no interrupted run in {unfinished.path}; starting with the first epoch")
        return
    try:
        trainer.restore(found.state, found.run.records, found.run.kept)
    except (RuntimeError, ValueError, KeyError) as error:
        raise JobError(f"{unfinished.path} is from another version of Convoy or torch; remove --resume") from error
    _tell(report, f"resuming after epoch {len(found.run.records)} of {trainer.plan.epochs}")


def _after_epoch(
    trainer: Trainer, unfinished: UnfinishedFile, log: EpochLog, options: TrainOptions, report: Report
) -> Callable[[EpochRecord], None]:
    epochs = trainer.plan.epochs
    report(TrainProgress("training", len(trainer.records), epochs, trainer.records[-1] if trainer.records else None))

    def keep(record: EpochRecord) -> None:
        assert trainer.kept is not None
        unfinished.keep(trainer.records, trainer.kept.record, trainer.state(), at_once=options.resume)
        log.add(record)
        report(TrainProgress("training", record.epoch, epochs, record))

    return keep


def _write_page(result: TrainResult) -> None:
    if result.page is None or result.header.training is None:
        return
    story = TrainingStory(
        out=result.out,
        header=result.header,
        training=result.header.training,
        epochs=result.epochs,
        kept=result.kept,
        images_by_class=result.images_by_class,
        device=result.device,
        layout=result.layout,
        is_compiled=result.is_compiled,
        total_s=result.total_s,
    )
    write_whole(result.page, render(story).encode())


def _tell(report: Report, text: str) -> None:
    report(TrainProgress("reading images", 0, 0, says=text))


def _place(out: Path, *, is_interrupted: bool) -> Path:
    """Where to write the weights: an interrupted run does not replace those of a complete one."""
    if not is_interrupted or not out.exists():
        return out
    with suppress(JobError):
        there = read_checkpoint_header(out)
        if there is not None and there.training is not None and there.training.epochs_done < there.training.epochs:
            return out
    return out.with_name(f"{out.stem}.interrupted{out.suffix}")


def _header(
    options: TrainOptions, data: SplitData, trainer: Trainer, accuracy: float, started_from: str
) -> CheckpointHeader:
    plan = trainer.plan
    kept = trainer.take_kept().record
    known = None if options.arch.startswith(TORCHVISION) else zoo.entry(options.arch)
    return CheckpointHeader(
        architecture=options.arch,
        labels=data.labels,
        image=data.image,
        dataset=data.dataset,
        split=data.split,
        convoy_version=convoy_version(),
        seed=options.seed,
        test_accuracy=accuracy,
        training=TrainingRecord(
            epochs=plan.epochs,
            epochs_done=len(trainer.records),
            best_epoch=kept.epoch,
            validation_accuracy=kept.validation_accuracy,
            precision=plan.precision,
            optimizer=plan.optimizer,
            learning_rate=plan.learning_rate,
            batch_size=plan.batch_size,
            schedule=plan.schedule,
            warm_up=plan.warm_up,
            weight_decay=plan.weight_decay,
            label_smoothing=plan.label_smoothing,
            class_weights=options.class_weights,
            ema_decay=plan.ema_decay or 0.0,
            started_from=started_from,
            is_frozen=plan.trained is not None,
        ),
        task=options.task,
        activation=known.activation if known else None,
        detection=known.detection if known else None,
    )
