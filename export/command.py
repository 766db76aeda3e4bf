"""`convoy export`: the steps in their order, and what the user sees of them.

    plan -> images -> torch child -> fp32 against torch -> variants -> accuracy -> latency -> roofline -> bundle

`export_bundle` is the pipeline without a terminal; `run` is what the command calls. All work happens in a
temporary folder, and the store sees a finished bundle or nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from app.engines.base import EngineFailure
from app.engines.cpu import cpu_budget
from export.assemble import Measured, judge, make_canary, provenance, publish, remarked
from export.cache import NO_CACHE, StepCache, default_root
from export.data import ExportData, load_data
from export.options import ExportOptions
from export.plan import Plan, make_plan
from export.profiling.profile import measure_latencies
from export.profiling.roofline import measure_roofline
from export.progress import SILENT, Progress
from export.proof.gate import Gate, refused_by_name
from export.proof.proving import Prover
from export.proof.verify import check_against_torch
from export.sources.onnx_plain import export_plain, is_plain
from export.sources.reuse import reused
from export.sources.to_onnx import TorchResult, to_onnx
from export.sources.torch_job import INPUT_NAME
from export.terminal import RichProgress, summary
from export.variants.making import Maker
from export.variants.precision import REFERENCE, Recipe, select
from export.variants.variant import opened
from models.bundle import read_manifest
from models.errors import JobError
from models.spec import ModelSpec, TensorSpec
from models.store import disk_errors


def run(options: ExportOptions, console: Console, again: str = "the same command") -> Path:
    """Export, drawing progress and at the end one table on `console`; returns the published folder.

    `again` is what to run after an interrupt. Raises UsageError for a wrong call and JobError for a job that
    cannot be done or was interrupted; the store is then as before. Raises JobError, too, when the bundle is
    published but the gate refuses a precision that was asked for by name.
    """
    try:
        with RichProgress(console) as progress:
            folder = export_bundle(options, progress, StepCache(default_root()))
    except KeyboardInterrupt:
        raise JobError(f"interrupted; nothing was published; finished steps are kept, to go on run: {again}") from None
    manifest = read_manifest(folder)
    console.print(summary(manifest))
    console.print(f"published {folder}; its report.html shows it all", soft_wrap=True, highlight=False)
    refused = refused_by_name(manifest.variants, options.precisions, _gate(options))
    if refused:
        what = "; ".join(f"{variant.file} {variant.reason}" for variant in refused)
        raise JobError(f"published without what --precisions asked for: {what}; raise --accuracy-budget or retrain")
    return folder


def export_bundle(options: ExportOptions, progress: Progress = SILENT, cache: StepCache = NO_CACHE) -> Path:
    """The pipeline; returns the published folder. Raises UsageError and JobError; an interrupt leaves nothing."""
    if is_plain(options):
        return export_plain(options, progress)
    plan = make_plan(options)
    recipes = select(plan.precisions, can_calibrate=plan.calibrate is not None or plan.allow_random_calibration)
    with progress.step("read images") as step:
        data = load_data(plan, step)
    with tempfile.TemporaryDirectory(prefix="convoy-export-") as temporary, disk_errors(Path(temporary)):
        folder = Path(temporary)
        with progress.step("export from torch"):
            torch = reused(plan, data.samples, folder, cache, to_onnx)
        torch.onnx.rename(folder / REFERENCE.file)
        try:
            return _prove_and_publish(plan, recipes, data, torch, progress, cache)
        except EngineFailure as failure:
            raise JobError(f"the serving engine cannot run the network: {failure}") from failure


def _prove_and_publish(
    plan: Plan,
    recipes: Sequence[Recipe],
    data: ExportData,
    torch: TorchResult,
    progress: Progress,
    cache: StepCache,
) -> Path:
    spec, folder, gate = _spec(plan, torch), torch.onnx.parent, Gate(plan.accuracy_budget_points, plan.strict_gate)
    with progress.step("compare with torch"), opened(spec, [REFERENCE], folder) as (fp32,):
        torch_error = check_against_torch(fp32, data.samples, torch.reference)
    rows = Prover(spec, folder, data, gate, progress, cache).make_and_score(
        recipes, _maker(plan, spec, folder, data, progress, cache) if len(recipes) > 1 else None
    )
    with opened(spec, recipes, folder) as candidates:
        tables = measure_latencies(candidates, progress)
        measured = [Measured(*row, table) for row, table in zip(rows, tables, strict=True)]
        variants = remarked(judge(measured, torch_error, data, gate, torch.original), torch.remark)
        canary = make_canary(candidates[0], data.samples)
        with progress.step("measure this device"):
            roofline = measure_roofline(candidates[0], cpu_budget())
    with progress.step("publish"):
        origin = provenance(plan, data, torch.torch_version)
        return publish(plan.store, spec, folder, variants, canary, origin, roofline)


def _maker(plan: Plan, spec: ModelSpec, folder: Path, data: ExportData, progress: Progress, cache: StepCache) -> Maker:
    assert data.calibration is not None, "recipes that need images were chosen without any; this is a bug"
    return Maker(spec, folder, data.calibration, plan.calibration_method, plan.accuracy_budget_points, progress, cache)


def _gate(options: ExportOptions) -> Gate:
    return Gate(options.accuracy_budget_points, options.strict_gate)


def _spec(plan: Plan, torch: TorchResult) -> ModelSpec:
    """What the bundle promises. Raises JobError when the labels are not as many as the outputs."""
    outputs = torch.reference.shape[1]
    if plan.labels and len(plan.labels) != outputs:
        raise JobError(
            f"there are {len(plan.labels)} labels, but the network has {outputs} outputs; "
            "pass the --labels that it was trained with"
        )
    return ModelSpec(
        name=plan.name,
        inputs=(TensorSpec(INPUT_NAME, plan.image.tensor_dtype, plan.image.tensor_shape),),
        outputs=(TensorSpec(torch.output_name, "FP32", (outputs,)),),
        max_batch_size=min(plan.max_batch, torch.max_batch),
        image=plan.image,
        activation=torch.activation,
        labels=plan.labels,
    )
