"""`convoy export`: the steps in order, and their console output.

    plan -> images -> torch child -> task of the outputs -> fp32 against torch -> accuracy on a sample -> variants
         -> accuracy -> latency -> a real TensorRT builder -> roofline -> bundle

`export_bundle` is the pipeline without a terminal; `run` is what the command calls. All work happens in a temporary
folder, and the store sees a finished bundle or nothing.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.text import Text

from convoy.app.engines.batch import EngineFailure
from convoy.app.engines.cpu import cpu_budget
from convoy.export.ahead import accepted
from convoy.export.assemble import (
    BundleSigner,
    Measured,
    make_canary,
    provenance,
    publish,
    remarked,
    remeasure,
    signer_of,
    verdicts,
)
from convoy.export.cache import NO_CACHE, StepCache, default_root
from convoy.export.config_file import as_command, as_yaml
from convoy.export.data import ExportData, ImageSet, fitting, load_data, remarks_on, task_of
from convoy.export.options import ExportOptions
from convoy.export.plan import ExportPlan, make_plan
from convoy.export.preparations import better_preparation
from convoy.export.profiling.profile import Timings, measured_everywhere
from convoy.export.profiling.roofline import measure_roofline
from convoy.export.progress import IGNORED, SILENT, Progress, Step
from convoy.export.proof.activation import (
    Decision,
    Purpose,
    activation_of,
    decide,
    look_of,
    overruled,
    purpose_of,
    specs_of,
)
from convoy.export.proof.ending import normalised_outputs, read_ending
from convoy.export.proof.judging import Judge, metric_judge
from convoy.export.proof.outcomes import Outcomes, ScoredOutcomes
from convoy.export.proof.proving import AccuracyGate, LeftOut, Prover, in_words
from convoy.export.proof.sanity import NOTHING_FOUND, Claim, Expectations, Sanity, judge_reference, judge_score
from convoy.export.proof.verify import ON_NOISE, Score, check_against_torch, compared_batches, observe
from convoy.export.report.comparisons import compare_pictures
from convoy.export.report.mistakes import find_mistakes
from convoy.export.rows import count_of
from convoy.export.sources.layouts import likely_layout
from convoy.export.sources.onnx_metadata import StatedModel
from convoy.export.sources.onnx_plain import export_plain, is_plain
from convoy.export.sources.onnx_sizes import free_sizes, listed
from convoy.export.sources.origin import default_name, parse_source
from convoy.export.sources.to_onnx import reused, to_onnx
from convoy.export.sources.torch_job import INPUT_NAME, Answered, TorchResult
from convoy.export.terminal import RichProgress, summary
from convoy.export.variants.making import Made, Maker
from convoy.export.variants.pairs import why_no_fp8
from convoy.export.variants.precision import INT8_OPENVINO, RECIPES, REFERENCE, Recipe, select, without_needless_pairs
from convoy.export.variants.variant import OpenVariant, opened, opened_elsewhere
from convoy.models.annotations.reading import is_annotated
from convoy.models.bundle import Comparison, Manifest, busy_words, read_manifest
from convoy.models.datasets import source_labels
from convoy.models.errors import BundleError, JobError, UsageError
from convoy.models.samples import some
from convoy.models.spec import ModelSpec, TensorSpec
from convoy.models.store import disk_errors
from convoy.models.tasks import CLASS_TASKS, DetectionOutputs

_FIRST_LOOK_IMAGES = 512
NO_OBJECT = "no object"
_RANDOM = "its weights are random (--random-weights), so its outputs are meaningless"


def run(options: ExportOptions, console: Console, again: str = "the same command", *, is_verbose: bool = False) -> Path:
    """Export, or measure again, with progress and a final table on `console`; returns the published folder.

    `again` is the command to run after an interrupt. Raises UsageError for wrong usage and JobError for a job that
    fails or is interrupted; the store is then unchanged. Also raises JobError if the bundle is published without a
    precision that was named: the gate refuses it, or it cannot be made.
    """
    left_out = LeftOut()
    try:
        with RichProgress(console) as progress:
            if options.remeasure is not None:
                folder = remeasure(options.remeasure, options.store, progress, signer_of(options.sign))
            else:
                folder = export_bundle(options, progress, StepCache(default_root()), left_out)
    except KeyboardInterrupt:
        raise JobError(f"interrupted; nothing was published; finished steps are kept, to go on run: {again}") from None
    manifest = read_manifest(folder)
    console.print(summary(manifest, is_verbose=is_verbose))
    if share := manifest.busiest_share:
        console.print(Text(busy_words(share, shlex.quote(str(folder))), style="yellow"), soft_wrap=True)
    console.print(f"published {folder}; open its report.html for details", soft_wrap=True, highlight=False)
    if options.remeasure is not None:
        return folder
    if not (options.data or options.calibrate or options.evaluate):
        data = "FILE.npz" if manifest.spec.image is None else "FOLDER"
        console.print(f"to make INT8 and measure accuracy, run it again with --data {data}", soft_wrap=True)
    refuse_missing(options, manifest, left_out)
    return folder


def refuse_missing(options: ExportOptions, manifest: Manifest, left_out: LeftOut) -> None:
    """Raise JobError if named precisions cannot be made, or the gate refuses them."""
    gate = AccuracyGate(options.accuracy_budget_points, options.strict_gate)
    asked = {part.strip() for part in (options.precisions or "").split(",")}
    # Slow ones are not missing.
    refused = [
        variant
        for variant in manifest.variants[1:]
        if variant.precision in asked and variant.accuracy is not None and not gate.passes(variant.accuracy)
    ]
    known = {recipe.file: recipe.precision for recipe in RECIPES}
    missing = {file: reason for file, reason in left_out.reasons.items() if known[file] in asked}
    if not refused and not missing:
        return
    what = "; ".join([*(f"{variant.file} {variant.reason}" for variant in refused), *filter(None, [in_words(missing)])])
    if missing:
        advice = "; the other precisions are published; remove these from --precisions"
    else:
        # If the calibration images are at fault, the reason says so, and no budget would help.
        advice = "" if any(variant.drift for variant in refused) else "; raise --accuracy-budget or retrain"
    raise JobError(f"published without what --precisions asked for: {what}{advice}")


def export_bundle(
    options: ExportOptions,
    progress: Progress = SILENT,
    cache: StepCache = NO_CACHE,
    left_out: LeftOut | None = None,
    repeated_by: Callable[[ExportOptions], str] = as_yaml,
) -> Path:
    """The pipeline; returns the published folder. Raises UsageError and JobError; an interrupt leaves nothing.

    `repeated_by` makes the file that repeats the export. What cannot be made is recorded in `left_out`, and in the fp32
    reference's reason.
    """
    options = _named(options)
    if is_plain(options):
        return export_plain(options, progress, repeated_by(options))
    plan, signer = replace(make_plan(options), repeated_by=repeated_by(options)), signer_of(options.sign)
    for line in _understood(plan):
        progress.say(line)
    recipes = select(
        plan.asked.precisions, can_calibrate=plan.asked.calibrate is not None or plan.asked.allow_random_calibration
    )
    with progress.step("Reading images") as step:
        data = load_data(plan, step)
    for line in remarks_on(data):
        progress.say(f"warning: {line}")
    with tempfile.TemporaryDirectory(prefix="convoy-export-") as temporary, disk_errors(Path(temporary)):
        folder = Path(temporary)
        with progress.step("Reading the file" if plan.source.kind == "onnx" else "Exporting from PyTorch"):
            torch = reused(plan, data.samples, folder, cache, to_onnx)
        torch.onnx.rename(folder / REFERENCE.file)
        recipes = without_needless_pairs(recipes, folder / REFERENCE.file)
        if plan.asked.precisions is None:
            recipes, torch = _without_fp8(recipes, torch, folder / REFERENCE.file)
        try:
            return _prove_and_publish(plan, recipes, data, torch, progress, cache, signer, left_out or LeftOut())
        except EngineFailure as failure:
            raise JobError(f"the serving engine cannot run the network: {failure}") from failure


def _named(options: ExportOptions) -> ExportOptions:
    """The same with a name, and with `data` expanded. Raises UsageError if the source is invalid."""
    return replace(
        options,
        name=options.name or default_name(parse_source(options.source, trust=options.trust)),
        data=None,
        calibrate=options.calibrate or options.data,
        evaluate=options.evaluate or options.data,
    )


def _understood(plan: ExportPlan) -> Iterator[str]:
    """What export inferred, one line each, with the option that overrides it."""
    yield f"name: {plan.asked.name} (--name)"
    if plan.labels_from:
        is_of_folders = not is_annotated(plan.labels_from)
        what, order = ("folders", "alphabetical") if is_of_folders else ("classes", "the data's")
        found = f"{len(plan.labels)} {what} of {plan.labels_from}"
        yield f"labels: the {found} in {order} order, {some(plan.labels)} (--labels)"
    if plan.model is not None:
        yield from _stated(plan, plan.model)


def _stated(plan: ExportPlan, model: StatedModel) -> Iterator[str]:
    """The same for what an ONNX file says of itself."""
    image, boxes = plan.image, plan.detection
    asked = plan.asked
    if image is not None and asked.preprocess is None:
        size = f"{image.channels}x{image.height}x{image.width}"
        how = {"letterbox": "letterbox into", "exact": "resized to", "shorter_side": "resized and cropped to"}
        yield f"images: {how[image.resize_mode]} {size}, from {model.source} (--preprocess, --input)"
    if model.labels and asked.labels is None:
        whose = "file" if plan.source.kind == "onnx" else "network"
        yield f"labels: {len(model.labels)} of the {whose}, {some(model.labels)} (--labels)"
    if boxes is not None and asked.detection is None:
        overlap = "suppressed by the graph" if boxes.iou_threshold is None else f"IoU at most {boxes.iou_threshold:g}"
        yield (
            f"boxes: {boxes.boxes} is {boxes.layout}, score at least {boxes.threshold:g}, {overlap}, at most "
            f"{boxes.max_boxes} (--detection)"
        )
        if boxes.prototypes is not None:
            yield f"masks: from the prototypes {boxes.prototypes} (--detection)"
        if boxes.keypoints:
            points, values = boxes.keypoints
            yield f"keypoints: {points} for each box, with x, y{' and a score' if values == 3 else ''} (--detection)"
    if asked.task is None:
        yield f"task: {model.task}{f', {model.remark}' if model.remark else ''} (--task)"


def _without_fp8(
    recipes: tuple[Recipe, ...], torch: TorchResult, graph: Path
) -> tuple[tuple[Recipe, ...], TorchResult]:
    """Leave FP8 out if it cannot be made and was not named, and say so."""
    if not any(recipe.precision == "fp8" for recipe in recipes) or not (why := why_no_fp8(graph)):
        return recipes, torch
    return tuple(recipe for recipe in recipes if recipe.precision != "fp8"), torch.with_remarks(why)


def _without_openvino(
    recipes: Sequence[Recipe], torch: TorchResult, spec: ModelSpec, *, is_named: bool
) -> tuple[Sequence[Recipe], TorchResult]:
    """The same for OpenVINO, which does not support every network; BF16 is made anyway if it `is_named`."""
    found = [recipe for recipe in recipes if recipe is INT8_OPENVINO or (recipe.precision == "bf16" and not is_named)]
    try:
        with opened(spec, [replace(recipe, file=REFERENCE.file) for recipe in found], torch.onnx.parent) as candidates:
            for candidate in candidates:
                candidate.engine.warm_up()
            return recipes, torch
    except Exception as error:  # the other variants are still made
        files = " and no ".join(recipe.file for recipe in found)
        torch = torch.with_remarks(f"no {files}: {error}")
    return [recipe for recipe in recipes if recipe not in found], torch


def _without_fixed_sizes(recipes: Sequence[Recipe], torch: TorchResult) -> tuple[Sequence[Recipe], TorchResult]:
    """The same for files whose engines take no dynamic height and width, even if they were named."""
    left = [recipe for recipe in recipes if recipe.target == "cpu"]
    files = ", ".join(recipe.file for recipe in recipes if recipe not in left)
    why = f"no {files}: the engines that run it take no free height and width" if files else ""
    return left, torch.with_remarks(why)


def _prove_and_publish(
    plan: ExportPlan,
    recipes: Sequence[Recipe],
    data: ExportData,
    torch: TorchResult,
    progress: Progress,
    cache: StepCache,
    signer: BundleSigner | None,
    left_out: LeftOut,
) -> Path:
    folder, gate = torch.onnx.parent, AccuracyGate(plan.asked.accuracy_budget_points, plan.asked.strict_gate)
    outputs = specs_of(torch.reference, [one.reference for one in torch.elsewhere])
    asked = plan.task or torch.task or task_of(data)
    if asked is None:
        _refuse_unnamed_layout(plan, outputs)
    is_of_images = plan.image is not None
    detection = plan.detection or torch.detection
    purpose = purpose_of(
        asked, outputs, labels=plan.labels, takes_images=is_of_images, detection=detection, activation=plan.activation
    )
    if plan.task is None:
        progress.say(f"task: {purpose.task}{f', {purpose.remark}' if purpose.remark else ''} (--task)")
    unused = ""
    if plan.metric is None:
        data, unused = fitting(data, purpose.task)
    decision = _decision(plan, purpose, data, torch, folder / REFERENCE.file)
    spec = _spec(plan, torch, purpose, outputs, decision)
    with metric_judge(plan.metric, spec) as judge:
        if data.evaluation and data.evaluation.has_targets and not judge.scores_targets:
            unused = f"the targets of {data.evaluation.source} say nothing where the task is {spec.task}; pass --metric"
        remark = plan.model.remark if plan.model else ""
        torch = torch.with_remarks(remark, purpose.remark, unused)
        return _prove(plan, recipes, data, torch, spec, decision, gate, judge, progress, cache, signer, left_out)


def _refuse_unnamed_layout(plan: ExportPlan, outputs: Sequence[TensorSpec]) -> None:
    """Raise UsageError with the complete command if the outputs look like those of a detector."""
    image = plan.image
    if image is None:
        return
    layout = likely_layout({one.name: (-1, *one.shape) for one in outputs}, image.height, image.width)
    if layout is None:
        return
    raise UsageError(
        f"{plan.asked.source} looks like a detector (its outputs are like {layout}'s); pass --detection {layout}, or "
        "--task none to serve its tensors\n"
        f"for example: {as_command(plan.asked, {'--detection': layout})}"
    )


def _prove(
    plan: ExportPlan,
    recipes: Sequence[Recipe],
    data: ExportData,
    torch: TorchResult,
    spec: ModelSpec,
    decision: Decision,
    gate: AccuracyGate,
    judge: Judge,
    progress: Progress,
    cache: StepCache,
    signer: BundleSigner | None,
    left_out: LeftOut,
) -> Path:
    folder = torch.onnx.parent
    if torch.elsewhere:
        recipes, torch = _without_fixed_sizes(recipes, torch)
    else:
        recipes, torch = _without_openvino(recipes, torch, spec, is_named=plan.asked.precisions is not None)
    expected = _expected(plan, data)
    with opened(spec, [REFERENCE], folder) as (fp32,):
        known = (Answered(data.samples, torch.reference, torch.rounding), *torch.elsewhere)
        normalised = normalised_outputs(fp32.path, spec, torch.reference)
        check = partial(_errors, torch=torch, known=known, normalised=normalised)
        count = len(compared_batches(fp32)) * sum(count_of(one.samples) for one in (*known, torch.noise) if one)
        with progress.step(f"Comparing with {torch.original}", count) as step:
            errors = check(fp32, step=step)
        _first_look(plan, torch, fp32, spec, data, expected, judge, progress, cache)
    maker = None
    if len(recipes) > 1:
        assert data.calibration is not None, "recipes that need images were chosen without any; this is a bug"
        budget_points = plan.asked.accuracy_budget_points
        search_s = plan.asked.int8_budget_s
        maker = Maker(
            spec, folder, data.calibration, plan.calibration_method, budget_points, progress, cache, search_s, judge
        )
    rows = Prover(spec, folder, data, gate, progress, cache, judge).make_and_score(recipes, maker, left_out)
    outcomes = rows[0][1].outcomes
    sanity = _sanity(plan, torch, rows[0][1], expected)
    mistakes = None
    if isinstance(outcomes, Outcomes) and isinstance(data.evaluation, ImageSet) and data.evaluation.labels:
        mistakes = find_mistakes(outcomes, data.evaluation)
    comparisons = _comparisons(rows, spec, data, folder)
    timed = partial(_timings, spec, folder, check, progress)
    left, timings = left_out.without_failing([made.recipe for made, _ in rows], timed)
    proved = {made.recipe.file: (made, score) for made, score in rows}
    measured = [Measured(*proved[recipe.file], own) for recipe, own in zip(left, timings, strict=True)]
    torch = torch.with_remarks(in_words(left_out.reasons))
    variants = remarked(verdicts(measured, errors, data, gate, torch, plan.samples), _remark(plan, torch))
    variants = accepted(variants, folder, spec.max_batch_size, plan.plan_cache, progress)
    with opened(spec, [REFERENCE], folder) as (fp32,):
        canary = make_canary(fp32, data.samples)
        with progress.step("Measuring this device"):
            roofline = measure_roofline(fp32, cpu_budget())
    with progress.step("Publishing"):
        origin = provenance(plan, data, torch)
        scores = f"{decision.activation}: {decision.reason}"
        return publish(
            *(plan.store, spec, folder, variants, canary, origin, roofline),
            scores=scores,
            sanity=sanity,
            mistakes=mistakes,
            comparisons=comparisons,
            signer=signer,
            options=plan.repeated_by,
        )


def _comparisons(
    rows: Sequence[tuple[Made, Score]], spec: ModelSpec, data: ExportData, folder: Path
) -> tuple[Comparison, ...]:
    """Of a detector or segmenter that is scored on images."""
    if spec.task not in ("detect", "segment") or not isinstance(data.evaluation, ImageSet):
        return ()
    outcomes = {made.recipe.file: own.outcomes for made, own in rows if isinstance(own.outcomes, ScoredOutcomes)}
    if not outcomes:
        return ()
    return compare_pictures(outcomes, [made.recipe for made, _ in rows], data.evaluation, spec, folder)


def _errors(
    candidate: OpenVariant,
    torch: TorchResult,
    known: Sequence[Answered],
    normalised: Collection[str],
    step: Step = IGNORED,
) -> dict[str, float]:
    """The largest error of each output against the original's answers. Raises JobError if one is too large."""
    check = partial(check_against_torch, candidate, step=step, normalised=normalised, original=torch.original)
    found = [check(one.samples, one.reference, rounding=one.rounding) for one in known]
    if (noise := torch.noise) is not None:
        found.append(check(noise.samples, noise.reference, on=ON_NOISE, rounding=noise.rounding))
    return {name: max(one[name] for one in found) for name in torch.reference}


