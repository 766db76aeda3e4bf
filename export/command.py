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
from export.assemble import Measured, judge, make_canary, provenance, publish
from export.data import ExportData, load_data
from export.options import ExportOptions
from export.plan import Plan, make_plan
from export.precision import REFERENCE, Recipe, select
from export.profile import measure_latencies
from export.progress import SILENT, Progress
from export.roofline import measure_roofline
from export.terminal import RichProgress, summary
from export.to_onnx import TorchResult, to_onnx
from export.torch_job import INPUT_NAME, OUTPUT_NAME
from export.variant import Candidate, opened
from export.verify import check_against_torch, compare, measure_accuracy
from models.bundle import read_manifest
from models.errors import JobError
from models.spec import ModelSpec, TensorSpec
from models.store import disk_errors


def run(options: ExportOptions, console: Console) -> Path:
    """Export, drawing progress and at the end one table on `console`; returns the published folder.

    Raises UsageError for a wrong call and JobError for a job that cannot be done; the store is then as before.
    """
    with RichProgress(console) as progress:
        folder = export_bundle(options, progress)
    console.print(summary(read_manifest(folder)))
    console.print(f"published {folder}", soft_wrap=True, highlight=False)
    return folder


def export_bundle(options: ExportOptions, progress: Progress = SILENT) -> Path:
    """The pipeline; returns the published folder. Raises UsageError and JobError; an interrupt leaves nothing."""
    plan = make_plan(options)
    recipes = select(plan.precisions, can_calibrate=plan.calibrate is not None)
    with progress.step("read images") as step:
        data = load_data(plan, step)
    with tempfile.TemporaryDirectory(prefix="convoy-export-") as temporary, disk_errors(Path(temporary)):
        folder = Path(temporary)
        with progress.step("export from torch"):
            torch = to_onnx(plan, data.samples, folder)
        torch.onnx.rename(folder / REFERENCE.file)
        try:
            return _prove_and_publish(plan, recipes, data, torch, progress)
        except EngineFailure as failure:
            raise JobError(f"the serving engine cannot run the network: {failure}") from failure


def _prove_and_publish(
    plan: Plan, recipes: Sequence[Recipe], data: ExportData, torch: TorchResult, progress: Progress
) -> Path:
    spec, folder = _spec(plan, torch), torch.onnx.parent
    with progress.step("compare with torch"), opened(spec, [REFERENCE], folder) as (fp32,):
        torch_error = check_against_torch(fp32, data.samples, torch.reference)
    for recipe in recipes:
        if recipe.make is not None and data.calibration is not None:
            recipe.make(folder / REFERENCE.file, folder / recipe.file, data.calibration, progress)
    with opened(spec, recipes, folder) as candidates:
        measured = _measure(candidates, data, progress)
        variants = judge(measured, torch_error, data, plan.accuracy_budget_points)
        canary = make_canary(candidates[0], data.samples)
        with progress.step("measure this device"):
            roofline = measure_roofline(candidates[0], cpu_budget())
    with progress.step("publish"):
        origin = provenance(plan, data, torch.torch_version)
        return publish(plan.store, spec, folder, variants, canary, origin, roofline)


def _measure(candidates: Sequence[Candidate], data: ExportData, progress: Progress) -> tuple[Measured, ...]:
    if data.evaluation is not None:
        scores = measure_accuracy(candidates, data.evaluation, progress)
    else:
        scores = compare(candidates, data.samples)
    tables = measure_latencies(candidates, progress)
    return tuple(Measured(*row) for row in zip((c.recipe for c in candidates), scores, tables, strict=True))


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
        outputs=(TensorSpec(OUTPUT_NAME, "FP32", (outputs,)),),
        max_batch_size=plan.max_batch,
        image=plan.image,
        activation="softmax",
        labels=plan.labels,
    )
