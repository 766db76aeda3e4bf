"""What is to be done: the user's options checked, completed from the checkpoint, and turned into one record.

Knows every rule by which options, checkpoint header and defaults meet. Reads headers, label files and JSON,
but no weights and no images, so a wrong call fails before any work is done.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast, get_args

from convoy.export.options import ExportOptions
from convoy.export.proof.sanity import Claim, Expectations
from convoy.export.sources.origin import Origin, Stated, find_origin
from convoy.export.sources.preprocess import parse_front, parse_input, resolve_image
from convoy.export.sources.source import ModelSource, parse_source
from convoy.export.sources.torch_job import WeightsFrom
from convoy.models.datasets import source_labels
from convoy.models.errors import UsageError
from convoy.models.plan_cache import plan_folder
from convoy.models.spec import Activation, ImageSpec
from convoy.models.store import Store, check_name

_MAX_BATCH = 4096
MethodChoice = Literal["auto", "minmax", "entropy", "percentile"]


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """`labels` is empty where none are known; then nothing can be evaluated.

    `weights` is the file that holds the weights, for sources that carry their own the source itself. `activation` None
    asks for it to be found out. `stated` is what the checkpoint says of its accuracy. `force` publishes what fails.
    """

    source: ModelSource
    name: str
    store: Store
    weights: Path | None
    weights_from: WeightsFrom
    image: ImageSpec
    labels: tuple[str, ...]
    calibrate: str | None
    evaluate: str | None
    precisions: str | None
    accuracy_budget_points: float
    strict_gate: bool
    calibration_method: MethodChoice
    allow_random_calibration: bool
    max_batch: int
    data_root: Path
    activation: Activation | None
    expected: Expectations
    stated: Stated | None
    weights_key: str | None
    random_weights: bool
    force: bool
    plan_cache: Path


def make_plan(options: ExportOptions) -> ExportPlan:
    """Raises UsageError for what was called wrongly, JobError for a checkpoint that cannot be read."""
    source = parse_source(options.source, trust=options.trust)
    name = check_name(options.name)
    check_max_batch(options.max_batch)
    if not 0 <= options.accuracy_budget_points <= 100:
        raise UsageError(f"--accuracy-budget must be from 0 to 100 points, got {options.accuracy_budget_points}")
    size = parse_input(options.input) if options.input is not None else None
    front = parse_front(options.front)
    origin = find_origin(options, source, size)
    labels = _labels(options, origin)
    if options.evaluate is not None and not labels:
        raise UsageError("--evaluate needs to know which output is which class; pass --labels FILE, one class a line")
    if source.kind == "zoo" and not labels:
        raise UsageError("the zoo needs to know the number of classes; pass --labels FILE, one class a line")
    return ExportPlan(
        source=replace(origin.source, published="random weights") if options.random_weights else origin.source,
        name=name,
        store=Store(options.store),
        weights=origin.weights,
        weights_from=origin.weights_from,
        image=resolve_image(options.preprocess, size, origin.size, origin.image, front, origin.why_no_image),
        labels=labels,
        calibrate=options.calibrate,
        evaluate=options.evaluate,
        precisions=options.precisions,
        accuracy_budget_points=options.accuracy_budget_points,
        strict_gate=options.strict_gate,
        calibration_method=_calibration_method(options.calibration_method),
        allow_random_calibration=options.allow_random_calibration,
        max_batch=options.max_batch,
        data_root=options.data_root,
        activation=parse_activation(options.activation),
        expected=_expectations(options),
        stated=origin.stated,
        weights_key=_weights_key(options, origin),
        random_weights=options.random_weights,
        force=options.force,
        plan_cache=plan_folder(options.plan_cache),
    )


def parse_activation(text: str) -> Activation | None:
    """None for `auto`. Raises UsageError."""
    for activation in get_args(Activation):
        if text == activation:
            return cast(Activation, activation)
    if text != "auto":
        raise UsageError(f"--activation {text!r} is not known; use auto, {', '.join(get_args(Activation))}")
    return None


def _expectations(options: ExportOptions) -> Expectations:
    given = {"--expect-accuracy": options.expect_accuracy_percent, "--min-accuracy": options.min_accuracy_percent}
    for flag, percent in given.items():
        if percent is None:
            continue
        if options.evaluate is None:
            raise UsageError(f"{flag} needs labelled images to hold it against; pass --evaluate DATASET")
        if not 1 < percent <= 100:
            hint = f", for example {flag} {100 * percent:g}" if 0 < percent <= 1 else ""
            raise UsageError(f"{flag} is in percent, above 1 and at most 100{hint}; got {percent:g}")
    claims: tuple[Claim, ...] = ()
    if options.expect_accuracy_percent is not None:
        claims = (Claim(options.expect_accuracy_percent, "--expect-accuracy"),)
    return Expectations(
        options.min_accuracy_percent, claims, options.accuracy_budget_points, untrained=options.random_weights
    )


def _weights_key(options: ExportOptions, origin: Origin) -> str | None:
    if options.weights_key is None:
        return None
    if origin.weights_from != "file" or origin.weights is None or origin.weights.suffix == ".safetensors":
        raise UsageError("--weights-key chooses between the entries of a .pth; pass such a file with --weights")
    return options.weights_key


def _calibration_method(text: str) -> MethodChoice:
    for method in get_args(MethodChoice):
        if text == method:
            return cast(MethodChoice, method)
    raise UsageError(f"--calibration-method {text!r} is not known; use {', '.join(get_args(MethodChoice))}")


def _labels(options: ExportOptions, origin: Origin) -> tuple[str, ...]:
    """From `--labels`, else the weights' own, else those of a built-in data set that is evaluated."""
    if options.labels is not None:
        return read_labels(options.labels)
    if origin.labels and origin.are_labels_sure:
        return origin.labels
    evaluated = source_labels(options.evaluate) if options.evaluate is not None else None
    return evaluated or origin.labels


def check_max_batch(largest: int) -> None:
    """Raises UsageError."""
    if not 1 <= largest <= _MAX_BATCH:
        raise UsageError(f"--max-batch must be from 1 to {_MAX_BATCH}, got {largest}")


def read_labels(path: Path) -> tuple[str, ...]:
    """One class a line. Raises UsageError."""
    try:
        lines = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except OSError as error:
        raise UsageError(f"--labels {path}: {error.strerror}; pass a text file with one class a line") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--labels {path}: not UTF-8 text; pass a text file with one class a line") from error
    doubles = sorted({line for line in lines if lines.count(line) > 1})
    if doubles:
        raise UsageError(f"--labels {path}: {doubles[0]!r} stands there twice; each class needs a name of its own")
    if len(lines) < 2:
        raise UsageError(f"--labels {path}: {len(lines)} classes, at least 2 are needed, one a line")
    return lines
