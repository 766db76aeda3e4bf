"""The user's options checked, completed from the checkpoint, and turned into one record.

Has every rule by which options, checkpoint header and defaults combine. Reads headers, label files and JSON, but no
weights and no images, so a wrong call fails before any work is done.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, cast, get_args

from convoy.export.arrays import is_array_file, read_array_file
from convoy.export.class_names import read_class_map, read_labels
from convoy.export.config_file import as_command
from convoy.export.options import ExportOptions, MissingOption, Mistakes
from convoy.export.proof.sanity import Claim, Expectations
from convoy.export.sources.onnx_metadata import StatedModel, usual_detection
from convoy.export.sources.onnx_source import tensor_inputs
from convoy.export.sources.origin import (
    ModelSource,
    Origin,
    Stated,
    channels_of,
    find_origin,
    parse_function,
    parse_source,
)
from convoy.export.sources.preprocess import (
    AskedInput,
    ImageChanges,
    is_of_tensors,
    parse_changes,
    parse_front,
    parse_input,
    resolve_image,
)
from convoy.export.sources.torch_job import INPUT_NAME, RANDOM_WEIGHTS_ADVICE, Inquiry, WeightsFrom
from convoy.export.sources.torch_process import ask
from convoy.models.annotations.reading import annotated_labels, is_annotated
from convoy.models.datasets import folder_classes, is_flat_folder, source_labels, unknown_source
from convoy.models.errors import BundleError, JobError, UsageError
from convoy.models.plan_cache import plan_folder
from convoy.models.priorities import ORDINARY_PRIORITIES, Priorities
from convoy.models.records import from_jsonable
from convoy.models.samples import NO_OTHER_NAMES
from convoy.models.spec import OIP_NAMES, Activation, Front, ImageSpec, TensorSpec
from convoy.models.store import Store, check_name
from convoy.models.tasks import DetectionOutputs, Layout, Task
from convoy.models.weights.key import refuse_needless_key

LAYOUTS = tuple(name for name in get_args(Layout) if name != "separate")
_TENSOR = re.compile(r"(?:([A-Za-z_][\w.]*)=)?([1-9]\d{0,8}(?:x[1-9]\d{0,8})*)(?::(\w+))?")


def parse_tensors(text: str) -> tuple[TensorSpec, ...]:
    """`1x1000`, or `signal=1x1000,age=1:INT64`; without a dtype they are FP32. Raises UsageError."""
    found = [_TENSOR.fullmatch(part.strip()) for part in text.split(",")]
    dtypes = tuple(OIP_NAMES.values())
    specs = []
    for part in found:
        if part is None or (part[1] is None and len(found) > 1) or (part[3] or "FP32").upper() not in dtypes:
            raise UsageError(
                f"--input {text!r} is not understood; write an image as 3x224x224, one tensor as 1x1000, several as "
                f"signal=1x1000,age=1:INT64 with one of {', '.join(dtypes)}"
            )
        shape = tuple(int(size) for size in part[2].split("x"))
        specs.append(TensorSpec(part[1] or "input", (part[3] or "FP32").upper(), shape))
    if len({spec.name for spec in specs}) < len(specs):
        raise UsageError(f"--input {text!r} names an input twice; give each its own name")
    return tuple(specs)


_FORM = (
    f"pass {', '.join(LAYOUTS)}, or "
    + 'write it as in {"boxes": "boxes", "scores": "scores", "box_form": "cxcywh", "iou_threshold": 0.5}'
)


def read_detection(path: Path) -> DetectionOutputs:
    """A layout by name, whose `boxes` is empty, or a file; its omitted fields have `DetectionOutputs`' defaults.

    Raises UsageError.
    """
    if str(path) in LAYOUTS and not path.exists():
        return usual_detection(cast(Layout, str(path)), "")
    try:
        return from_jsonable(DetectionOutputs, json.loads(path.read_text(encoding="utf-8")), "detection")
    except OSError as error:
        raise UsageError(f"--detection {path}: {error.strerror}; {_FORM}") from error
    except (ValueError, BundleError) as error:
        raise UsageError(f"--detection {path}: {error}; {_FORM}") from error


_MAX_BATCH = 4096
MethodChoice = Literal["auto", "minmax", "entropy", "percentile"]


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """What was `asked` for, and the interpretation of options that need one.

    `labels` is empty if none are known; then nothing can be evaluated. `labels_from` is the data set whose classes
    they are, empty if they come from elsewhere. `repeated_by` is the file that repeats the export. `classes_known_as`
    maps a data set's class names to labels. `weights` is the file with the weights; for sources that contain them, the
    source itself. `preprocessing` says where `image` comes from, if the user gave it. `activation` None means that it
    must be determined. `stated` is the checkpoint's stated accuracy. `is_free` means that other heights and widths are
    served as well.

    `image` None means that the network takes `inputs` that are not images, or that the preprocessing is unknown. `task`
    None means that it must be determined. `detection` is how boxes are read, if the user gives it. `metric` is the
    user's file and the function in it. `model` is what an ONNX file or a checkpoint says of itself.
    """

    asked: ExportOptions
    source: ModelSource
    store: Store
    weights: Path | None
    weights_from: WeightsFrom
    image: ImageSpec | None
    inputs: tuple[TensorSpec, ...]
    preprocessing: str
    labels: tuple[str, ...]
    classes_known_as: Mapping[str, str]
    calibration_method: MethodChoice
    priorities: Priorities
    activation: Activation | None
    expected: Expectations
    stated: Stated | None
    plan_cache: Path
    labels_from: str = ""
    repeated_by: str = ""
    is_free: bool = False
    task: Task | None = None
    detection: DetectionOutputs | None = None
    metric: tuple[Path, str] | None = None
    model: StatedModel | None = None

    @property
    def samples(self) -> str:
        """The name of the inputs for people."""
        return "samples" if self.image is None else "images"


def make_plan(options: ExportOptions) -> ExportPlan:
    """Check and complete the options.

    Raises UsageError, which names everything that is wrong or missing and then the complete command; JobError for a
    checkpoint that cannot be read.
    """
    mistakes = Mistakes()
    attempt = mistakes.attempt
    source = parse_source(options.source, trust=options.trust)
    attempt(check_name, options.name)
    attempt(check_max_batch, options.max_batch)
    attempt(_check_budgets, options)
    tensors, asked = attempt(_asked_input, options.input) or ((), None)
    front: Front = attempt(parse_front, options.front) or "uint8_nhwc"
    steps = options.mean, options.std, options.resize, options.crop, options.interpolation
    changes = attempt(parse_changes, *steps) or ImageChanges()
    metric = attempt(parse_function, options.metric, "--metric") if options.metric is not None else None
    task = attempt(_task, options)
    detection = attempt(read_detection, options.detection) if options.detection is not None else None
    attempt(_check_combinations, options)
    expected = attempt(_expectations, options) or Expectations()
    activation = attempt(parse_activation, options.activation)
    priorities = attempt(priorities_of, options) or ORDINARY_PRIORITIES
    origin = attempt(find_origin, options, source, asked.of_pictures if asked else None, mistakes)
    image: ImageSpec | None = None
    labels: tuple[str, ...] = ()
    labels_from = ""
    inputs: tuple[TensorSpec, ...] = ()
    model = origin.model if origin is not None else None
    if model is not None and task in (None, model.task):
        task, detection = model.task, _told(detection, model.detection)
        activation = activation or model.activation
    if origin is not None:
        if (known_labels := attempt(_labels, options, origin)) is not None:
            labels, labels_from = known_labels
            attempt(_check_labels, options, source, labels)
        weights_file = origin.weights if origin.weights_from == "file" else None
        attempt(refuse_needless_key, options.weights_key, weights_file)
        prepared = attempt(_prepared, options, source, origin, tensors, asked, front, changes)
        image, inputs = prepared or (None, ())
    known_as = attempt(_classes_known_as, options, labels) or NO_OTHER_NAMES
    if mistakes.found and source.kind == "file":
        # Otherwise the export itself tells, after a run that the user need not have waited for.
        attempt(_check_factory, options, source)
    _refuse_mistakes(options, mistakes)
    assert origin is not None
    if image is not None:
        inputs = (TensorSpec(INPUT_NAME, image.tensor_dtype, image.tensor_shape),)
    return ExportPlan(
        asked=options,
        source=replace(origin.source, published="random weights") if options.random_weights else origin.source,
        store=Store(options.store),
        weights=origin.weights,
        weights_from=origin.weights_from,
        image=image,
        inputs=inputs,
        preprocessing=_preprocessing(options, changes),
        labels=labels,
        labels_from=labels_from,
        classes_known_as=known_as,
        calibration_method=cast(MethodChoice, options.calibration_method),
        priorities=priorities,
        activation=activation,
        expected=expected,
        stated=origin.stated,
        plan_cache=plan_folder(options.plan_cache),
        is_free=asked is not None and asked.is_free,
        task="detect" if detection else task,
        detection=detection,
        metric=metric,
        model=model,
    )


def _told(asked: DetectionOutputs | None, stated: DetectionOutputs | None) -> DetectionOutputs | None:
    """How the boxes are read: as the user asks, completed by what the file says if it says the same layout."""
    is_same = asked is not None and stated is not None and not asked.boxes and asked.layout == stated.layout
    return stated if is_same else asked or stated


def _asked_input(text: str | None) -> tuple[tuple[TensorSpec, ...], AskedInput | None]:
    """Parse `--input`: tensors, or an image. Raises UsageError."""
    if text is None:
        return (), None
    return (parse_tensors(text), None) if is_of_tensors(text) else ((), parse_input(text))


def _prepared(
    options: ExportOptions,
    source: ModelSource,
    origin: Origin,
    tensors: tuple[TensorSpec, ...],
    asked: AskedInput | None,
    front: Front,
    changes: ImageChanges,
) -> tuple[ImageSpec | None, tuple[TensorSpec, ...]]:
    """The preprocessing of images, or the inputs of a network that takes none. Raises UsageError."""
    arrays = next((one for one in (options.calibrate, options.evaluate) if one and is_array_file(one)), None)
    if origin.image is None and not changes.typed and options.preprocess is None and (tensors or arrays):
        return None, _tensor_inputs(source, tensors, Path(arrays) if arrays else None)
    image = resolve_image(
        options.preprocess,
        asked.of_pictures if asked else None,
        *(origin.size, origin.image, front, origin.why_no_image, changes),
        partial(channels_of, source),
    )
    return image, tensors


def _check_factory(options: ExportOptions, source: ModelSource) -> None:
    """Raise UsageError if the user's function fails, or makes a network without weights."""
    try:
        said = ask(Inquiry(source.kind, source.name, str(source.file), is_about_weights=True))
    except JobError as error:
        raise UsageError(str(error)) from error
    if said.is_random and options.weights is None and not options.random_weights:
        raise MissingOption(
            f"the weights that {source.shown} gives are random; {RANDOM_WEIGHTS_ADVICE}", "--weights", "FILE.pth"
        )


