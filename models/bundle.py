"""A bundle: everything that is known about one exported model, in one folder.

    STORE/<name>/<version>/manifest.json      the typed records below, sealed by their own digest
                           fp32.onnx ...      one file per variant
                           labels.txt         one label per line
                           canary.safetensors real held-out inputs and their fp32 outputs
                           report.html        all of this for people
                           model.sig          the signature, if there is one

A bundle is written aside, synced and renamed, so it is complete or absent, and it never changes afterwards. No file of
a bundle is a pickle.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import safetensors
import safetensors.numpy

from convoy.models.errors import BundleError
from convoy.models.files import is_file_name, open_regular, read_small
from convoy.models.records import RecordError, from_jsonable, to_jsonable
from convoy.models.spec import ModelSpec
from convoy.models.tasks import DetectionOutputs

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
LABELS = "labels.txt"
CANARY = "canary.safetensors"
REPORT = "report.html"
SIGNATURE = "model.sig"
_SEAL = "manifest_sha256"

# The default metric of an accuracy.
TOP_1 = "top-1"
Precision = Literal["fp32", "bf16", "fp16", "int8", "fp8"]
# What a variant was made for: any engine on a CPU, OpenVINO, ONNX Runtime with CUDA, or TensorRT.
Target = Literal["cpu", "openvino", "cuda", "tensorrt"]
ON_CPU: tuple[Target, ...] = ("cpu", "openvino")


@dataclass(frozen=True, slots=True)
class ClassAccuracy:
    """One class: the number of its labelled images, and the share of them that is found (recall).

    For a detector these are its objects and their average precision over IoU 0.5 to 0.95, for a segmenter its pixels
    and their IoU.
    """

    label: str
    images: int
    recall: float


@dataclass(frozen=True, slots=True)
class Accuracy:
    """A variant's accuracy on labelled images, measured from encoded bytes through `convoy.models.images`.

    `top1`, `top5` and `agreement` (the share of images with the same top-1 as fp32) are in [0, 1]. `loss_points` is the
    top-1 lost against fp32 in percentage points, and `loss_bound_points` the upper end of its one-sided 95 % confidence
    interval, exact and paired; None if it was not computed. `is_proved` means that the bound is within the budget as
    well.

    If samples are not simply right or wrong, `metric` names their score. Then `top1` is its mean, a point is a
    hundredth of it, the bound is a bootstrap's, and `agreement` in 0..1 is the mean similarity to fp32's answers.

    `set_metrics` are measures of the whole set by name, such as mAP@50:95 or mean IoU, in 0..1, the one that is usually
    published last. The gate needs a score of each sample and does not use them. Empty for other tasks.
    """

    images: int
    top1: float
    agreement: float
    loss_points: float
    top5: float | None = None
    loss_bound_points: float | None = None
    is_proved: bool = False
    per_class: tuple[ClassAccuracy, ...] = ()
    metric: str = TOP_1
    set_metrics: dict[str, float] = field(default_factory=dict)

    @property
    def headline(self) -> tuple[str, str]:
        """The name and value of the measure to show first: the published one of a set, or else the metric."""
        if not self.set_metrics:
            return self.metric, self.in_words
        name, value = list(self.set_metrics.items())[-1]
        return name, f"{value:.4f}"

    @property
    def bound_in_words(self) -> str:
        """The bound of the loss in brackets; empty if there is none."""
        bound = self.loss_bound_points
        if bound is None:
            return ""
        known = f"loss below {bound:.2f}" if bound >= 0 else f"gain above {-bound:.2f}"
        return f" ({known} points at 95 % confidence)"

    @property
    def set_in_words(self) -> str:
        """The measures of the whole set; empty if there are none."""
        return ", ".join(f"{name} {value:.4f}" for name, value in self.set_metrics.items())

    @property
    def in_words(self) -> str:
        """The top-1 in percent; other metrics as numbers."""
        return f"{100 * self.top1:.2f} %" if self.metric == TOP_1 else f"{self.top1:.4g}"


# If other processes use more of the CPUs than this, a latency says as much about them as about the model.
BUSY_SHARE = 0.1
BUSY_MARK = "†"  # marks such a figure wherever it is shown


@dataclass(frozen=True, slots=True)
class LatencyPoint:
    """Median and 10th and 90th percentiles of a batch size's milliseconds in the serving engine.

    `others_share` is the share of this process's CPUs that other processes used meanwhile, from 0 to 1; None if
    unknown.
    """

    batch_size: int
    median_ms: float
    p10_ms: float
    p90_ms: float
    others_share: float | None = None

    @property
    def is_of_busy_machine(self) -> bool:
        """Whether it should be measured again on a quiet machine."""
        return self.others_share is not None and self.others_share > BUSY_SHARE


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and its 95 % confidence interval."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class LatencyTable:
    """Latency per batch size on one device; valid only where the fingerprint matches.

    `fixed_ms` + `per_sample_ms` * batch is the line through the points. `speedup` is the paired ratio of fp32's time to
    this variant's, over all batch sizes.
    """

    device_fingerprint: str
    points: tuple[LatencyPoint, ...]
    fixed_ms: float | None = None
    per_sample_ms: float | None = None
    speedup: Interval | None = None

    @property
    def library(self) -> str:
        """The engine's library and its version."""
        return self.device_fingerprint.rpartition(" / ")[2]

    @property
    def is_of_busy_machine(self) -> bool:
        """Whether any point is, and so everything derived from them."""
        return any(point.is_of_busy_machine for point in self.points)


