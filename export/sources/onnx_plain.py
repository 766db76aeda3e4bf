"""An ONNX file that is served as it is: its own tensors, no images, one variant.

    read -> batch, if proved -> the serving engine against the original -> canary -> bundle

Without `--preprocess` nothing is known about images, so there is nothing to calibrate or to evaluate on.
"""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from convoy.app.engines.base import run_arrays
from convoy.app.engines.batch import EngineFailure
from convoy.app.engines.cpu import cpu_budget
from convoy.app.engines.dimensions import Size, at_size, random_rows, with_examples
from convoy.app.engines.onnxruntime import LIBRARY, open_session, read_signature
from convoy.export.ahead import accepted
from convoy.export.arrays import is_array_file
from convoy.export.assemble import publish, signer_of
from convoy.export.class_names import read_labels
from convoy.export.config_file import as_command
from convoy.export.options import ExportOptions
from convoy.export.plan import check_max_batch, parse_activation, priorities_of
from convoy.export.profiling.profile import measured_everywhere
from convoy.export.progress import Progress
from convoy.export.proof.ending import normalised_outputs
from convoy.export.proof.outcomes import WHOLE
from convoy.export.proof.verify import MAX_FP32_ERROR
from convoy.export.rows import count_of, joined, noise_of_both_signs, picked
from convoy.export.sources import onnx_file
from convoy.export.sources.onnx_file import DoesNotRunError, Original
from convoy.export.sources.onnx_metadata import layout_of_file, stated_model
from convoy.export.sources.onnx_sizes import PROVED_BATCH, Batching, FreeInput, listed, settle, write_batched
from convoy.export.sources.onnx_source import image_size
from convoy.export.sources.origin import ModelSource, parse_source
from convoy.export.sources.preprocess import is_of_tensors, parse_input
from convoy.export.variants.precision import REFERENCE
from convoy.export.variants.variant import OpenVariant, opened, opened_elsewhere
from convoy.models.bundle import Canary, Provenance, Variant, sha256_file
from convoy.models.checkpoint import convoy_version
from convoy.models.errors import JobError, UsageError
from convoy.models.plan_cache import plan_folder
from convoy.models.spec import ModelSpec, TensorSpec
from convoy.models.store import Store, check_name, disk_errors


def is_plain(options: ExportOptions) -> bool:
    """Whether the source is an ONNX file that says nothing about images, without any option about them, and without
    arrays to run it on.

    Raises UsageError with the complete command if it looks like a detector.
    """
    steps = (options.preprocess, options.mean, options.std, options.resize, options.crop, options.interpolation)
    has_arrays = any(source and is_array_file(source) for source in (options.calibrate, options.evaluate))
    if not options.source.endswith(".onnx") or any(step is not None for step in steps) or has_arrays:
        return False
    path = Path(options.source)
    if options.task == "none" or not path.is_file():
        return True
    asked = parse_input(options.input).of_pictures if options.input and not is_of_tensors(options.input) else None
    size = asked or image_size(path)
    if size is None:
        return True
    if stated_model(path, size) is not None:
        return False
    if (layout := layout_of_file(path, size)) is not None:
        missing = {"--preprocess": "letterbox"}
        missing |= {"--detection": layout} if options.detection is None else {}
        missing |= {"--labels": "labels.txt"} if options.labels is None else {}
        raise UsageError(
            f"{path.name} looks like a detector (its output is like {layout}'s), but does not say how images are "
            "prepared; say it, or pass --task none to serve its tensors\n"
            f"for example: {as_command(options, missing)}"
        )
    return True


def export_plain(options: ExportOptions, progress: Progress, repeated_by: str) -> Path:
    """Publish the file as a bundle and return its folder. Raises UsageError and JobError; then nothing remains."""
    source, signer = parse_source(options.source), signer_of(options.sign)
    name = check_name(options.name)
    check_max_batch(options.max_batch)
    priorities_of(options)
    _refuse_images(options)
    labels = read_labels(options.labels) if options.labels else ()
    asked = parse_input(options.input) if options.input is not None else None
    _refuse_unprovable(source.path, name)
    with tempfile.TemporaryDirectory(prefix="convoy-export-") as temporary, disk_errors(Path(temporary)):
        folder = Path(temporary)
        with progress.step("Checking batches"):
            known = settle(source.path, asked, folder)
            largest = max(PROVED_BATCH, options.max_batch)
            batching = write_batched(known.file, folder / REFERENCE.file, known.size, largest)
        batching = replace(batching, reason="; ".join(filter(None, (known.remark, batching.reason))))
        spec = _spec(options, known, batching, labels)
        try:
            variant, canary = _prove(source, spec, known, batching, folder, progress)
        except EngineFailure as failure:
            raise JobError(f"the serving engine cannot run the network: {failure}") from failure
        plan_cache = plan_folder(options.plan_cache)
        variants = accepted([variant], folder, spec.max_batch_size, plan_cache, progress)
        with progress.step("Publishing"):
            origin = _provenance(source, known)
            made = (Store(options.store), spec, folder, variants, canary, origin, None)
            return publish(*made, signer=signer, options=repeated_by)


