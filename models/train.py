"""Training: a data set and a network of the zoo in, a checkpoint with a telling header out.

Knows the order of the work; how a network learns is in `convoy.models.fit`. Knows nothing of
terminals: it prints nothing and reports through the callback it is given. Images are read through
`convoy.models.images`, so the accuracy on the test part is that of the server's own path. torch is imported only
when training starts.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from convoy.models import zoo
from convoy.models.checkpoint import CheckpointHeader, PartRecord, convoy_version, refuse_unwritable, write_checkpoint
from convoy.models.datasets import load
from convoy.models.errors import JobError, UsageError
from convoy.models.samples import PARTS, Dataset, DecodedPart, Part, Pixels, decode
from convoy.models.spec import ImageSpec
from convoy.models.train_options import Optimizer, TrainOptions, refuse_unknown

LEARNING_RATES: dict[Optimizer, float] = {"adamw": 0.004, "sgd": 0.05}
# A mirrored photograph shows the same thing; a mirrored digit does not, nor need a class in a user's folder.
_MIRRORED_SOURCES = frozenset({"cifar10"})


@dataclass(frozen=True, slots=True)
class TrainProgress:
    """Where a run stands: images read, or epochs done and the mean loss of the last (None before the first)."""

    stage: Literal["reading images", "training"]
    done: int
    total: int
    loss: float | None = None


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What came out. Accuracy, in the header, is a fraction; `epoch_s` is the median over the epochs, `total_s`
    includes reading the images. `precision` is "fp32", "bf16" or "fp16"; `skipped` names broken images."""

    out: Path
    header: CheckpointHeader
    total_s: float
    epoch_s: float
    device: str
    precision: str
    skipped: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DeviceComparison:
    """One row of a comparison: what came out on this device, or one line on why nothing did."""

    device: str
    result: TrainResult | None
    unavailable: str | None


Report = Callable[[TrainProgress], None]


def train(options: TrainOptions, report: Report = lambda progress: None) -> TrainResult:
    """Trains, measures on the test part and writes the checkpoint to `options.out`.

    On a CPU the same seed, thread count and torch version give the same weights. Raises UsageError for a data
    set that is not there, JobError when torch or the device is missing, images are missing or broken,
    training diverges, or the file cannot be written. An interrupt leaves no file.
    """
    started_s = time.perf_counter()
    _require_torch()
    from convoy.models import fit

    device = fit.choose_device(options.device)
    refuse_unwritable(options.out)
    dataset = load(options.dataset, options.data_root)
    row = zoo.entry(options.arch)
    image = ImageSpec.plain(row.height, row.width, row.channels, "uint8_nhwc")
    training, test = _decoded(dataset, "train", image, report), _decoded(dataset, "test", image, report)
    image = _with_statistics(image, _pixels(training))

    network = fit.seeded(options.seed, lambda: zoo.create(options.arch, len(dataset.labels)))
    plan = fit.FitPlan(
        optimizer=options.optimizer,
        learning_rate=options.learning_rate or LEARNING_RATES[options.optimizer],
        batch_size=options.batch_size,
        epochs=options.epochs,
        seed=options.seed,
        mixed_precision=device.type == "cuda" if options.amp is None else options.amp,
        mirror=options.dataset in _MIRRORED_SOURCES,
        mean=image.mean,
        std=image.std,
    )
    trainer = fit.Trainer(network, plan, device)
    report(TrainProgress("training", 0, options.epochs))
    epochs_s = trainer.fit(
        _pixels(training),
        training.labels,
        lambda done, loss: report(TrainProgress("training", done, options.epochs, loss)),
    )
    header = _header(options, dataset, image, trainer.accuracy(_pixels(test), test.labels))
    write_checkpoint(options.out, trainer.weights(), header)
    return TrainResult(
        out=options.out,
        header=header,
        total_s=time.perf_counter() - started_s,
        epoch_s=statistics.median(epochs_s),
        device=device.type,
        precision=trainer.precision,
        skipped=training.skipped + test.skipped,
    )


def compare(
    options: TrainOptions, devices: Sequence[str], report: Report = lambda progress: None
) -> tuple[DeviceComparison, ...]:
    """Trains once on each of `devices` ("cpu", "cuda"), everything else equal.

    A device that is not there gives a row that says so. The checkpoint that stays is that of the last device
    that trained. Raises as `train` does, and JobError when no device trained.
    """
    for name in devices:
        refuse_unknown("--compare", name, ("cpu", "cuda"))
    if not devices:
        raise UsageError("--compare needs devices, for example cpu,cuda")
    _require_torch()
    from convoy.models import fit

    rows = []
    for name in devices:
        try:
            fit.choose_device(name)
        except JobError as error:
            rows.append(DeviceComparison(name, None, str(error)))
            continue
        run = replace(options, device="cuda" if name == "cuda" else "cpu")
        rows.append(DeviceComparison(name, train(run, report), None))
    if all(row.result is None for row in rows):
        raise JobError(f"none of {', '.join(devices)} can train here: {rows[0].unavailable}")
    return tuple(rows)


def _require_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise JobError("training needs torch, which is not installed; pip install 'convoy-serve[export]'")


def _decoded(dataset: Dataset, part: Part, image: ImageSpec, report: Report) -> DecodedPart:
    return decode(dataset.part(part), image, lambda done, total: report(TrainProgress("reading images", done, total)))


def _pixels(part: DecodedPart) -> Pixels:
    """The images of a part that was decoded with front "uint8_nhwc"."""
    return part.images.astype(np.uint8, copy=False)


def _with_statistics(image: ImageSpec, pixels: Pixels) -> ImageSpec:
    """Mean and deviation per channel over all pixels; never 0, so that a blank channel does not divide by it."""
    # Image by image, because float64 of a whole data set would not fit.
    mean = np.mean([sample.mean(axis=(0, 1)) for sample in pixels], axis=0) / 255
    square = np.mean([np.square(sample, dtype=np.float64).mean(axis=(0, 1)) for sample in pixels], axis=0) / 255**2
    std = np.sqrt(np.maximum(square - mean**2, 1e-6))
    return replace(image, mean=tuple(np.round(mean, 4).tolist()), std=tuple(np.round(std, 4).tolist()))


def _header(options: TrainOptions, dataset: Dataset, image: ImageSpec, accuracy: float) -> CheckpointHeader:
    return CheckpointHeader(
        architecture=options.arch,
        labels=dataset.labels,
        image=image,
        dataset=dataset.name,
        split={part: PartRecord(len(dataset.parts[part]), dataset.part_sha256(part)) for part in PARTS},
        convoy_version=convoy_version(),
        seed=options.seed,
        test_accuracy=accuracy,
    )