def _refuse_mistakes(options: ExportOptions, mistakes: Mistakes) -> None:
    """Raise UsageError if there are mistakes; for missing options it ends with the command to paste."""
    if not mistakes.found:
        return
    texts = list(dict.fromkeys(map(str, mistakes.found)))
    if len(texts) > 1:
        texts = [f"{len(texts)} mistakes:", *(f"  - {text}" for text in texts)]
    missing = {one.flag: one.example for one in mistakes.found if isinstance(one, MissingOption)}
    if missing:
        texts.append(f"for example: {as_command(options, missing)}")
    raise UsageError("\n".join(texts))


def _check_budgets(options: ExportOptions) -> None:
    if not 0 <= options.accuracy_budget_points <= 100:
        raise UsageError(f"--accuracy-budget must be from 0 to 100 points, got {options.accuracy_budget_points}")
    if options.int8_budget_s <= 0:
        raise UsageError(f"--int8-budget-s must be more than 0 seconds, got {options.int8_budget_s:g}")
    _known("--calibration-method", options.calibration_method, get_args(MethodChoice))


def _task(options: ExportOptions) -> Task | None:
    return None if options.task is None else cast(Task, _known("--task", options.task, get_args(Task)))


def _check_combinations(options: ExportOptions) -> None:
    if options.metric is not None and options.evaluate is None:
        raise MissingOption(
            "--metric scores outputs against targets; pass --evaluate FILE.npz with an array of targets",
            *("--evaluate", "FILE.npz"),
        )
    if options.detection is not None and options.task not in (None, "detect"):
        raise UsageError(f"--detection is for detectors, but --task is {options.task}; leave one of them out")