def _timings(
    spec: ModelSpec,
    folder: Path,
    check: Callable[[OpenVariant], object],
    progress: Progress,
    recipes: Sequence[Recipe],
) -> tuple[Timings, ...]:
    """The latencies of each variant that this machine can run; the reference is checked in every other engine."""

    def check_reference(candidate: OpenVariant) -> None:
        if candidate.recipe is REFERENCE:
            check(candidate)

    here = [recipe for recipe in recipes if recipe.row is not None]
    with opened(spec, here, folder) as candidates, opened_elsewhere(spec, here, folder, check_reference) as others:
        found = dict(zip(here, measured_everywhere(candidates, others, progress), strict=True))
    return tuple(found.get(recipe, Timings()) for recipe in recipes)


def _remark(plan: ExportPlan, torch: TorchResult) -> str:
    sizes = free_sizes(plan.image, torch)
    where = f"height and width are free, proved at {listed(sizes)} and measured at {sizes[0]}" if sizes else ""
    return "; ".join(filter(None, (where, torch.remark)))


def _decision(plan: ExportPlan, purpose: Purpose, data: ExportData, torch: TorchResult, graph: Path) -> Decision:
    """The activation that turns outputs into scores. Raises JobError if it is unclear."""
    if purpose.task not in CLASS_TASKS:
        return activation_of(purpose, torch.reference, plan.activation)
    outputs, ending = next(iter(torch.reference.values())), read_ending(graph)
    asked, why = plan.activation, ""
    if asked is None and purpose.task == "multilabel":
        why = "the task multilabel takes each class by itself"
        asked = "none" if look_of(outputs) == "within_0_1" else "sigmoid"
    if asked is None:
        return decide(ending, outputs, real=data.real, samples=plan.samples)
    return overruled(asked, ending, outputs, real=data.real, samples=plan.samples, why=why)


