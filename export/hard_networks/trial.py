"""One hard network: trained on drawn characters, exported with INT8, and what came of it.

Knows the networks, their training and where the figures of a bundle stand. Knows nothing of the table.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from convoy.app.engines.cpu import cpu_budget, cpu_model, has_int8_dot_product
from convoy.export.cache import NO_CACHE, StepCache
from convoy.export.command import export_bundle
from convoy.export.hard_networks.rows import HardRow
from convoy.export.options import ExportOptions
from convoy.export.profiling.work import int8_share
from convoy.export.progress import SILENT, Progress
from convoy.export.variants.precision import INT8_CPU, REFERENCE
from convoy.models.bundle import Bundle, open_bundle
from convoy.models.checkpoint import convoy_version, installed_versions
from convoy.models.errors import ConvoyError
from convoy.models.train import Report, train
from convoy.models.train_options import TrainOptions

_MAX_BATCH = 8
_TOOLS = ("torch", "onnxruntime")


@dataclass(frozen=True, slots=True)
class HardNetwork:
    """A network of the zoo, and how often it sees all training images."""

    name: str
    epochs: int


# So often that more is gained by little; half of the half hour that a network has on two slow cores, or less.
NETWORKS = (
    HardNetwork("mobilenet_v2", 6),
    HardNetwork("mobilenet_v3", 10),
    HardNetwork("efficientnet_b0", 8),
    HardNetwork("regnet", 2),
    HardNetwork("convnext", 3),
    HardNetwork("repvgg", 2),
    HardNetwork("ghostnet", 3),
    HardNetwork("wide_range_silu", 4),
    HardNetwork("wide_range_hardswish", 4),
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
            place.dataset, weights, network.name, epochs=network.epochs, data_root=place.data_root, resume=True
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
    reference, int8 = (bundle.manifest.variant(file) for file in (REFERENCE.file, INT8_CPU.file))
    assert reference.accuracy is not None
    assert int8.accuracy is not None
    return HardRow(
        network=network.name,
        epochs=epochs,
        training_minutes=minutes,
        accuracy=reference.accuracy.top1,
        images=reference.accuracy.images,
        loss_points=int8.accuracy.loss_points,
        loss_bound_points=int8.accuracy.loss_bound_points,
        int8_share=int8_share(bundle.folder / INT8_CPU.file, bundle.manifest.spec.inputs),
        speedup=None if int8.latency is None else int8.latency.speedup,
        layers_kept=0 if int8.audit is None else len(int8.audit.kept),
        machine=f"{cpu_model()}, {cpu_budget()} cores, {'with' if has_int8_dot_product() else 'without'} VNNI",
        has_vnni=has_int8_dot_product(),
        versions={"convoy": convoy_version(), **installed_versions(*_TOOLS)},
        why="" if int8.serve else int8.reason,
    )


def _learned(weights: Path) -> tuple[int, float]:
    """How many epochs there were, and how many minutes they took, as the table beside the weights has it."""
    with weights.with_suffix(".training.csv").open(newline="") as file:
        seconds = [float(line["epoch_s"]) for line in csv.DictReader(file)]
    return len(seconds), round(sum(seconds) / 60, 2)