def _check_labels(options: ExportOptions, source: ModelSource, labels: Sequence[str]) -> None:
    is_scored_by_class = options.evaluate is not None and options.metric is None and _has_classes(options.evaluate)
    if labels or not (is_scored_by_class or source.kind == "zoo"):
        return
    why = "--evaluate needs to know which output is which class"
    if source.kind == "zoo":
        why = "the zoo needs to know the number of classes"
    raise MissingOption(f"{why}; pass --labels FILE, one class per line", "--labels", "labels.txt")


def _has_classes(source: str) -> bool:
    """Whether a data set's samples are labelled by class names."""
    return not is_array_file(source) and not is_flat_folder(source) and not is_annotated(source)


def _tensor_inputs(source: ModelSource, asked: tuple[TensorSpec, ...], arrays: Path | None) -> tuple[TensorSpec, ...]:
    """The inputs of a network of tensors: as the user says, or as the arrays are; an ONNX file has names and dtypes."""
    if source.kind == "onnx":
        given = read_array_file(arrays).specs if arrays is not None else asked
        return tensor_inputs(source.path, given)
    if asked:
        return asked
    assert arrays is not None
    return read_array_file(arrays).specs


def parse_activation(text: str) -> Activation | None:
    """None for `auto`. Raises UsageError."""
    known = _known("--activation", text, ("auto", *get_args(Activation)))
    return None if known == "auto" else cast(Activation, known)


