"""The samples of an export: one set for calibration, another for evaluation, and a few to compare outputs with.

Knows which part of a data set each flag means and keeps the two apart. Images stay encoded until they are needed and
pass through `convoy.models.images` in chunks, so a large set need not fit into memory; arrays come from files of them
(`convoy.export.arrays`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from convoy.export.arrays import ArraySet, is_array_file, load_arrays
from convoy.export.plan import ExportPlan
from convoy.export.progress import Step
from convoy.export.rows import Chunk, Rows, joined
from convoy.export.sources.torch_job import INPUT_NAME
from convoy.export.targets import Targets, target_key
from convoy.models.annotations.reading import is_annotated, load_annotated
from convoy.models.annotations.records import Shapes
from convoy.models.bundle import DatasetRecord
from convoy.models.datasets import is_flat_folder, load, load_flat_folder, source_labels
from convoy.models.errors import ImageError, JobError
from convoy.models.images import decode_image_into
from convoy.models.samples import MAX_BROKEN_FRACTION, Dataset, Objects, Part, Sample, some
from convoy.models.spec import NUMPY_DTYPES, ImageSpec, TensorSpec
from convoy.models.tasks import DetectionOutputs, Task

# Ranges settle within a few hundred images; more cost time and change nothing.
_CALIBRATION_SAMPLES = 512
_SAMPLES, _SAMPLES_AT_ONCE = 64, 8
# What images are labelled with: nothing, one class, the boxes of objects, or a class per pixel.
TargetKind = Literal["none", "class", "boxes", "mask"]
_TASKS: Mapping[TargetKind, Task] = {"boxes": "detect", "mask": "segment"}


@dataclass(frozen=True, slots=True)
class ImageSet:
    """Encoded images and their preprocessing; `source` is the data set as given, without its folder.

    `labels` are the model's, to which the samples' labels refer; empty if the classes differ or have only numbers. A
    folder of images without classes has no targets.
    """

    source: str
    samples: tuple[Sample, ...]
    image: ImageSpec
    labels: tuple[str, ...] = ()
    kind: ClassVar[str] = "images"

    @property
    def count(self) -> int:
        return len(self.samples)

    @property
    def names(self) -> Sequence[str]:
        return [sample.name for sample in self.samples]

    @property
    def hashes(self) -> Sequence[str]:
        return [sample.sha256 for sample in self.samples]

    @property
    def target_kind(self) -> TargetKind:
        kinds = {_kind_of(sample) for sample in self.samples}
        return kinds.pop() if len(kinds) == 1 else "none"

    @property
    def has_targets(self) -> bool:
        return self.target_kind != "none"

    def without_targets(self) -> ImageSet:
        """The same images without labels."""
        return replace(self, samples=tuple(replace(sample, label=-1, target=None) for sample in self.samples))

    @property
    def record(self) -> DatasetRecord:
        hashes = sorted(sample.sha256 for sample in self.samples)
        return DatasetRecord(self.source, len(hashes), hashlib.sha256("".join(hashes).encode()).hexdigest())

    @property
    def key(self) -> str:
        """A hash over contents, order, labels and preprocessing: equal keys give equal chunks."""
        content = "".join(f"{sample.sha256}:{sample.label}{target_key(sample)};" for sample in self.samples)
        return hashlib.sha256(f"{self.image}{self.labels}{content}".encode()).hexdigest()

    def chunks(self, step: Step, limit: int) -> Iterator[Chunk]:
        """All images in order, at most `limit` and about 16 MB at a time.

        Images that do not decode are left out; more than 1 % of them is a JobError.
        """
        shape, dtype = self.image.tensor_shape, NUMPY_DTYPES[self.image.tensor_dtype]
        size = max(1, min(limit, (16 << 20) // (int(np.prod(shape)) * dtype.itemsize)))
        broken: list[str] = []
        targets_of, has_targets = Targets.of(self.samples, self.image), self.has_targets
        for start in range(0, len(self.samples), size):
            images, targets, positions = [], [], []
            for position, sample in enumerate(self.samples[start : start + size], start):
                image = np.empty(shape, dtype)
                try:
                    picture = decode_image_into(sample.encoded(), self.image, image.reshape(-1).view(np.uint8).data)
                except ImageError:
                    broken.append(sample.name)
                    continue
                images.append(image)
                targets.append(targets_of.one(sample, picture))
                positions.append(position)
            step.advance(len(self.samples[start : start + size]))
            if images:
                stacked = np.stack(targets) if has_targets else None
                yield Chunk({INPUT_NAME: np.stack(images)}, stacked, np.array(positions, np.int64))
        if len(broken) > MAX_BROKEN_FRACTION * len(self.samples):
            raise JobError(
                f"{len(broken)} of {len(self.samples)} images of {self.source} cannot be read: {some(broken)}; "
                "remove or repair them"
            )

    def thinned(self, most: int) -> ImageSet:
        """At most `most` of the images, evenly spaced, because folders are in the order of their classes."""
        if len(self.samples) <= most:
            return self
        picked = np.linspace(0, len(self.samples) - 1, most).astype(int)
        return replace(self, samples=tuple(self.samples[index] for index in picked))


def _kind_of(sample: Sample) -> TargetKind:
    if isinstance(sample.target, Objects):
        return "boxes"
    return "mask" if sample.target is not None else "class" if sample.label >= 0 else "none"


def random_samples(count: int, inputs: Sequence[TensorSpec], image: ImageSpec | None) -> dict[str, np.ndarray]:
    """Noise, reproducible: it shows that two graphs compute the same, and nothing about accuracy.

    For images, if `image` has their preprocessing, these are pixels; otherwise floats are signals around zero, and
    integers are 0 or 1, which are valid indices in most networks that take any.
    """
    generator = np.random.default_rng(0)

    def drawn(spec: TensorSpec) -> np.ndarray:
        shape = (count, *spec.drawn_shape)
        if image is None and spec.numpy_dtype.kind == "f":
            return generator.standard_normal(shape).astype(spec.numpy_dtype)
        if image is None:
            return generator.integers(0, 2, shape).astype(spec.numpy_dtype)
        if image.front == "uint8_nhwc":
            return generator.integers(0, 256, shape, dtype=np.uint8)
        mean, std = (np.array(values, np.float32)[:, None, None] for values in (image.mean, image.std))
        normalised: np.ndarray = (generator.random(shape, dtype=np.float32) - mean) / std
        return normalised

    return {spec.name: drawn(spec) for spec in inputs}


# The network's input, a chunk at a time. `labels` is empty if the samples have none of the model's.
SampleSet = ImageSet | ArraySet


@dataclass(frozen=True, slots=True)
class ExportData:
    """`samples` are inputs to compare outputs on; `real` distinguishes the user's data from random numbers."""

    calibration: SampleSet | None
    evaluation: SampleSet | None
    samples: Rows
    real: bool