@dataclass(frozen=True, slots=True)
class Roofline:
    """What the network needs and what the device offers, measured in the same run (Williams et al., 2009).

    A multiply-add counts as two operations. Bytes are weights and activations in float32, each once.
    `device_gflop_per_s` is for float32; the rate for 8-bit integers is None if it was not measured.
    """

    device_fingerprint: str
    gflop_per_sample: float
    mb_per_sample: float
    weights_mb: float
    device_gflop_per_s: float
    device_gb_per_s: float
    device_int8_gop_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class NodeAudit:
    """What really runs in which precision in a quantised or converted graph: node counts by dtype of the computation,
    and the layers kept in a higher precision, with the reason.

    `eight_bit_share` is the share of multiply-adds of convolutions and matrix products; None if it was not counted.
    """

    by_precision: dict[str, int]
    kept: dict[str, str]
    eight_bit_share: float | None = None

    @property
    def share_in_words(self) -> str:
        """The share as text; empty if it was not counted."""
        return "" if self.eight_bit_share is None else f"{100 * self.eight_bit_share:.0f} % of multiply-adds in 8 bits"


@dataclass(frozen=True, slots=True)
class BuilderVerdict:
    """The TensorRT builder's verdict on a variant's file.

    `targets` are compute capabilities, empty if the library chose them. `layers` counts the layers that compute, by
    precision; empty if the library does not tell. `reason` says why the file was refused or, if it was not `asked`, why
    not, which says nothing about the file.
    """

    library: str
    accepted: bool
    targets: tuple[str, ...]
    plan_bytes: int = 0
    build_s: float = 0.0
    layers: dict[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    reason: str = ""
    asked: bool = True

    @property
    def in_words(self) -> str:
        if not self.asked:
            return f"{self.library} could not be asked: {self.reason}"
        if not self.accepted:
            return f"refused by {self.library}: {self.reason}"
        layers = f", layers {counted(self.layers)}" if self.layers else ""
        return f"accepted by {self.library}: {self.plan_bytes / 1e6:.1f} MB in {self.build_s:.1f} s{layers}"


def counted(by_precision: Mapping[str, int]) -> str:
    """Counts of layers or nodes by precision, as text."""
    return ", ".join(f"{count} in {precision}" for precision, count in by_precision.items())


@dataclass(frozen=True, slots=True)
class TradeOff:
    """One step of recovering accuracy: the number of layers kept in higher precision, and the result."""

    layers_kept: int
    accuracy: Accuracy
    median_ms: float | None


@dataclass(frozen=True, slots=True)
class Variant:
    """One ONNX file of the model and what is known about it.

    `serve` tells whether the variant may be chosen; `reason` says why or why not. `max_relative_error` is against the
    fp32 reference on real inputs: ||a - b|| / ||b||, worst sample.

    `trade_offs` are the files that were tried until one kept the accuracy, and `kept_layers` are the layers of this
    one. `is_recovered` is None if nothing had to be tried. `drift` says how the calibration images differ from the
    evaluation images, if a variant lost too much and they do. `search` says how long the search for layers took, of how
    much it was allowed. `builder` is None if there was no TensorRT. `passes_gate` means that its answers are good
    enough, whatever its speed, and `proof` says why; None in bundles of older versions.

    `output_errors` are the relative errors of each output by name, if there are several. `agreement` in 0..1 is with
    fp32's answers to samples without labels; None if it was not measured. `latency` is in the engine that the file was
    made for; fp32's is in ONNX Runtime. `other_latencies` are in the other CPU engines of the export machine; all
    speed-ups are against fp32's `latency`. `refused_by` says, by library and version, why an engine may not run the
    file.
    """

    file: str
    precision: Precision
    target: Target
    serve: bool
    reason: str
    max_relative_error: float
    accuracy: Accuracy | None
    latency: LatencyTable | None
    calibration_method: str | None = None
    audit: NodeAudit | None = None
    trade_offs: tuple[TradeOff, ...] = ()
    kept_layers: int | None = None
    is_recovered: bool | None = None
    drift: str = ""
    search: str = ""
    builder: BuilderVerdict | None = None
    passes_gate: bool | None = None
    proof: str = ""
    output_errors: dict[str, float] = field(default_factory=dict)
    agreement: float | None = None
    other_latencies: tuple[LatencyTable, ...] = ()
    refused_by: dict[str, str] = field(default_factory=dict)

    @property
    def latencies(self) -> tuple[LatencyTable, ...]:
        """In all engines in which export measured it, its own first."""
        return (*([self.latency] if self.latency else []), *self.other_latencies)


@dataclass(frozen=True, slots=True)
class FileRecord:
    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class DatasetRecord:
    """The images that a step used: the source as given, their number, and a hash over their contents."""

    source: str
    images: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where the model came from and what made the bundle.

    `weights_entry` says what was taken, changed and left out of the file of weights, if it was not used as it is.
    `free_sizes` are the heights x widths at which a network of any size was compared with the original. `preprocessing`
    has the user's options. `remeasured_at` is the time at which latencies were measured again.
    """

    source: str
    weights_sha256: str | None
    calibration: DatasetRecord | None
    evaluation: DatasetRecord | None
    tools: dict[str, str]
    created_at: str
    weights_entry: str = ""
    free_sizes: tuple[str, ...] = ()
    preprocessing: str = ""
    remeasured_at: str = ""


@dataclass(frozen=True, slots=True)
class Confusion:
    """The number of images of one class that are answered as another."""

    label: str
    answered: str
    images: int


@dataclass(frozen=True, slots=True)
class Mistake:
    """One image that is answered as another class. `score` is that of the answer.

    `picture` is the network's view of it, scaled down, as a base64 PNG.
    """

    label: str
    answered: str
    score: float
    picture: str


@dataclass(frozen=True, slots=True)
class Mistakes:
    """fp32's wrong answers to labelled images.

    `confusions` are pairs of classes, most frequent first; only the first are kept, and `pairs` is their total number.
    `most_confident` are a few images, highest score first.
    """

    images: int
    pairs: int
    confusions: tuple[Confusion, ...]
    most_confident: tuple[Mistake, ...]


@dataclass(frozen=True, slots=True)
class DrawnBox:
    """A box (x1, y1, x2, y2) and keypoints (x, y) in shares of the input's width and height, with a class and score."""

    class_id: int
    score: float
    box: tuple[float, ...]
    points: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class DrawnAnswer:
    """The best boxes, best first, without `more` others; and a class map, or their masks, as a base64 PNG."""

    boxes: tuple[DrawnBox, ...] = ()
    more: int = 0
    class_map: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One labelled image as fp32 and the variant `file` answer it, with the scores of both.

    `picture` is the network's view of it, scaled down, as a base64 JPEG, and `window` the part that is not padding, as
    a box. `wanted` is what is labelled.
    """

    name: str
    file: str
    score: float
    other_score: float
    picture: str
    window: tuple[float, ...]
    wanted: DrawnAnswer
    reference: DrawnAnswer
    other: DrawnAnswer


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that is known about a bundle.

    `scores` says why the spec has its activation. `findings` are the results of proving the reference, and `objections`
    those that speak against serving the model: it was published anyway (`--force`), or its weights are random on
    purpose. `mistakes` is None without labelled images, or if an older version exported it; `comparisons` are of
    detectors and segmenters.
    """

    schema_version: int
    spec: ModelSpec
    variants: tuple[Variant, ...]
    files: dict[str, FileRecord]
    provenance: Provenance
    roofline: Roofline | None = None
    scores: str = ""
    findings: tuple[str, ...] = ()
    objections: tuple[str, ...] = ()
    mistakes: Mistakes | None = None
    comparisons: tuple[Comparison, ...] = ()

    @property
    def busiest_share(self) -> float:
        """The largest share of the CPUs that other processes used during a marked measurement; 0 if none is marked."""
        points = [point for variant in self.variants for table in variant.latencies for point in table.points]
        return max((point.others_share or 0.0 for point in points if point.is_of_busy_machine), default=0.0)

    @property
    def metric(self) -> str:
        """The metric of the accuracies."""
        unmeasured = TOP_1 if self.spec.task == "classify" else "score"
        return next((variant.accuracy.metric for variant in self.variants if variant.accuracy), unmeasured)

    @property
    def heading(self) -> str:
        """The name of what `Accuracy.headline` shows, in at most eight characters if possible."""
        name = next((one.accuracy.headline[0] for one in self.variants if one.accuracy), self.metric)
        return name.partition("@")[0]  # as in mask mAP@50:95

    @property
    def set_lines(self) -> list[str]:
        """A line for each measure of the whole set, with its value for every variant."""
        scored = [(one.file, one.accuracy.set_metrics) for one in self.variants if one.accuracy]
        names = list(scored[0][1]) if scored else []
        return [
            f"{name}: {', '.join(f'{file} {own[name]:.4f}' for file, own in scored if name in own)}" for name in names
        ]

    def variant(self, file: str) -> Variant:
        """The variant stored in `file`. Raises KeyError."""
        for candidate in self.variants:
            if candidate.file == file:
                return candidate
        raise KeyError(file)


@dataclass(frozen=True, slots=True)
class Canary:
    """Real held-out inputs and their recorded fp32 outputs.

    Both map tensor name to an array whose first dimension is the sample. `detection` says how a detector's are read.
    """

    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]
    detection: DetectionOutputs | None = None

    @property
    def samples(self) -> int:
        return len(next(iter(self.inputs.values())))


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle on disk whose every byte has been checked."""

    folder: Path
    manifest: Manifest

    def path(self, file: str) -> Path:
        return self.folder / file

    def canary(self) -> Canary:
        """The canary. Raises BundleError if the bundle has none."""
        if CANARY not in self.manifest.files:
            raise BundleError(f"{self.folder}: the manifest has no {CANARY}; export the model again")
        tensors = safetensors.numpy.load_file(self.folder / CANARY)
        return Canary(
            inputs={k.removeprefix("input:"): v for k, v in tensors.items() if k.startswith("input:")},
            outputs={k.removeprefix("output:"): v for k, v in tensors.items() if k.startswith("output:")},
            detection=self.manifest.spec.detection,
        )


def busy_words(share: float, bundle: str) -> str:
    """A note on figures with `BUSY_MARK` and what to do; `share` is the largest share of other processes."""
    return (
        f"{BUSY_MARK} Measured while other processes used up to {100 * share:.0f} % of the CPUs. On a quiet machine "
        f"these figures, and what serves, may differ. To measure again: convoy export --remeasure {bundle}"
    )


def sha256_file(path: Path) -> str:
    """Hash a file. Raises OSError, and BundleError if it is not a regular file."""
    with open_regular(path) as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def seal(manifest: Manifest) -> bytes:
    """The manifest's bytes. The first field is the digest of the rest, so any change is detected."""
    body = to_jsonable(manifest)
    return _rendered({_SEAL: _digest(body), **body})


