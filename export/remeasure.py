"""`convoy export --remeasure`: the latencies of a bundle measured again, and what hangs on them decided again.

Accuracy, files and what a builder said stay as they are. A version of a model never changes, for a server may be
serving it; what comes of this is the next version.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from convoy.app.engines.batch import EngineFailure
from convoy.app.engines.cpu import cpu_budget
from convoy.export.ahead import judged_by_builder
from convoy.export.assemble import BundleSigner, judged_by_speed, publish_again
from convoy.export.profiling.profile import Timings, measured_everywhere
from convoy.export.profiling.roofline import measure_roofline
from convoy.export.progress import Progress
from convoy.export.variants.precision import RECIPES, Recipe
from convoy.export.variants.variant import opened, opened_elsewhere
from convoy.models.bundle import Bundle, Roofline, Variant, open_bundle
from convoy.models.errors import BundleError, JobError, UsageError
from convoy.models.store import Store, is_version


def remeasure(folder: Path, store: Path, progress: Progress, signer: BundleSigner | None = None) -> Path:
    """Measure the bundle in `folder`; returns the new version's folder.

    It is written to the store that the bundle lies in, or to `store` where it lies in none. Raises UsageError where
    there is no folder, and JobError for a bundle that cannot be measured, is of an older version, or was changed.
    """
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}; pass a version's, such as store/NAME/1")
    try:
        bundle = open_bundle(folder)
    except BundleError as error:
        raise JobError(str(error)) from error
    old = bundle.manifest
    if any(variant.passes_gate is None for variant in old.variants[1:]):
        raise JobError(
            f"{folder}: an older version of Convoy exported it, and did not write down which variants are accurate "
            "enough whatever their speed; export the model again"
        )
    timings, roofline = _measured(bundle, progress)
    reference, *others = (_with_latencies(variant, timings.get(variant.file, Timings())) for variant in old.variants)
    content = replace(
        old,
        variants=(reference, *map(_judged, others)),
        roofline=roofline,
        provenance=replace(old.provenance, remeasured_at=datetime.now(UTC).isoformat(timespec="microseconds")),
    )
    with progress.step("publish"):
        return publish_again(_store_of(folder, old.spec.name, store), bundle, content, signer)


def _with_latencies(variant: Variant, timings: Timings) -> Variant:
    return replace(variant, latency=timings.latency, other_latencies=timings.other_latencies)


def _measured(bundle: Bundle, progress: Progress) -> tuple[dict[str, Timings], Roofline | None]:
    """The timings by file, of what this machine runs; and what the machine attains, where the bundle tells that."""
    spec, folder = bundle.manifest.spec, bundle.folder
    recipes = [recipe for recipe in map(_recipe, bundle.manifest.variants) if recipe.row is not None]
    try:
        with opened(spec, recipes, folder) as candidates, opened_elsewhere(spec, recipes, folder) as others:
            measured = measured_everywhere(candidates, others, progress)
            roofline = None
            if bundle.manifest.roofline is not None:
                with progress.step("measure this device"):
                    roofline = measure_roofline(candidates[0], cpu_budget())
    except EngineFailure as failure:
        raise JobError(f"the serving engine cannot run the network: {failure}") from failure
    except BundleError as error:
        raise JobError(str(error)) from error
    return {recipe.file: timings for recipe, timings in zip(recipes, measured, strict=True)}, roofline


def _recipe(variant: Variant) -> Recipe:
    known = {recipe.file: recipe for recipe in RECIPES}
    if variant.file not in known:
        raise JobError(f"{variant.file} is no file that export makes; its latency is not known how to measure")
    return known[variant.file]


def _judged(variant: Variant) -> Variant:
    """As when it was exported, with the new latency."""
    assert variant.passes_gate is not None, "older bundles were refused; this is a bug"
    judged = judged_by_speed(replace(variant, serve=variant.passes_gate, reason=variant.proof))
    return judged if variant.builder is None else judged_by_builder(judged, variant.builder)


def _store_of(folder: Path, name: str, otherwise: Path) -> Store:
    whole = folder.resolve()
    lies_in_store = is_version(whole.name) and whole.parent.name == name
    return Store(whole.parent.parent) if lies_in_store else Store(otherwise)
