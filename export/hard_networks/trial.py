"""One hard network: trained on drawn characters, exported with INT8, and what came of it.

Knows the networks, their training and where the figures of a bundle stand. Knows nothing of the table.
"""

from __future__ import annotations

import csv
import math
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from convoy.app.engines.cpu import cpu_budget, cpu_model, has_int8_dot_product
from convoy.app.engines.machine import find_cpu
from convoy.app.engines.measure import run_in_turns
from convoy.app.engines.speedup import paired_speedup
from convoy.app.engines.table import ROWS
from convoy.export.cache import NO_CACHE, StepCache
from convoy.export.command import export_bundle
from convoy.export.hard_networks.rows import MOST_LOSS_POINTS, HardRow
from convoy.export.options import ExportOptions
from convoy.export.profiling.profile import PACE
from convoy.export.profiling.work import int8_share
from convoy.export.progress import SILENT, Progress
from convoy.export.variants.precision import INT8_CPU, RECIPES, REFERENCE
from convoy.export.variants.variant import open_engine
from convoy.models.bundle import Bundle, Variant, open_bundle
from convoy.models.checkpoint import convoy_version, installed_versions
from convoy.models.errors import ConvoyError
from convoy.models.train import Report, train
from convoy.models.train_options import TrainOptions

_MAX_BATCH = 8
_TOOLS = ("torch", "onnxruntime", "openvino")


@dataclass(frozen=True, slots=True)
class HardNetwork:
    """A network of the zoo, and how often it sees all training images.

    `learning_rate` is its peak; None: the optimiser's own.
    """

    name: str
    epochs: int
    learning_rate: float | None = None


# So often that more is gained by little; half of the half hour that a network has on two slow cores, or less.
NETWORKS = (
    HardNetwork("mobilenet_v2", 3),
    HardNetwork("mobilenet_v3", 8),
    HardNetwork("efficientnet_b0", 4),
    HardNetwork("regnet", 2),
    HardNetwork("convnext", 5, learning_rate=1e-3),
    HardNetwork("repvgg", 2),
    HardNetwork("ghostnet", 3),
    HardNetwork("wide_range_silu", 3),
    HardNetwork("wide_range_hardswish", 3),
    HardNetwork("densenet", 2),
)


@dataclass(frozen=True, slots=True)
class TrialPlace:
    """Where weights and bundles are kept, and the data that networks learn from and are judged on.

    `cache` keeps what an export has measured.
    """

    folder: Path
    dataset: str = "glyphs"
    data_root: Path | None = None
    cache: StepCache = NO_CACHE

    def weights(self, network: HardNetwork) -> Path:
        return self.folder / f"{network.name}.safetensors"


def try_network(network: HardNetwork, place: TrialPlace, report: Report, progress: Progress = SILENT) -> HardRow:
    """Train it unless its weights are there, going on with a training that was interrupted; export it, and tell.

    What is wrong with the network becomes the row's `why`. Raises KeyboardInterrupt where the training was interrupted,
    and JobError where it cannot be done.
    """
    weights = place.weights(network)
    if not weights.exists():
        place.folder.mkdir(parents=True, exist_ok=True)
        options = TrainOptions(
            place.dataset,
            weights,
            network.name,
            epochs=network.epochs,
            learning_rate=network.learning_rate,
            data_root=place.data_root,
            resume=True,
        )
        if train(options, report).is_interrupted:
            # What was learned so far must not be taken for the network; the unfinished run is kept beside it.
            weights.unlink(missing_ok=True)
            raise KeyboardInterrupt
    epochs, minutes = _learned(weights)
    try:
        return _row(network, _exported(network, place, progress), epochs, minutes)
    except ConvoyError as error:
        return HardRow(network.name, epochs, minutes, why=" ".join(str(error).split()))


def _exported(network: HardNetwork, place: TrialPlace, progress: Progress) -> Bundle:
    options = ExportOptions(
        f"zoo:{network.name}",
        network.name,
        weights=place.weights(network),
        calibrate=place.dataset,
        evaluate=place.dataset,
        precisions="fp32,int8",
        max_batch=_MAX_BATCH,
        store=place.folder / "store",
        data_root=place.data_root,
    )
    return open_bundle(export_bundle(options, progress, place.cache))