def _expected(plan: ExportPlan, data: ExportData) -> Expectations:
    """The user's expectations, and the checkpoint's accuracy if it is for these images or this data set."""
    stated, evaluation = plan.stated, data.evaluation
    if stated is None or evaluation is None:
        return plan.expected
    is_same = stated.test_sha256 == evaluation.record.sha256
    # A folder's name says little; a built-in data set's name identifies the images.
    if not is_same and not (stated.dataset == plan.asked.evaluate and source_labels(stated.dataset)):
        return plan.expected
    claim = Claim(stated.percent, "the checkpoint's header", is_same)
    return replace(plan.expected, claims=(claim, *plan.expected.claims))


def _first_look(
    plan: ExportPlan,
    torch: TorchResult,
    fp32: OpenVariant,
    spec: ModelSpec,
    data: ExportData,
    expected: Expectations,
    judge: Judge,
    progress: Progress,
    cache: StepCache,
) -> None:
    """Fail early, on a few images. Raises JobError."""
    if data.evaluation is None or not data.evaluation.has_targets or plan.asked.force or not judge.scores_targets:
        return
    few = data.evaluation.thinned(_FIRST_LOOK_IMAGES)
    (outcomes,) = observe([fp32], few, progress, "Measuring accuracy of fp32", cache, judge)
    if isinstance(outcomes, Outcomes):
        sanity = judge_reference(
            outcomes, few.labels, expected, is_sample=few.count < data.evaluation.count, samples=plan.samples
        )
        advice = ""
        if sanity.objections and isinstance(few, ImageSet):
            advice = better_preparation(plan, spec, few, float(outcomes.right.mean()), progress)
        _refuse(sanity.objections, torch, advice)