def _refuse_images(options: ExportOptions) -> None:
    if options.weights is not None:
        raise UsageError(f"{Path(options.source).name} carries its weights; leave --weights out")
    if options.weights_key is not None or options.random_weights:
        flag = "--random-weights" if options.weights_key is None else "--weights-key"
        raise UsageError(f"{Path(options.source).name} carries its weights; leave {flag} out")
    wanted = {
        "--calibrate": options.calibrate,
        "--evaluate": options.evaluate,
        "--class-map": options.class_map,
        "--activation": None if parse_activation(options.activation) is None else options.activation,
        "--min-accuracy": options.min_accuracy_percent,
        "--expect-accuracy": options.expect_accuracy_percent,
        "--force": options.force or None,
        "--metric": options.metric,
        "--detection": options.detection,
        "--task": options.task if options.task != "none" else None,
    }
    for flag, given in wanted.items():
        if given is not None:
            raise UsageError(
                f"{flag} needs images, but this file's preprocessing is unknown; "
                "pass --preprocess imagenet, unit or FILE.json, or --calibrate FILE.npz where it takes none"
            )
    if options.precisions not in (None, "fp32"):
        raise UsageError(f"--precisions {options.precisions} needs real images; pass --preprocess and --calibrate")


def _refuse_unprovable(original: Path, name: str) -> None:
    """Refuse strings and BF16: a bundle stores the file's own answers as NumPy numbers."""
    onnx_file.read(original)
    signature = read_signature(open_session(original, cpu_budget()), original)
    for spec in (*signature.inputs, *signature.outputs):
        if spec.dtype in ("BF16", "BYTES"):
            kind, advice = ("strings", "") if spec.dtype == "BYTES" else ("BF16", "export it with FP32 tensors, or ")
            raise JobError(
                f"{original.name} has {kind} in {spec.name}, which Convoy cannot verify; {advice}serve the file as "
                f"it is, from STORE/{name}/1/model.onnx"
            )


def _spec(options: ExportOptions, known: FreeInput, batching: Batching, labels: tuple[str, ...]) -> ModelSpec:
    signature = read_signature(open_session(known.file, cpu_budget()), known.file)
    signature = with_examples(known.file, signature, cpu_budget(), known.size)
    inputs, outputs = signature.inputs, signature.outputs
    if labels and outputs[0].shape[-1:] != (len(labels),):
        raise UsageError(f"there are {len(labels)} labels, but {outputs[0].name} is {list(outputs[0].shape)}")
    if batching.batched:
        inputs, outputs = _per_sample(inputs), _per_sample(outputs)
    largest = options.max_batch if batching.batched else 0
    return ModelSpec(
        *(options.name, inputs, outputs, largest, None, "none", labels),
        priorities=priorities_of(options),
        task="classify" if labels else "none",
    )


