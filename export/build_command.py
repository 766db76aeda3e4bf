"""`convoy build`: the plans of a model's newest version, ahead of any server, with or without a GPU.

Knows the command's options and draws its table. `convoy.export.ahead` builds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from convoy.app.engines.table import row_named
from convoy.app.engines.tensorrt_library import LIBRARIES, RTX, TensorRt, find_builder
from convoy.export.ahead import AheadJob, build_ahead, installed_version, targets_for
from convoy.export.options import BuildAheadOptions
from convoy.export.tensorrt.library import check_targets, find_gpu
from convoy.models.bundle import BuilderVerdict, Bundle, Precision, Variant, open_bundle
from convoy.models.errors import JobError, UsageError
from convoy.models.gpus import FP8_SINCE, PORTABLE, parse_targets
from convoy.models.plan_cache import plan_folder
from convoy.models.store import DEMO_STORE, Store


@dataclass(frozen=True, slots=True)
class _BuiltPlan:
    variant: Variant
    library: TensorRt
    verdict: BuilderVerdict


def run(options: BuildAheadOptions, console: Console) -> int:
    """Build what the options ask for and print the table; 1 where a plan is refused. Raises UsageError and JobError."""
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
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
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
    # What was not asked for and may not serve is no loss.
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
    """The variants to build, and what should be said of them. Raises UsageError for a precision that there is not."""
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
    """The libraries that can build here for these targets. Raises JobError where there is none, and UsageError where
    the one there is knows no such target."""
    installed = [library for library in LIBRARIES if installed_version(library)]
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
    elif not all(row.verdict.asked for row in rows):  # it may be to blame, and nobody may have named it
        console.print(Text(f"the plan cache is {cache}"), soft_wrap=True)


def _by_words(said: Iterable[tuple[str, _BuiltPlan]]) -> dict[str, str]:
    """The files of which each thing was said, in a line: what holds for all of them is not told of each."""
    files: dict[str, list[str]] = {}
    for words, row in said:
        files.setdefault(words, []).append(row.variant.file)
    return {words: ", ".join(dict.fromkeys(names)) for words, names in files.items()}
