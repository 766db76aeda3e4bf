"""`convoy export`: the steps in their order, and what the user sees of them.

    plan -> images -> torch child -> what its outputs are -> fp32 against torch -> is it right at all? -> variants
         -> accuracy -> latency -> a real TensorRT builder -> roofline -> bundle

`export_bundle` is the pipeline without a terminal; `run` is what the command calls. All work happens in a
temporary folder, and the store sees a finished bundle or nothing.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from convoy.app.batch import EngineFailure
from convoy.app.engines.cpu import cpu_budget
from convoy.export.ahead import accepted
from convoy.export.assemble import Measured, judge, make_canary, provenance, publish, remarked
from convoy.export.cache import NO_CACHE, StepCache, default_root
from convoy.export.data import ExportData, load_data
from convoy.export.options import ExportOptions
from convoy.export.plan import ExportPlan, make_plan
from convoy.export.profiling.profile import measure_latencies
from convoy.export.profiling.roofline import measure_roofline
from convoy.export.progress import SILENT, Progress
from convoy.export.proof.activation import Decision, decide, overruled
from convoy.export.proof.gate import AccuracyGate, refused_by_name
from convoy.export.proof.mistakes import find_mistakes
from convoy.export.proof.outcomes import Outcomes
from convoy.export.proof.proving import Prover
from convoy.export.proof.sanity import NOTHING_FOUND, Claim, Expectations, Sanity, judge_reference
from convoy.export.proof.verify import check_against_torch, compared_batches, observe
from convoy.export.remeasure import remeasure
from convoy.export.signing import BundleSigner, signer_of
from convoy.export.sources.ending import read_ending
from convoy.export.sources.free_input import free_sizes, listed
from convoy.export.sources.onnx_plain import export_plain, is_plain
from convoy.export.sources.reuse import reused
from convoy.export.sources.to_onnx import to_onnx
from convoy.export.sources.torch_job import INPUT_NAME, Answered, TorchResult
from convoy.export.terminal import RichProgress, summary
from convoy.export.variants.fp8 import why_no_fp8
from convoy.export.variants.making import Maker
from convoy.export.variants.precision import REFERENCE, Recipe, select
from convoy.export.variants.variant import OpenVariant, opened
from convoy.models.bundle import busy_words, read_manifest
from convoy.models.datasets import source_labels
from convoy.models.errors import BundleError, JobError
from convoy.models.spec import ModelSpec, TensorSpec
from convoy.models.store import disk_errors

_FIRST_LOOK_IMAGES = 512
_RANDOM = "its weights are random (--random-weights), so that its answers mean nothing"


def run(options: ExportOptions, console: Console, again: str = "the same command") -> Path:
    """Export, or measure again, drawing progress and at the end one table on `console`; returns the published folder.

    `again` is what to run after an interrupt. Raises UsageError for a wrong call and JobError for a job that
    cannot be done or was interrupted; the store is then as before. Raises JobError, too, when the bundle is
    published but the gate refuses a precision that was asked for by name.
    """
    try:
        with RichProgress(console) as progress:
            if options.remeasure is not None:
                folder = remeasure(options.remeasure, options.store, progress, signer_of(options.sign))
            else:
                folder = export_bundle(options, progress, StepCache(default_root()))
    except KeyboardInterrupt:
        raise JobError(f"interrupted; nothing was published; finished steps are kept, to go on run: {again}") from None
    manifest = read_manifest(folder)
    console.print(summary(manifest))
    if share := manifest.busiest_share:
        console.print(Text(busy_words(share, shlex.quote(str(folder))), style="yellow"), soft_wrap=True)
    console.print(f"published {folder}; its report.html shows it all", soft_wrap=True, highlight=False)
    if options.remeasure is not None:
        return folder
    gate = AccuracyGate(options.accuracy_budget_points, options.strict_gate)
    refused = refused_by_name(manifest.variants, options.precisions, gate)
    if refused:
        what = "; ".join(f"{variant.file} {variant.reason}" for variant in refused)
        # Where the images of calibration are to blame, the reason says so, and no budget would help.
        advice = "" if any(variant.drift for variant in refused) else "; raise --accuracy-budget or retrain"
        raise JobError(f"published without what --precisions asked for: {what}{advice}")
    return folder


def export_bundle(options: ExportOptions, progress: Progress = SILENT, cache: StepCache = NO_CACHE) -> Path:
    """The pipeline; returns the published folder. Raises UsageError and JobError; an interrupt leaves nothing."""
    if is_plain(options):
        return export_plain(options, progress)
    plan, signer = make_plan(options), signer_of(options.sign)
    recipes = select(
        plan.asked.precisions, can_calibrate=plan.asked.calibrate is not None or plan.asked.allow_random_calibration
    )
    with progress.step("read images") as step:
        data = load_data(plan, step)
    with tempfile.TemporaryDirectory(prefix="convoy-export-") as temporary, disk_errors(Path(temporary)):
        folder = Path(temporary)
        with progress.step("export from torch"):
            torch = reused(plan, data.samples, folder, cache, to_onnx)
        torch.onnx.rename(folder / REFERENCE.file)
        if plan.asked.precisions is None:
            recipes, torch = _without_fp8(recipes, torch, folder / REFERENCE.file)
        try:
            return _prove_and_publish(plan, recipes, data, torch, progress, cache, signer)
        except EngineFailure as failure:
            raise JobError(f"the serving engine cannot run the network: {failure}") from failure


def _without_fp8(
    recipes: tuple[Recipe, ...], torch: TorchResult, graph: Path
) -> tuple[tuple[Recipe, ...], TorchResult]:
    """What nobody asked for by name is left out where it cannot be made, and that is said."""
    if not any(recipe.precision == "fp8" for recipe in recipes) or not (why := why_no_fp8(graph)):
        return recipes, torch
    remark = "; ".join(filter(None, (torch.remark, why)))
    return tuple(recipe for recipe in recipes if recipe.precision != "fp8"), replace(torch, remark=remark)


def _without_bf16(
    recipes: Sequence[Recipe], torch: TorchResult, spec: ModelSpec
) -> tuple[Sequence[Recipe], TorchResult]:
    """The same for BF16, which needs an engine that does not take every network."""
    found = [recipe for recipe in recipes if recipe.precision == "bf16"]
    try:
        with opened(spec, [replace(recipe, file=REFERENCE.file) for recipe in found], torch.onnx.parent):
            return recipes, torch
    except (BundleError, EngineFailure) as error:
        remark = "; ".join(filter(None, (torch.remark, f"no bf16.onnx: {error}")))
    return [recipe for recipe in recipes if recipe not in found], replace(torch, remark=remark)


def _without_fixed_sizes(recipes: Sequence[Recipe], torch: TorchResult) -> tuple[Sequence[Recipe], TorchResult]:
    """The same for all that only engines would run which take no free height and width, whoever asked for it."""
    left = [recipe for recipe in recipes if recipe.target == "cpu"]
    files = ", ".join(recipe.file for recipe in recipes if recipe not in left)
    why = f"no {files}: the engines that run it take no free height and width" if files else ""
    return left, replace(torch, remark="; ".join(filter(None, (torch.remark, why))))


def _prove_and_publish(
    plan: ExportPlan,
    recipes: Sequence[Recipe],
    data: ExportData,
    torch: TorchResult,
    progress: Progress,
    cache: StepCache,
    signer: BundleSigner | None,
) -> Path:
    folder, gate = torch.onnx.parent, AccuracyGate(plan.asked.accuracy_budget_points, plan.asked.strict_gate)
    decision = _decision(plan, data, torch, folder / REFERENCE.file)
    spec = _spec(plan, torch, decision)
    if torch.elsewhere:
        recipes, torch = _without_fixed_sizes(recipes, torch)
    elif plan.asked.precisions is None:
        recipes, torch = _without_bf16(recipes, torch, spec)
    expected = _expected(plan, data)
    with opened(spec, [REFERENCE], folder) as (fp32,):
        are_shares = decision.activation == "none" and decision.are_shares
        known = (Answered(data.samples, torch.reference), *torch.elsewhere)
        count = len(compared_batches(fp32)) * sum(len(one.samples) for one in known)
        with progress.step(f"compare with {torch.original}", count) as step:
            torch_error = max(
                check_against_torch(fp32, one.samples, one.reference, step, are_shares=are_shares) for one in known
            )
        _first_look(plan, torch, fp32, data, expected, progress, cache)
    maker = None
    if len(recipes) > 1:
        assert data.calibration is not None, "recipes that need images were chosen without any; this is a bug"
        budget_points = plan.asked.accuracy_budget_points
        search_s = plan.asked.int8_budget_s
        maker = Maker(spec, folder, data.calibration, plan.calibration_method, budget_points, progress, cache, search_s)
    rows = Prover(spec, folder, data, gate, progress, cache).make_and_score(recipes, maker)
    outcomes = rows[0][1].outcomes
    sanity = _sanity(plan, torch, outcomes, expected)
    mistakes = find_mistakes(outcomes, data.evaluation) if outcomes and data.evaluation else None
    with opened(spec, recipes, folder) as candidates:
        tables = measure_latencies(candidates, progress)
        measured = [Measured(*row, table) for row, table in zip(rows, tables, strict=True)]
        variants = remarked(judge(measured, torch_error, data, gate, torch.original), _remark(plan, torch))
        variants = accepted(variants, folder, spec.max_batch_size, plan.plan_cache, progress)
        canary = make_canary(candidates[0], data.samples)
        with progress.step("measure this device"):
            roofline = measure_roofline(candidates[0], cpu_budget())
    with progress.step("publish"):
        origin = provenance(plan, data, torch)
        scores = f"{decision.activation}: {decision.reason}"
        return publish(
            *(plan.store, spec, folder, variants, canary, origin, roofline),
            scores=scores,
            sanity=sanity,
            mistakes=mistakes,
            signer=signer,
        )


def _remark(plan: ExportPlan, torch: TorchResult) -> str:
    sizes = free_sizes(plan.image, torch)
    where = f"height and width are free, proved at {listed(sizes)} and measured at {sizes[0]}" if sizes else ""
    return "; ".join(filter(None, (where, torch.remark)))


def _decision(plan: ExportPlan, data: ExportData, torch: TorchResult, graph: Path) -> Decision:
    ending = read_ending(graph)
    if plan.activation is None:
        return decide(ending, torch.reference, real=data.real)
    return overruled(plan.activation, ending, torch.reference, real=data.real)


def _expected(plan: ExportPlan, data: ExportData) -> Expectations:
    """What the user expects, and what the checkpoint states where it speaks of these images or of this data set."""
    stated, evaluation = plan.stated, data.evaluation
    if stated is None or evaluation is None:
        return plan.expected
    is_same = stated.test_sha256 == evaluation.record.sha256
    # A folder's name says little; a built-in data set's says which images they are.
    if not is_same and not (stated.dataset == plan.asked.evaluate and source_labels(stated.dataset)):
        return plan.expected
    claim = Claim(stated.percent, "the checkpoint's header", is_same)
    return replace(plan.expected, claims=(claim, *plan.expected.claims))


def _first_look(
    plan: ExportPlan,
    torch: TorchResult,
    fp32: OpenVariant,
    data: ExportData,
    expected: Expectations,
    progress: Progress,
    cache: StepCache,
) -> None:
    """Fail on a few images before hours are spent on many. Raises JobError."""
    if data.evaluation is None or plan.asked.force:
        return
    few = data.evaluation.thinned(_FIRST_LOOK_IMAGES)
    (outcomes,) = observe([fp32], few, progress, "is it right at all?", cache)
    sanity = judge_reference(outcomes, few.labels, expected, is_sample=few.count < data.evaluation.count)
    _refuse(sanity.objections, torch)


def _sanity(plan: ExportPlan, torch: TorchResult, outcomes: Outcomes | None, expected: Expectations) -> Sanity:
    """The verdict on all images, and what the user knows to be wrong. Raises JobError for what may not be published."""
    sanity = judge_reference(outcomes, plan.labels, expected) if outcomes else NOTHING_FOUND
    if not plan.asked.force:
        _refuse(sanity.objections, torch)
    if plan.asked.random_weights:
        return Sanity(sanity.findings, (_RANDOM, *sanity.objections))
    return sanity


def _refuse(objections: Sequence[str], torch: TorchResult) -> None:
    if objections:
        # Other weights in the same file may be the ones that were meant.
        taken = f"; the weights are {torch.weights_entry}" if torch.weights_entry else ""
        raise JobError(
            f"nothing was published, for {'; and '.join(objections)}{taken}; --force publishes it all the same"
        )


def _spec(plan: ExportPlan, torch: TorchResult, decision: Decision) -> ModelSpec:
    """What the bundle promises. Raises JobError when the labels are not as many as the outputs."""
    outputs = torch.reference.shape[1]
    is_binary = outputs == 1 and len(plan.labels) == 2 and decision.are_shares
    if plan.labels and len(plan.labels) != outputs and not is_binary:
        raise JobError(
            f"there are {len(plan.labels)} labels, but the network has {outputs} outputs; "
            "pass the --labels that it was trained with"
        )
    return ModelSpec(
        name=plan.asked.name,
        inputs=(_input(plan, torch),),
        outputs=(TensorSpec(torch.output_name, "FP32", (outputs,)),),
        max_batch_size=min(plan.asked.max_batch, torch.max_batch),
        image=plan.image,
        activation=decision.activation,
        labels=plan.labels,
        priorities=plan.priorities,
    )


def _input(plan: ExportPlan, torch: TorchResult) -> TensorSpec:
    image = plan.image
    if not torch.elsewhere:
        return TensorSpec(INPUT_NAME, image.tensor_dtype, image.tensor_shape)
    return TensorSpec(INPUT_NAME, image.tensor_dtype, image.free_tensor_shape, image.tensor_shape)