def load_data(plan: ExportPlan, step: Step) -> ExportData:
    """Load what `--calibrate` and `--evaluate` name.

    Raises UsageError for an unknown data set, JobError if it is empty or broken, if its classes are not the model's, or
    if the two sets share an image.
    """
    evaluation = _evaluated(plan) if plan.asked.evaluate is not None else None
    calibration, held_out = _calibrated(plan) if plan.asked.calibrate is not None else (None, None)
    if calibration and evaluation:
        _refuse_shared(calibration, evaluation)
    sample_bytes = sum(spec.sample_bytes or 1 for spec in (replace(one, shape=one.drawn_shape) for one in plan.inputs))
    count = max(2, min(_SAMPLES, (64 << 20) // sample_bytes))
    noise = ArraySet("random numbers", random_samples(count, plan.inputs, plan.image), None)
    shown = calibration or (noise if plan.asked.allow_random_calibration else None)
    compared = evaluation or held_out
    if compared is None:
        return ExportData(shown, evaluation, noise.inputs, real=False)
    return ExportData(shown, evaluation, decoded(compared.thinned(count), step), real=True)


def _evaluated(plan: ExportPlan) -> SampleSet:
    source = plan.asked.evaluate
    assert source is not None
    if is_array_file(source):
        rows = load_arrays(Path(source), plan.inputs)
        return rows.part("test") if _is_same_file(plan) else rows
    dataset = _dataset(source, plan)
    if dataset.labels and plan.labels:
        dataset = dataset.in_order_of(plan.labels, plan.classes_known_as)
    return _part(dataset, source, "test", plan)


def remarks_on(data: ExportData) -> Iterator[str]:
    """Warnings about the images, a line each."""
    images = data.calibration
    if isinstance(images, ImageSet) and images.target_kind == "boxes":
        empty = sum(not len(one.target.boxes) for one in images.samples if isinstance(one.target, Objects))
        if empty:
            yield f"{empty} of {images.count} calibration images contain no objects"


def task_of(data: ExportData) -> Task | None:
    """The task of a model with such data: of boxes or masks. None if the data does not tell."""
    kinds = {one.target_kind for one in (data.evaluation, data.calibration) if isinstance(one, ImageSet)}
    return next((task for kind, task in _TASKS.items() if kind in kinds), None)


def fitting(data: ExportData, task: Task) -> tuple[ExportData, str]:
    """The data as far as its labels fit the task, and a remark on what does not. Raises JobError if boxes or masks are
    for another task.

    A class per image says nothing about boxes.
    """
    kept = replace(data, calibration=_fitting(data.calibration, task), evaluation=_fitting(data.evaluation, task))
    if data.evaluation is None or kept.evaluation is data.evaluation:
        return kept, ""
    return kept, f"the classes of {data.evaluation.source} say nothing where the task is {task}; pass data with boxes"


def _fitting(images: SampleSet | None, task: Task) -> SampleSet | None:
    if not isinstance(images, ImageSet):
        return images
    wanted = _TASKS.get(images.target_kind)
    if wanted is not None and wanted != task:
        what = "boxes" if wanted == "detect" else "masks"
        raise JobError(
            f"{images.source} has {what}, but the task of the model is {task}; pass --task {wanted}, or data with "
            "its own kind of labels"
        )
    return images.without_targets() if images.target_kind == "class" and task == "detect" else images


def _calibrated(plan: ExportPlan) -> tuple[SampleSet, SampleSet | None]:
    """The calibration set, and the held-out part of the same data set, if there is one."""
    source = plan.asked.calibrate
    assert source is not None
    if is_array_file(source):
        rows = load_arrays(Path(source), plan.inputs)
        # With one file for both, everything that is not evaluated on.
        own = rows.without("test") if _is_same_file(plan) else rows
        return own.thinned(_CALIBRATION_SAMPLES), own
    dataset = _dataset(source, plan)
    if dataset.labels and not dataset.unknown_to(plan.labels, plan.classes_known_as):
        dataset = dataset.in_order_of(plan.labels, plan.classes_known_as)
    held_out = _part(dataset, source, "test", plan) if dataset.parts["test"] else None
    return _part(dataset, source, "calibration", plan).thinned(_CALIBRATION_SAMPLES), held_out


def _is_same_file(plan: ExportPlan) -> bool:
    both = (plan.asked.calibrate, plan.asked.evaluate)
    return all(both) and len({Path(source).resolve() for source in both if source}) == 1


def _dataset(source: str, plan: ExportPlan) -> Dataset:
    if plan.image is None:
        raise JobError(
            f"{source} has images, but this network's preprocessing is unknown; pass --preprocess, or an "
            ".npz file of arrays"
        )
    if is_annotated(source):
        is_shared = plan.asked.evaluate is None or _is_same_file(plan)
        return load_annotated(
            source,
            most_calibrated=_CALIBRATION_SAMPLES,
            is_split=is_shared,
            shapes=_shapes(plan.detection),
            prefers_masks=plan.task == "segment",
        )
    return load_flat_folder(Path(source)) if is_flat_folder(source) else load(source, plan.asked.data_root)


def _shapes(detection: DetectionOutputs | None) -> Shapes:
    """What a detector is measured by, in addition to boxes."""
    if detection is None:
        return "none"
    # Of a layout that is only known by its name, the outputs are found later.
    if detection.layout == "yolo_v8_pose" or detection.keypoints:
        return "keypoints"
    return "masks" if detection.layout == "yolo_v8_seg" or detection.prototypes is not None else "none"


def _part(dataset: Dataset, source: str, part: Part, plan: ExportPlan) -> ImageSet:
    assert plan.image is not None
    shown = source if source_labels(source) else Path(source).resolve().name
    labels = plan.labels if dataset.labels == plan.labels else ()
    samples = tuple(dataset.part(part))
    if part == "calibration":
        # Boxes are enough to tell which layers need more precision, and masks of many images take much memory.
        samples = tuple(_without_shapes(sample) for sample in samples)
    images = ImageSet(shown, samples, plan.image, labels)
    if images.target_kind not in ("boxes", "mask"):
        return images
    if dataset.labels and not labels:
        # The objects are of other classes than the model's.
        return images.without_targets()
    _refuse_unknown_numbers(images, plan.labels)
    return replace(images, labels=plan.labels)


def _without_shapes(sample: Sample) -> Sample:
    if not isinstance(sample.target, Objects):
        return sample
    return replace(sample, target=replace(sample.target, masks=None, keypoints=None, areas=None))


def _refuse_unknown_numbers(images: ImageSet, labels: Sequence[str]) -> None:
    """Raise JobError if a class number is beyond the model's labels, which only data without names can have."""
    found = [one.target.classes.max(initial=-1) for one in images.samples if isinstance(one.target, Objects)]
    if labels and max(found, default=-1) >= len(labels):
        raise JobError(
            f"{images.source} has class {max(found)}, and the model has {len(labels)} labels, from 0 to "
            f"{len(labels) - 1}; pass the --labels of this data, or put names into its data.yaml or classes.txt"
        )


def _refuse_shared(calibration: SampleSet, evaluation: SampleSet) -> None:
    seen = set(calibration.hashes)
    shared = [name for name, sha256 in zip(evaluation.names, evaluation.hashes, strict=True) if sha256 in seen]
    if shared:
        raise JobError(
            f"{len(shared)} {evaluation.kind} are both calibrated and evaluated on: {some(shared)}; "
            "remove them from one of the two sets"
        )


def decoded(chosen: SampleSet, step: Step) -> dict[str, np.ndarray]:
    """All inputs by name, each [samples, ...]. Raises JobError if no image can be read."""
    step.expect(chosen.count)
    chunks: Sequence[Chunk] = list(chosen.chunks(step, _SAMPLES_AT_ONCE))
    if not chunks:
        raise JobError(f"no image of {chosen.source} can be read; repair the data set")
    return joined([chunk.inputs for chunk in chunks])