def _known(option: str, text: str, choices: tuple[str, ...]) -> str:
    if text not in choices:
        raise UsageError(f"{option} {text!r} is unknown; use {', '.join(choices)}")
    return text


def _expectations(options: ExportOptions) -> Expectations:
    given = {"--expect-accuracy": options.expect_accuracy_percent, "--min-accuracy": options.min_accuracy_percent}
    for flag, percent in given.items():
        if percent is None:
            continue
        if options.evaluate is None:
            raise MissingOption(f"{flag} needs labelled images; pass --evaluate DATA", "--evaluate", "DATA")
        if not 1 < percent <= 100:
            hint = f", for example {flag} {100 * percent:g}" if 0 < percent <= 1 else ""
            raise UsageError(f"{flag} is in percent, above 1 and at most 100{hint}; got {percent:g}")
    claims: tuple[Claim, ...] = ()
    if options.expect_accuracy_percent is not None:
        claims = (Claim(options.expect_accuracy_percent, "--expect-accuracy"),)
    return Expectations(
        options.min_accuracy_percent, claims, options.accuracy_budget_points, untrained=options.random_weights
    )


def _labels(options: ExportOptions, origin: Origin) -> tuple[tuple[str, ...], str]:
    """The labels, and the data set whose classes they are, empty if they come from elsewhere.

    They come from `--labels`, or the weights, or the data that is evaluated. A folder that has only classes of the
    published weights does not replace their labels.
    """
    source = options.evaluate
    annotated = next((one for one in (source, options.calibrate) if one and is_annotated(one)), None)
    if options.labels is not None:
        # Many detectors know one class.
        is_detector = options.task == "detect" or options.detection is not None or annotated is not None
        return read_labels(options.labels, least=1 if is_detector or origin.model is not None else 2), ""
    if origin.labels and origin.are_labels_sure:
        return origin.labels, ""
    if annotated is not None:
        return _annotated_labels(annotated, options, origin)
    if source is None:
        return origin.labels, ""
    if built_in := source_labels(source):
        return built_in, ""
    if not is_array_file(source) and not Path(source).is_dir():
        raise unknown_source(source)
    is_scored_by_class = options.task in (None, "classify", "multilabel") and options.class_map is None
    if is_scored_by_class and Path(source).is_dir() and _has_classes(source):
        classes = folder_classes(Path(source))
        if not set(classes) <= set(origin.labels):
            return classes, source
    return origin.labels, ""


def _annotated_labels(source: str, options: ExportOptions, origin: Origin) -> tuple[tuple[str, ...], str]:
    """The same for boxes and masks; data with only classes of published weights does not replace their labels."""
    if origin.labels and options.class_map is not None:
        return origin.labels, ""
    names = annotated_labels(source)
    return (origin.labels, "") if not names or set(names) <= set(origin.labels) else (names, source)


def _preprocessing(options: ExportOptions, changes: ImageChanges) -> str:
    """The user's part of the preprocessing; a file appears without its folder."""
    recipe = f"--preprocess {Path(options.preprocess).name}" if options.preprocess is not None else ""
    said = " ".join(filter(None, (recipe, changes.typed)))
    return f"{said} (the user's)" if said else ""


def _classes_known_as(options: ExportOptions, labels: tuple[str, ...]) -> Mapping[str, str]:
    if options.class_map is None:
        return NO_OTHER_NAMES
    if options.evaluate is None and options.calibrate is None:
        raise UsageError("--class-map needs a data set; pass --evaluate or --calibrate")
    if not labels:
        raise UsageError("--class-map needs the labels that it maps to; pass --labels")
    return read_class_map(options.class_map, labels)


def check_max_batch(largest: int) -> None:
    """Raises UsageError."""
    if not 1 <= largest <= _MAX_BATCH:
        raise UsageError(f"--max-batch must be from 1 to {_MAX_BATCH}, got {largest}")


def priorities_of(options: ExportOptions) -> Priorities:
    """Raises UsageError."""
    try:
        return Priorities(options.priority_levels, options.default_priority_level)
    except BundleError as error:
        raise UsageError(f"--priority-levels and --default-priority-level do not fit: {error}") from error
