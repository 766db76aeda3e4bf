"""Build plans ahead of any server, and use a real TensorRT builder's verdict on a variant's file.

The builder is a child process, as for a server. Its plan goes to the plan cache, where servers look. Its verdict
becomes part of an export's proof. `convoy build` builds the plans of a model's newest version, with or without a GPU.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import re
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import get_args

from rich import box
from rich.console import Console
from rich.progress import Progress as Bars
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from convoy.app.engines.cuda.engine import bucket_sizes
from convoy.app.engines.plan_builder import BuildLimits, BuildOrder, PlanBuilder
from convoy.app.engines.table import row_named
from convoy.app.engines.tensorrt_library import LIBRARIES, RTX, TensorRt, find_builder
from convoy.export.options import BuildAheadOptions
from convoy.export.progress import Progress
from convoy.export.sources.torch_job import one_line
from convoy.export.tensorrt.library import check_targets, find_gpu
from convoy.models.bundle import BuilderVerdict, Bundle, Precision, Variant, open_bundle
from convoy.models.errors import JobError, UsageError
from convoy.models.gpus import FP8_SINCE, PORTABLE, as_number, parse_targets
from convoy.models.plan_cache import NotTrusted, plan_folder, read_record
from convoy.models.plans import BuildOptions, NoPlan, PlanBuild, PlanRecord
from convoy.models.store import DEMO_STORE, Store

_LIMITS = BuildLimits(niceness=0)

_FOLDERS = re.compile(r"(?<![\w.])/(?:[^\s/:;,()]+/)+")


@dataclass(frozen=True, slots=True)
class AheadJob:
    """Where plans go, for which compute capabilities (empty: the library's choice) and up to which batch (0: none)."""

    plan_cache: Path
    library: TensorRt
    targets: tuple[str, ...]
    max_batch_size: int


@cache
def installed_version(module: str) -> str | None:
    """The installed version, without loading it; None if it is not installed.

    Cached, because reading every distribution's metadata takes half a second.
    """
    if importlib.util.find_spec(module) is None:
        return None
    for distribution in importlib.metadata.packages_distributions().get(module, ()):
        return importlib.metadata.version(distribution)
    return "of unknown version"


def build_ahead(job: AheadJob, onnx: Path, precision: Precision, limits: BuildLimits = _LIMITS) -> BuilderVerdict:
    """Build the plan of one file, or find it built. A failure is a verdict, too."""
    options = BuildOptions(precision, bucket_sizes(job.max_batch_size), profiles=job.library.profiles)
    order = BuildOrder(onnx, job.plan_cache, options, library=job.library.name, capabilities=job.targets)
    ended = _built(PlanBuilder(limits).build(order, lambda progress: None))
    if ended.plan is None:
        named = f"{job.library.title} {installed_version(job.library.module) or ''}".strip()
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


def _built(build: Coroutine[None, None, PlanBuild]) -> PlanBuild:
    """Works in a notebook as well, where an event loop runs in this thread and asyncio.run() refuses a second."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(build)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, build).result()


def accepted(
    variants: Sequence[Variant], folder: Path, max_batch_size: int, plan_cache: Path, progress: Progress
) -> tuple[Variant, ...]:
    """Add the verdict of a builder that needs no GPU, if one is installed, to each variant for GPUs.

    A file that only a plan could run and no builder accepts does not serve. A builder that itself fails refuses
    nothing, and is not started for the next file, which would end the same.
    """
    if importlib.util.find_spec(RTX.module) is None:
        return tuple(variants)
    wanted = [variant for variant in variants if row_named("tensorrt").takes(variant)]
    judged: dict[str, Variant] = {}
    with progress.step("Building with TensorRT", len(wanted)) as step:
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
    """Like `build_ahead`; a builder that cannot be asked, for whatever reason, refuses nothing."""
    try:
        # An export does not need a plan and must not wait long for one. A build takes seconds and is given minutes.
        return build_ahead(job, onnx, precision, BuildLimits(niceness=0, time_limit_s=300.0))
    except Exception as error:  # an unreadable plan, a full disk, or the library's own
        why = one_line(str(error)) or type(error).__name__
        return BuilderVerdict(job.library.title, False, job.targets, reason=why, asked=False)


def judged_by_builder(variant: Variant, verdict: BuilderVerdict) -> Variant:
    """The variant with a builder's verdict; one that only a plan could run, and that is refused, does not serve."""
    if verdict.accepted or not verdict.asked or variant.target != "tensorrt":
        return replace(variant, builder=verdict)
    reason = f"{verdict.in_words}; {variant.reason}"
    return replace(variant, builder=verdict, serve=False, reason=reason)


def targets_for(variant: Variant, targets: tuple[str, ...]) -> tuple[str, ...]:
    """The targets that can run the variant at all."""
    if variant.precision != "fp8":
        return targets
    return tuple(target for target in targets if as_number(target) >= as_number(FP8_SINCE))


def _reason(ended: PlanBuild, onnx: Path, plan_cache: Path) -> str:
    """The builder's message without folders of this machine, which must not be in a manifest."""
    reason = (ended.reason or "it gave no reason").replace(f"{onnx.parent}/", "")
    if ended.refused:  # from the library, whose node names look like folders
        return reason
    # With a relative --plan-cache, the rest of the message may look like it.
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


# `convoy build`: its options, and its table.


@dataclass(frozen=True, slots=True)
class _BuiltPlan:
    variant: Variant
    library: TensorRt
    verdict: BuilderVerdict


def run(options: BuildAheadOptions, console: Console) -> int:
    """Build what the options ask for and print the table; 1 if a plan is refused. Raises UsageError and JobError."""
    targets = parse_targets(options.targets) if options.targets is not None else ()
    cache = plan_folder(options.plan_cache)
    try:
        return _run(options, targets, cache, console)
    except KeyboardInterrupt:
        raise JobError(f"interrupted; the plans that were finished are in {cache}") from None


def _run(options: BuildAheadOptions, targets: tuple[str, ...], cache: Path, console: Console) -> int:
    bundle = _newest(options)
    variants, left = _chosen(bundle, options.precisions)
    rows: list[_BuiltPlan] = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        for library in _builders(targets):
            for variant in variants:
                suited = targets_for(variant, targets)
                if targets and not suited and options.precisions is None:
                    left.append(f"{variant.file}: not built, {variant.precision} wants {FP8_SINCE} or later")
                    continue
                bars.add_task(f"{variant.file} with {library.title}", total=None)
                asked = suited if options.precisions is None else targets
                job = AheadJob(cache, library, asked, bundle.manifest.spec.max_batch_size)
                rows.append(
                    _BuiltPlan(variant, library, build_ahead(job, bundle.path(variant.file), variant.precision))
                )
    _show(rows, left, cache, console)
    # A file that was not asked for and may not serve is no loss.
    counted = [row for row in rows if row.variant.serve or options.precisions is not None]
    return 0 if all(row.verdict.accepted for row in counted) else 1


def _newest(options: BuildAheadOptions) -> Bundle:
    store = Store.at(options.store or DEMO_STORE, options.name)
    try:
        versions, names = store.versions(options.name), store.names()
    except OSError as error:
        raise JobError(f"{error.filename}: {error.strerror}; make the store readable") from error
    if not versions:
        have = ", ".join(names) or "none"
        raise UsageError(f"there is no model {options.name!r} in {store.root} (there is: {have}); name one of these")
    newest = versions[0]
    if not newest.is_bundle:
        raise UsageError(
            f"{options.name} version {newest.version} is a bare model, which has no answers that a plan could be held "
            "to; make a bundle of it with `convoy export`"
        )
    return open_bundle(newest.folder)


def _chosen(bundle: Bundle, precisions: str | None) -> tuple[list[Variant], list[str]]:
    """The variants to build, and remarks on them. Raises UsageError for an unknown precision."""
    fitting = [variant for variant in bundle.manifest.variants if row_named("tensorrt").takes(variant)]
    if precisions is not None:
        asked = [part.strip() for part in precisions.split(",")]
        have = sorted({variant.precision for variant in fitting})
        unknown = [part for part in asked if part not in have]
        if unknown:
            known = "" if unknown[0] in get_args(Precision) else " is no precision"
            raise UsageError(
                f"--precisions {unknown[0]}{known}: the bundle has {', '.join(have)} for GPUs; choose from these, or "
                "export the model with others"
            )
        return [variant for variant in fitting if variant.precision in asked], []
    return fitting, [f"{v.file}: may not serve, whatever its plan ({v.reason})" for v in fitting if not v.serve]


def _builders(targets: tuple[str, ...]) -> list[TensorRt]:
    """The libraries that can build here for these targets. Raises JobError if there is none, and UsageError if the only
    one does not know such a target.
    """
    installed = [library for library in LIBRARIES if installed_version(library.module)]
    found = {library.name: find_builder(library, _capabilities_here()) for library in installed}
    able = [library for library in installed if found[library.name].builds]
    if not able:
        said = "; ".join(one.reason for one in found.values()) or f"run {RTX.install}, which needs no GPU"
        raise JobError(f"no TensorRT can build plans here: {said}")
    if RTX in able:
        check_targets(f"{RTX.title} {found[RTX.name].version}", found[RTX.name].targets, targets)
    fitting = [one for one in able if one.builds_anywhere or targets in ((), found[one.name].targets)]
    if not fitting:
        here = ", ".join(found[able[0].name].targets)
        raise UsageError(f"{able[0].title} builds only for the GPU here ({here}); for others run {RTX.install}")
    return fitting


def _capabilities_here() -> tuple[str, ...]:
    try:
        return (find_gpu().compute_capability,)
    except JobError:
        return ()


def _show(rows: list[_BuiltPlan], left: list[str], cache: Path, console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("variant", no_wrap=True, min_width=max((len(row.variant.file) for row in rows), default=0))
    table.add_column("library", no_wrap=True)
    table.add_column("for")
    for heading in ("MB", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("layers")
    for row in rows:
        verdict = row.verdict
        size = f"{verdict.plan_bytes / 1e6:.1f}" if verdict.accepted else "refused" if verdict.asked else "failed"
        targets = ", ".join(verdict.targets) or PORTABLE
        seconds = f"{verdict.build_s:.1f}"
        layers = ", ".join(f"{count} {precision}" for precision, count in verdict.layers.items()) or "-"
        version = verdict.library.rpartition(" ")[2]
        table.add_row(row.variant.file, f"{row.library.engine} {version}", targets, size, seconds, layers)
    console.print(table)
    for said, files in _by_words((row.verdict.in_words, row) for row in rows if not row.verdict.accepted).items():
        console.print(Text(f"{files}: {said}", style="bold red"), soft_wrap=True)
    for said, files in _by_words((warning, row) for row in rows for warning in row.verdict.warnings).items():
        console.print(Text(f"{files}: the builder warns: {said}"), soft_wrap=True)
    for line in left:
        console.print(Text(line), soft_wrap=True)
    if any(row.verdict.accepted for row in rows):
        console.print(Text(f"plans are in {cache}"), soft_wrap=True)
    elif not all(row.verdict.asked for row in rows):  # it may be at fault, and the user need not have named it
        console.print(Text(f"the plan cache is {cache}"), soft_wrap=True)


def _by_words(said: Iterable[tuple[str, _BuiltPlan]]) -> dict[str, str]:
    """The files for each message, in a line; a message for all files names none."""
    files: dict[str, list[str]] = {}
    for words, row in said:
        files.setdefault(words, []).append(row.variant.file)
    return {words: ", ".join(dict.fromkeys(names)) for words, names in files.items()}