def _sanity(plan: ExportPlan, torch: TorchResult, score: Score, expected: Expectations) -> Sanity:
    """The verdict on all samples. Raises JobError for what may not be published."""
    sanity = NOTHING_FOUND
    if isinstance(score.outcomes, Outcomes):
        sanity = judge_reference(score.outcomes, plan.labels, expected, samples=plan.samples)
    elif score.accuracy is not None:
        sanity = judge_score(score.accuracy, expected)
    if not plan.asked.force:
        _refuse(sanity.objections, torch)
    if plan.asked.random_weights:
        return Sanity(sanity.findings, (_RANDOM, *sanity.objections))
    return sanity


def _refuse(objections: Sequence[str], torch: TorchResult, advice: str = "") -> None:
    if objections:
        # The user may have meant other weights in the same file.
        taken = f"the weights are {torch.weights_entry}" if torch.weights_entry else ""
        said = "; ".join(filter(None, ("; and ".join(objections), taken, advice)))
        raise JobError(f"nothing was published: {said}; pass --force to publish it anyway")


def _spec(
    plan: ExportPlan, torch: TorchResult, purpose: Purpose, outputs: tuple[TensorSpec, ...], decision: Decision
) -> ModelSpec:
    """The spec of the bundle. Raises JobError if there are not as many labels as outputs."""
    if purpose.task in CLASS_TASKS:
        classes = outputs[0].shape[0]
        is_binary = classes == 1 and len(plan.labels) == 2 and decision.are_shares
        if plan.labels and len(plan.labels) != classes and not is_binary:
            raise JobError(
                f"there are {len(plan.labels)} labels, but the network has {classes} outputs; "
                "pass the --labels that it was trained with"
            )
    try:
        return ModelSpec(
            name=plan.asked.name,
            inputs=_inputs(plan, torch),
            outputs=outputs,
            max_batch_size=min(plan.asked.max_batch, torch.max_batch),
            image=plan.image,
            activation=decision.activation,
            labels=_labels(plan.labels, purpose.detection),
            priorities=plan.priorities,
            task=purpose.task,
            segmentation=purpose.segmentation,
            detection=purpose.detection,
        )
    except BundleError as error:
        raise JobError(str(error)) from error


def _labels(labels: tuple[str, ...], detection: DetectionOutputs | None) -> tuple[str, ...]:
    """The labels with one for the class that stands for no object, if that is the last and has none."""
    is_unnamed = bool(labels) and detection is not None and detection.background == len(labels)
    return (*labels, NO_OBJECT) if is_unnamed else labels


def _inputs(plan: ExportPlan, torch: TorchResult) -> tuple[TensorSpec, ...]:
    image = plan.image
    if not torch.elsewhere or image is None:
        return plan.inputs
    return (TensorSpec(INPUT_NAME, image.tensor_dtype, image.free_tensor_shape, image.tensor_shape),)
