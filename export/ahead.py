"""Plans built ahead of any server: a variant's file given to a real TensorRT builder, and what that said.

The builder is a child process, as it is for a server. What it makes lies in the plan cache, where a server looks; what
it says becomes part of the proof. Knows nothing of terminals.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from convoy.app.engines.cuda.engine import bucket_sizes
from convoy.app.engines.plan_builder import BuildLimits, BuildOrder, PlanBuilder
from convoy.app.engines.table import row_named
from convoy.app.engines.tensorrt_library import RTX, TensorRt
from convoy.export.progress import Progress
from convoy.export.sources.torch_job import one_line
from convoy.models.bundle import BuilderVerdict, Precision, Variant
from convoy.models.errors import JobError
from convoy.models.gpus import FP8_SINCE, as_number
from convoy.models.plan_cache import NotTrusted, read_record
from convoy.models.plans import BuildOptions, NoPlan, PlanBuild, PlanRecord

_LIMITS = BuildLimits(niceness=0)

_FOLDERS = re.compile(r"(?<![\w.])/(?:[^\s/:;,()]+/)+")


@dataclass(frozen=True, slots=True)
class AheadJob:
    """Where plans go, for whom (compute capabilities; none: left to the library) and up to which batch (0: none)."""

    plan_cache: Path
    library: TensorRt
    targets: tuple[str, ...]
    max_batch_size: int


def installed_version(library: TensorRt) -> str | None:
    """The version that is installed, without loading it; None where it is not."""
    if importlib.util.find_spec(library.module) is None:
        return None
    return _version_of(library.module)


@cache
def _version_of(module: str) -> str:
    """Asked once: what every distribution holds is read for it, which takes half a second."""
    for distribution in importlib.metadata.packages_distributions().get(module, ()):
        return importlib.metadata.version(distribution)
    return "of unknown version"


def build_ahead(job: AheadJob, onnx: Path, precision: Precision, limits: BuildLimits = _LIMITS) -> BuilderVerdict:
    """Build the plan of one file, or find it built. What goes wrong is a verdict, too."""
    options = BuildOptions(precision, bucket_sizes(job.max_batch_size), profiles=job.library.profiles)
    order = BuildOrder(onnx, job.plan_cache, options, library=job.library.name, capabilities=job.targets)
    ended = asyncio.run(PlanBuilder(limits).build(order, lambda progress: None))
    if ended.plan is None:
        named = f"{job.library.title} {installed_version(job.library) or ''}".strip()
        reason = _reason(ended, onnx, job.plan_cache)
        return BuilderVerdict(named, False, job.targets, build_s=ended.elapsed_s, reason=reason, asked=ended.refused)
    record = _record_of(ended.plan)
    return BuilderVerdict(
        library=f"{job.library.title} {record.key.target.version}",
        accepted=True,
        targets=record.key.target.capabilities,
        plan_bytes=record.plan.bytes,
        build_s=record.build_s,
        layers=record.audit.by_precision if record.audit else {},
        warnings=record.warnings,
    )


def accepted(
    variants: Sequence[Variant], folder: Path, max_batch_size: int, plan_cache: Path, progress: Progress
) -> tuple[Variant, ...]:
    """The variants, each that is for GPUs with the verdict of a builder that needs none, where one is installed.

    What only a plan could run, and no builder takes, does not serve. A builder that fails of itself refuses nothing,
    and is not started for the next file, which would end as the first.
    """
    if importlib.util.find_spec(RTX.module) is None:
        return tuple(variants)
    wanted = [variant for variant in variants if row_named("tensorrt").takes(variant)]
    judged: dict[str, Variant] = {}
    with progress.step("build with TensorRT", len(wanted)) as step:
        for variant in wanted:
            job = AheadJob(plan_cache, RTX, (), max_batch_size)
            verdict = _asked(job, folder / variant.file, variant.precision)
            if not verdict.asked and len(judged) + 1 < len(wanted):
                verdict = replace(verdict, reason=f"{verdict.reason} (the files after it were not tried)")
            judged[variant.file] = judged_by_builder(variant, verdict)
            step.advance()
            if not verdict.asked:
                break
    return tuple(judged.get(variant.file, variant) for variant in variants)


def _asked(job: AheadJob, onnx: Path, precision: Precision) -> BuilderVerdict:
    """As `build_ahead`; that it cannot be asked, for whatever reason, is a verdict that refuses nothing."""
    try:
        # An export is good without any plan, and shall not wait long for one. What takes seconds is given minutes.
        return build_ahead(job, onnx, precision, BuildLimits(niceness=0, time_limit_s=300.0))
    except Exception as error:  # a plan that is not to be read, a full disk, or the library's own
        why = one_line(str(error)) or type(error).__name__
        return BuilderVerdict(job.library.title, False, job.targets, reason=why, asked=False)


def judged_by_builder(variant: Variant, verdict: BuilderVerdict) -> Variant:
    """The variant with what a builder said of it; what only a plan could run, and it refuses, does not serve."""
    if verdict.accepted or not verdict.asked or variant.target != "tensorrt":
        return replace(variant, builder=verdict)
    reason = f"{verdict.in_words}; {variant.reason}"
    return replace(variant, builder=verdict, serve=False, reason=reason)


def targets_for(variant: Variant, targets: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the targets that can run the variant at all."""
    if variant.precision != "fp8":
        return targets
    return tuple(target for target in targets if as_number(target) >= as_number(FP8_SINCE))


def _reason(ended: PlanBuild, onnx: Path, plan_cache: Path) -> str:
    """The builder's words without folders of this machine, which are of no interest to whoever reads a manifest."""
    reason = (ended.reason or "it gave no reason").replace(f"{onnx.parent}/", "")
    if ended.refused:  # by the library, whose words have names of nodes that look like folders
        return reason
    # With a relative --plan-cache the rest of the words may look like it.
    named = reason.replace(str(plan_cache), "the plan cache") if plan_cache.is_absolute() else reason
    return _FOLDERS.sub("", named)


def _record_of(plan: Path) -> PlanRecord:
    try:
        record = read_record(plan)
    except (NotTrusted, OSError) as error:
        raise JobError(f"{plan} was built and cannot be read: {error}") from error
    if isinstance(record, NoPlan):
        raise JobError(f"{plan} was built and cannot be read: {record.reason}")
    return record