def _row(network: HardNetwork, bundle: Bundle, epochs: int, minutes: float) -> HardRow:
    reference = bundle.manifest.variant(REFERENCE.file)
    paces = _race(bundle)
    exact = min((pace for pace in paces if pace.file == REFERENCE.file), key=FilePace.total_log_ms)
    rounded = [pace for pace in paces if pace.file != REFERENCE.file]
    # A file that loses too much is no faster way to the same answers.
    good = [pace for pace in rounded if _bound_points(bundle, pace) <= MOST_LOSS_POINTS]
    fastest = min(good or rounded, key=FilePace.total_log_ms)
    int8 = bundle.manifest.variant(fastest.file)
    assert reference.accuracy is not None
    assert int8.accuracy is not None
    assert int8.audit is not None
    return HardRow(
        network=network.name,
        epochs=epochs,
        training_minutes=minutes,
        accuracy=reference.accuracy.top1,
        images=reference.accuracy.images,
        loss_points=int8.accuracy.loss_points,
        loss_bound_points=int8.accuracy.loss_bound_points,
        int8_share=_share(bundle, int8),
        speedup=paired_speedup(exact.runs_ms, fastest.runs_ms),
        layers_kept=len(int8.audit.kept),
        file=fastest.file,
        engine=fastest.engine,
        fp32_engine=exact.engine,
        machine=f"{cpu_model()}, {cpu_budget()} cores, {'with' if has_int8_dot_product() else 'without'} VNNI",
        has_vnni=has_int8_dot_product(),
        versions={"convoy": convoy_version(), **installed_versions(*_TOOLS)},
        why="" if int8.passes_gate else int8.reason,
    )


def _bound_points(bundle: Bundle, pace: FilePace) -> float:
    accuracy = bundle.manifest.variant(pace.file).accuracy
    bound = accuracy.loss_bound_points if accuracy else None
    return math.inf if bound is None else bound


def _share(bundle: Bundle, variant: Variant) -> float | None:
    """As the file's own engine has it, with everything fused."""
    if variant.file == INT8_CPU.file:
        return int8_share(bundle.folder / variant.file, bundle.manifest.spec.inputs)
    return variant.audit.eight_bit_share if variant.audit else None


@dataclass(frozen=True, slots=True)
class FilePace:
    """One file in one engine: for each batch size float64 [rounds] of milliseconds, in turns with all others."""

    file: str
    engine: str
    runs_ms: tuple[np.ndarray, ...]

    def total_log_ms(self) -> float:
        """Grows with the geometric mean of the medians."""
        return float(sum(np.log(np.median(runs)) for runs in self.runs_ms))


def _race(bundle: Bundle) -> list[FilePace]:
    """fp32 in every engine of CPUs that is here, INT8 in the one that each file is for, where its loss was measured."""
    files = {variant.file for variant in bundle.manifest.variants}
    pairs = [(row, REFERENCE) for row in ROWS if not row.is_on_gpus and row.probe(find_cpu())[0]]
    pairs += [
        (one.row, one) for one in RECIPES if one.precision == "int8" and one.row is not None and one.file in files
    ]
    with ExitStack() as stack:
        engines = []
        for row, recipe in pairs:
            engine = open_engine(bundle.manifest.spec, recipe, row, bundle.folder / recipe.file)
            stack.callback(engine.close)
            engine.warm_up()
            engines.append(engine)
        measured = list(run_in_turns(engines, PACE))
    return [
        FilePace(recipe.file, row.name, tuple(rounds.runs_ms[index] for rounds in measured))
        for index, (row, recipe) in enumerate(pairs)
    ]


def _learned(weights: Path) -> tuple[int, float]:
    """How many epochs there were, and how many minutes they took, as the table beside the weights has it."""
    with weights.with_suffix(".training.csv").open(newline="") as file:
        seconds = [float(line["epoch_s"]) for line in csv.DictReader(file)]
    return len(seconds), round(sum(seconds) / 60, 2)
