"""`convoy inspect`: what is in a store, and whether every byte of it is sound."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console, Group
from rich.table import Table

from app.bare_model import read_bare_model
from app.core import DEMO_STORE
from models.bundle import Bundle, LatencyTable, Variant, open_bundle
from models.errors import BundleError, UsageError
from models.store import Store, StoredVersion


def run(root: Path | None, name: str | None, console: Console) -> int:
    """Print every version of one model, or of all. Gives 1 when any is broken, else 0. Raises UsageError."""
    store = Store.at(root or DEMO_STORE)
    names = store.names() if name is None else [name]
    versions = [version for one in names for version in store.versions(one)]
    if not versions:
        what = f"model {name!r}" if name is not None else "model"
        raise UsageError(f"there is no {what} in {store.root}; export one with `convoy export`")
    broken = 0
    for version in versions:
        try:
            console.print(_shown(version, is_detailed=name is not None))
        except BundleError as error:
            broken += 1
            console.print(f"[bold red]broken[/]  {version.name} version {version.version}: ", end="")
            console.print(str(error), markup=False, highlight=False, soft_wrap=True)
    if broken:
        console.print(f"{broken} of {len(versions)} versions are broken and will not be served", style="red")
    return 1 if broken else 0


def _shown(version: StoredVersion, *, is_detailed: bool) -> Group | str:
    if not version.is_bundle:
        bare = read_bare_model(version, threads=1)
        tensors = ", ".join(f"{t.name} {t.dtype} {list(t.shape)}" for t in (*bare.spec.inputs, *bare.spec.outputs))
        return f"[bold]{version.name}[/] version {version.version}: bare model, {bare.batch_reason}; {tensors}\n"
    bundle = open_bundle(version.folder)
    spec, origin = bundle.manifest.spec, bundle.manifest.provenance
    lines = [
        f"[bold]{version.name}[/] version {version.version}: {origin.source}, exported {origin.created_at}, "
        f"{len(spec.labels)} labels, batches up to {spec.max_batch_size}"
    ]
    reasons = [f"{variant.file}: {variant.reason}" for variant in bundle.manifest.variants]
    if not is_detailed:
        return Group(*lines, _variants(bundle), *reasons, "")
    if origin.evaluation is not None:
        lines.append(f"accuracy on {origin.evaluation.images} images of {origin.evaluation.source}")
    latencies = [_latency(variant, variant.latency) for variant in bundle.manifest.variants if variant.latency]
    return Group(*lines, _variants(bundle), *reasons, *latencies, _files(bundle), "")


def _variants(bundle: Bundle) -> Table:
    table = Table("variant", "served", "top-1", "agrees", "lost", "batch 1", "largest batch")
    for variant in bundle.manifest.variants:
        table.add_row(variant.file, "yes" if variant.serve else "no", *_accuracy(variant), *_ends(variant))
    return table


def _accuracy(variant: Variant) -> tuple[str, str, str]:
    accuracy = variant.accuracy
    if accuracy is None:
        return "not measured", "-", "-"
    return f"{100 * accuracy.top1:.2f} %", f"{100 * accuracy.agreement:.2f} %", f"{accuracy.loss_points:.2f} points"


def _ends(variant: Variant) -> tuple[str, str]:
    if variant.latency is None:
        return "-", "-"
    first, last = variant.latency.points[0], variant.latency.points[-1]
    return f"{first.median_ms:.3f} ms", f"{last.median_ms:.3f} ms ({last.batch_size})"


def _latency(variant: Variant, latency: LatencyTable) -> Table:
    table = Table(
        "batch", "median ms", "p10 ms", "p90 ms", "images / s", title=f"{variant.file} on {latency.device_fingerprint}"
    )
    for point in latency.points:
        per_s = point.batch_size / point.median_ms * 1e3
        table.add_row(
            str(point.batch_size),
            f"{point.median_ms:.3f}",
            f"{point.p10_ms:.3f}",
            f"{point.p90_ms:.3f}",
            f"{per_s:,.0f}",
        )
    return table


def _files(bundle: Bundle) -> Table:
    table = Table("file", "bytes", "sha256")
    for name, record in bundle.manifest.files.items():
        table.add_row(name, f"{record.bytes:,}", record.sha256)
    return table