def open_bundle(folder: Path) -> Bundle:
    """Read the manifest in `folder` and check every byte of every file that it names.

    Raises BundleError, whose message names the file and what to do.
    """
    manifest = read_manifest(folder)
    for name in (*manifest.files, *(variant.file for variant in manifest.variants)):
        if not is_file_name(name):
            raise BundleError(f"{folder}: the manifest names a file outside the bundle ({name!r}); do not use it")
    for variant in manifest.variants:
        if variant.file not in manifest.files:
            raise BundleError(f"{folder}: the manifest has no digest of {variant.file!r}; export the model again")
    for name, record in manifest.files.items():
        _check_file(folder, name, record)
    return Bundle(folder, manifest)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest and check its seal, but not the files that it names. Raises BundleError."""
    path = folder / MANIFEST
    try:
        raw = read_small(path)
    except OSError as error:
        raise BundleError(f"{path}: {error.strerror}; export the model again") from error
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path}: not valid JSON ({error}); export the model again") from error
    if not isinstance(body, dict):
        raise BundleError(f"{path}: not a JSON object; export the model again")
    if body.get("schema_version") != SCHEMA_VERSION:
        raise BundleError(
            f"{path}: schema_version is {body.get('schema_version')!r}, this version reads {SCHEMA_VERSION}; "
            "export the model again with this version of Convoy"
        )
    claimed = body.pop(_SEAL, None)
    if claimed != _digest(body) or raw != _rendered({_SEAL: claimed, **body}):
        raise BundleError(f"{path}: was modified after it was written; restore it or export the model again")
    try:
        return from_jsonable(Manifest, body, MANIFEST)
    except RecordError as error:
        raise BundleError(f"{path}: {error}; export the model again") from error


def canary_bytes(canary: Canary) -> bytes:
    """The canary as a safetensors file."""
    tensors = {f"input:{name}": array for name, array in canary.inputs.items()}
    tensors |= {f"output:{name}": array for name, array in canary.outputs.items()}
    return safetensors.numpy.save({name: np.ascontiguousarray(array) for name, array in tensors.items()})


def _check_file(folder: Path, name: str, record: FileRecord) -> None:
    path = folder / name
    try:
        size = path.stat().st_size
        digest = sha256_file(path) if size == record.bytes else ""
    except OSError as error:
        raise BundleError(f"{path}: {error.strerror}; restore it or export the model again") from error
    if size != record.bytes:
        raise BundleError(f"{path}: has {size} bytes, the manifest says {record.bytes}; restore it or export again")
    if digest != record.sha256:
        raise BundleError(f"{path}: does not match its sha256; restore it or export the model again")


def _digest(body: dict[str, object]) -> str:
    return hashlib.sha256(_rendered(body)).hexdigest()


def _rendered(body: dict[str, object]) -> bytes:
    return (json.dumps(body, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