def _per_sample(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    return tuple(spec.without_batch() for spec in specs)


def _prove(
    source: ModelSource, spec: ModelSpec, known: FreeInput, batching: Batching, folder: Path, progress: Progress
) -> tuple[Variant, Canary]:
    with opened(spec, [REFERENCE], folder) as (served,):
        with progress.step("Comparing with the file"):
            canary = _record(source.path, spec, 8)
            noise = _noisy(source.path, spec)
            normalised = normalised_outputs(folder / REFERENCE.file, spec, canary.outputs)
            error = max(_worst_error(served, one, normalised, batched=batching.batched) for one in (canary, *noise))

            def as_file(one: OpenVariant) -> None:
                for shown in (canary, *noise):
                    _worst_error(one, shown, normalised, batched=batching.batched)

            for size in known.sizes[1:]:
                # Enough for a batch that is not a power of two.
                elsewhere = _record(source.path, _at(spec, size), 3)
                error = max(error, _worst_error(served, elsewhere, normalised, batched=batching.batched))
        with opened_elsewhere(spec, [REFERENCE], folder, as_file) as others:
            (timings,) = measured_everywhere([served], others, progress)
    count = f"{canary.samples if batching.batched else 1} random inputs, because --preprocess was not given"
    if noise:
        count = f"{count}, and on noise of both signs"
    if known.sizes:
        count = f"{count}, at heights and widths of {listed(known.sizes)}; its times are those of {known.size}"
    reason = f"equals {source.shown} in ONNX Runtime to {error:.1g} on {count}; {batching.reason}"
    made = (REFERENCE.file, REFERENCE.precision, REFERENCE.target, True, reason, error, None, timings.latency)
    return Variant(*made, other_latencies=timings.other_latencies, refused_by=dict(timings.refused_by)), canary


def _at(spec: ModelSpec, size: Size) -> ModelSpec:
    """The same with examples of this size."""
    if not spec.max_batch_size:
        return replace(spec, inputs=at_size(spec.inputs, size))
    whole = tuple(replace(one, shape=(-1, *one.shape), example=()) for one in spec.inputs)
    return replace(spec, inputs=_per_sample(at_size(whole, size)))


def _record(original: Path, spec: ModelSpec, samples: int) -> Canary:
    """Random inputs and the original file's own answers, row by row if there are rows."""
    try:
        return _record_random(original, spec, samples, are_indices=False)
    except JobError:  # a lookup table may have fewer than a hundred rows
        return _record_random(original, spec, samples, are_indices=True)


def _record_random(original: Path, spec: ModelSpec, samples: int, *, are_indices: bool) -> Canary:
    session = Original(original)
    inputs: dict[str, np.ndarray] = {}
    for index, tensor in enumerate(spec.inputs):
        # A dimension in front for the rows; a model without a batch has one row, without that dimension.
        whole = replace(tensor, shape=(-1, *tensor.shape), example=(1, *tensor.drawn_shape))
        rows = random_rows(np.random.default_rng(20 + index), whole, samples, are_indices=are_indices)
        inputs[tensor.name] = rows if spec.max_batch_size else rows[0]
    try:
        return Canary(inputs, session.one_by_one(inputs) if spec.max_batch_size else session.answer(inputs))
    except DoesNotRunError as error:
        raise JobError(
            f"{original.name} does not run on random numbers from 0 to 100 ({error}), so it cannot be "
            "verified; make the graph accept any number, for example with a Clip before a Gather"
        ) from error


def _noisy(original: Path, spec: ModelSpec) -> list[Canary]:
    """Noise of both signs and the file's answers to it; none if it does not run on noise."""
    session, noise = Original(original), noise_of_both_signs(spec.inputs)
    alone = [picked(noise, slice(row, row + 1)) for row in range(count_of(noise))]
    if not spec.max_batch_size:
        alone = [{name: array[0] for name, array in one.items()} for one in alone]
    try:
        answered = [(one, session.answer(one)) for one in alone]
    except DoesNotRunError:
        return []
    # A batch with a NaN row may have none in another run.
    finite = [
        Canary(one, answers)
        for one, answers in answered
        if all(np.isfinite(array).all() for array in answers.values() if array.dtype.kind == "f")
    ]
    if not spec.max_batch_size or not finite:
        return finite
    return [Canary(joined([one.inputs for one in finite]), joined([one.outputs for one in finite]))]


def _worst_error(served: OpenVariant, canary: Canary, normalised: Collection[str], *, batched: bool) -> float:
    """The largest ||a - b|| / ||b|| of any output, or ||a - b|| if it is `normalised`.

    Raises JobError if it is above `MAX_FP32_ERROR`.
    """
    largest = served.engine.info.batch_sizes[-1]
    worst = 0.0
    for batch in sorted({1, min(3, largest), min(canary.samples, largest)}) if batched else [1]:
        answers = _in_batches(served, canary, batch) if batched else run_arrays(served.engine, canary.inputs)
        least = {name: WHOLE if name in normalised else 0.0 for name in canary.outputs}
        worst = max(worst, *(_error(answers[name], one, least[name]) for name, one in canary.outputs.items()))
    if not worst <= MAX_FP32_ERROR:
        raise JobError(
            f"the serving engine differs from the original file by {worst:.2g}; this is a bug, or the network is random"
        )
    return worst


def _in_batches(served: OpenVariant, canary: Canary, batch: int) -> dict[str, np.ndarray]:
    runs = [
        run_arrays(served.engine, {name: array[start : start + batch] for name, array in canary.inputs.items()})
        for start in range(0, canary.samples, batch)
    ]
    return {name: np.concatenate([run[name] for run in runs]) for name in runs[0]}


def _error(answers: np.ndarray, expected: np.ndarray, least_size: float) -> float:
    if np.array_equal(answers, expected, equal_nan=answers.dtype.kind == "f"):
        return 0.0
    difference = np.linalg.norm((answers.astype(np.float64) - expected).ravel())
    size = float(np.linalg.norm(expected.astype(np.float64).ravel()))
    return float(difference / max(size, least_size, 1e-30))


def _provenance(source: ModelSource, known: FreeInput) -> Provenance:
    tools: Mapping[str, str] = {
        "convoy": convoy_version(),
        "python": platform.python_version(),
        "onnxruntime": LIBRARY.partition(" ")[2],
    }
    now = datetime.now(UTC).isoformat(timespec="microseconds")
    sizes = tuple(map(str, known.sizes))
    return Provenance(source.shown, sha256_file(source.path), None, None, dict(tools), now, free_sizes=sizes)
