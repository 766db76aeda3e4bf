"""`convoy inspect`: what is in a store, and whether every byte of it is valid."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from convoy.app.engines.measure import best_per_sample_ms, share_of_limit
from convoy.app.lifecycle.remote_files import RemoteError, is_url
from convoy.app.lifecycle.remote_store import RemoteStore
from convoy.app.lifecycle.store_watch import look_at_model, names_in
from convoy.app.loading.bare_model import read_bare_model
from convoy.models.bundle import (
    BUSY_MARK,
    ON_CPU,
    REPORT,
    Interval,
    LatencyPoint,
    LatencyTable,
    Manifest,
    Variant,
    busy_words,
    counted,
    open_bundle,
)
from convoy.models.errors import BundleError, JobError, NotFetched, UsageError
from convoy.models.store import DEMO_STORE, Store, StoredVersion, is_name, is_version

_COLUMNS = 80  # the usual width of a terminal


def run(place: str | None, name: str | None, console: Console, *, has_hashes: bool = False) -> int:
    """Print every version of one model, or of all. Returns 1 if any is broken, otherwise 0.

    `place` is a folder or a URL, from which everything is fetched first. Raises UsageError and JobError.
    """
    store = _open(place or str(DEMO_STORE), name)
    try:
        names, misplaced = ([name], ()) if name is not None else names_in(store)
    except RemoteError as trouble:
        raise JobError(str(trouble)) from trouble
    looks = {one: look_at_model(store, one) for one in names}
    for told in (*misplaced, *(told for look in looks.values() for told in look.misplaced)):
        _print(console, "[yellow]misplaced[/]  ", told)
    versions = [store.version(one, number) for one, look in looks.items() for number in sorted(look.versions)[::-1]]
    unreadable = [f"{one}: {look.trouble}" for one, look in looks.items() if look.trouble]
    if not versions and not unreadable:
        what = f"model {name!r}" if name is not None else "model"
        advice = "export one with `convoy export`" if place else "this is the demo; name yours with --store"
        raise UsageError(f"there is no {what} in {store.root}; {advice}")
    broken = 0
    for error in unreadable:
        _print(console, "[bold red]broken[/]  ", error)
    for version in versions:
        try:
            if isinstance(store, RemoteStore):
                store.fetch(version)
            console.print(_shown(version, is_detailed=name is not None, has_hashes=has_hashes))
        except (BundleError, NotFetched) as trouble:
            broken += 1
            _print(console, f"[bold red]broken[/]  {version.name} version {version.version}: ", str(trouble))
    if broken:
        console.print(f"{broken} of {len(versions)} versions are broken and will not be served", style="red")
    return 1 if broken or unreadable else 0


def _print(console: Console, marked: str, plain: str) -> None:
    """One line, whose first part is markup and whose second is not."""
    console.print(marked, end="")
    console.print(plain, markup=False, highlight=False, soft_wrap=True)


def _open(place: str, name: str | None) -> Store | RemoteStore:
    """Raises UsageError."""
    if is_url(place):
        from convoy.app.config.settings import read_settings  # which imports the server

        cache_folder = read_settings({}).store_cache_folder()
        return RemoteStore(place, name or _name_of(Path(place)), cache_folder, is_name_asked_for=False)
    return Store.at(Path(place), name or _name_of(Path(place).resolve()))


def _name_of(whole: Path) -> str:
    """The name of a store that is a single model: that of its folder."""
    name = whole.parent.name if is_version(whole.name) else whole.name
    return name if is_name(name) else "model"


def _shown(version: StoredVersion, *, is_detailed: bool, has_hashes: bool) -> Group:
    if not version.is_bundle:
        return _bare(version)
    manifest = open_bundle(version.folder).manifest
    spec, origin = manifest.spec, manifest.provenance
    data, samples = origin.evaluation, "images" if spec.image else "samples"
    evaluated = f"accuracy on {data.images:,} {samples} of {data.source}" if data else "not verified on labels"
    labels = f"{len(spec.labels)} labels, " if spec.labels else ""
    lines: list[RenderableType] = [
        _title(version, f"{origin.source}, exported {origin.created_at[:16].replace('T', ' ')} UTC"),
        Text(f"{spec.task}, {labels}batches up to {spec.max_batch_size}, {evaluated}"),
        Text(),
        variants_table(manifest),
        Text(),
        *map(Text, manifest.set_lines),
        *(Text(f"{variant.file}: {variant.reason}") for variant in manifest.variants),
        *_told(manifest),
    ]
    if share := manifest.busiest_share:
        lines.append(Text(busy_words(share, shlex.quote(str(version.folder))), style="yellow"))
    if is_detailed:
        lines += [*_device(manifest), *_precisions(manifest), *_latencies(manifest), Text(), _files(manifest), Text()]
    if has_hashes:
        lines += [Text(f"{name} sha256\n  {record.sha256}") for name, record in manifest.files.items()]
    if is_detailed and REPORT in manifest.files:
        lines.append(Text(f"Charts: {version.folder / REPORT}"))
    return Group(*lines, "")


def _told(manifest: Manifest) -> list[RenderableType]:
    """The kind of scores and the findings about the reference; last, in red, the objections to the model."""
    entry, said = manifest.provenance.weights_entry, manifest.provenance.preprocessing
    return [
        *([Text(f"scores: {manifest.scores}")] if manifest.scores else []),
        *([Text(f"weights: {entry}")] if entry else []),
        *([Text(f"preprocessing: {said}")] if said else []),
        *(Text(f"checked: {finding}") for finding in manifest.findings),
        *(Text(f"published with --force despite: {objection}", style="bold red") for objection in manifest.objections),
    ]


def _bare(version: StoredVersion) -> Group:
    bare = read_bare_model(version, threads=1)
    tensors = ", ".join(f"{t.name} {t.dtype} {list(t.shape)}" for t in (*bare.spec.inputs, *bare.spec.outputs))
    return Group(_title(version, f"bare model, {bare.batch_reason}; {tensors}"), "")


def _title(version: StoredVersion, rest: str) -> Text:
    return Text.assemble((version.name, "bold"), f" version {version.version}: {rest}")


def variants_table(manifest: Manifest) -> Table:
    """One row per variant, in at most 80 columns.

    `lost` is points of top-1, or of another score per sample, with its 95 % bound; the speed-up has its interval. Long
    figures narrow the gaps and lose digits.
    """
    # A longer name would widen the table; the reasons below it name the metric.
    metric = manifest.heading if len(manifest.heading) <= 8 else "score"
    headings = "serves", metric, "lost (95 %)", "ms b=1", "best/s", "times fp32"
    # Our names stay whole, even beside long figures; a longer one, of a foreign bundle, is folded.
    longest = min(max((len(one.file) for one in manifest.variants), default=0), len("int8-openvino.onnx"))
    for gap, ratio in _FORMS:
        table = _table(gap)
        table.add_column("variant", overflow="fold", min_width=longest, max_width=longest)
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=True)
        for one in manifest.variants:
            table.add_row(escape(one.file), _serves(manifest, one), *_accuracy(one), *_speed(one, ratio))
        if _width(table) <= _COLUMNS:
            break
    table.columns[0].max_width = None
    return table


def _table(gap: int = 2) -> Table:
    """With this gap between columns."""
    return Table(box=box.SIMPLE_HEAD, padding=(0, gap - 1, 0, 0), show_edge=False)


def _width(table: Table) -> int:
    """The width without folding."""
    return Console(width=10 * _COLUMNS).measure(table).maximum


def _serves(manifest: Manifest, variant: Variant) -> str:
    if not variant.serve:
        return "no"
    where = "yes" if variant.target in ON_CPU else "on GPU"
    return f"[bold red]{where}![/]" if manifest.objections else "[green]yes[/]" if variant.target in ON_CPU else where


def _accuracy(variant: Variant) -> tuple[str, str]:
    accuracy = variant.accuracy
    if accuracy is None:
        return "-", "-"
    # fp32 is the reference.
    bound = None if variant.precision == "fp32" else accuracy.loss_bound_points
    lost = f"{accuracy.loss_points:.2f}" + (f" (<{bound:.2f})" if bound is not None else "")
    return accuracy.headline[1], lost


def _speed(variant: Variant, ratio: Callable[[Interval], str]) -> tuple[str, str, str]:
    latency = variant.latency
    if latency is None:
        return "-", "-", "-"
    first, gain = latency.points[0], latency.speedup
    mark = BUSY_MARK * latency.is_of_busy_machine
    return (
        f"{_three_digits(first.median_ms)}{BUSY_MARK * first.is_of_busy_machine}",
        f"{1e3 / best_per_sample_ms(latency):,.0f}",
        f"{ratio(gain)}{mark}" if gain else "-",
    )


def _ratio_in_full(gain: Interval) -> str:
    return f"{_times(gain.median)} ({_times(gain.low)}-{_times(gain.high)})"


def _ratio_in_short(gain: Interval) -> str:
    return f"{gain.median:.1f} ({gain.low:.1f}-{gain.high:.1f})"


def _ratio_alone(gain: Interval) -> str:
    return _times(gain.median)


# Gaps and forms of the speed-up: the first that fits.
_FORMS: tuple[tuple[int, Callable[[Interval], str]], ...] = (
    *((2, _ratio_in_full), (2, _ratio_in_short)),
    *((1, _ratio_in_full), (1, _ratio_in_short), (1, _ratio_alone)),
)


def _times(ratio: float) -> str:
    return f"{ratio:.{2 if ratio < 10 else 1}f}"


def _three_digits(figure: float) -> str:
    return f"{figure:.0f}" if figure >= 100 else f"{figure:.3g}"


def _device(manifest: Manifest) -> Iterator[RenderableType]:
    roof = manifest.roofline
    if roof is None:
        return
    int8 = f", {roof.device_int8_gop_per_s:,.0f} in 8 bits" if roof.device_int8_gop_per_s else ""
    yield Text(f"\nmeasured on {roof.device_fingerprint}")
    yield Text(f"attains {roof.device_gflop_per_s:,.0f} GFLOP/s{int8}, and {roof.device_gb_per_s:,.0f} GB/s")
    yield Text(f"one sample needs {roof.gflop_per_sample:.3g} GFLOP and moves {roof.mb_per_sample:.3g} MB")
    for variant, latency in _measured(manifest):
        point = latency.points[-1]
        share = share_of_limit(roof, variant.precision, point)
        if share is not None:
            yield Text(f"{variant.file}: {100 * share:.0f} % of the limit at batch {point.batch_size}")


def _precisions(manifest: Manifest) -> Iterator[RenderableType]:
    yield Text()
    for variant in manifest.variants:
        if variant.audit:
            counts = counted(variant.audit.by_precision)
            share = f"{variant.audit.share_in_words}; " if variant.audit.share_in_words else ""
            names = list(variant.audit.kept)
            kept = ", ".join(names[:4]) or "none"
            if len(names) > 4:
                kept += f" and {len(names) - 4} more"
            yield Text(f"{variant.file}: {share}operators {counts}; kept higher: {kept}")
        if variant.builder:
            yield Text(f"{variant.file}: {variant.builder.in_words}")


def _measured(manifest: Manifest) -> list[tuple[Variant, LatencyTable]]:
    return [(variant, variant.latency) for variant in manifest.variants if variant.latency]


def _latencies(manifest: Manifest) -> Iterator[RenderableType]:
    """For all variants the median with its 10th and 90th percentile, and the rate; as many side by side as fit."""
    left = _measured(manifest)
    while left:
        counts = range(len(left), 0, -1)
        fits = (count for count in counts if _width(_latency_table(left[:count])) <= _COLUMNS)
        count = next(fits, 1)
        yield from (Text(), _latency_table(left[:count]))
        left = left[count:]
    for variant, latency in _measured(manifest):
        if latency.fixed_ms is not None and latency.per_sample_ms is not None:
            yield Text(f"{variant.file}: about {latency.fixed_ms:.3g} ms + {latency.per_sample_ms:.3g} ms per sample")


def _latency_table(measured: Sequence[tuple[Variant, LatencyTable]]) -> Table:
    """A row per batch size; "" if a variant was not measured at that size."""
    headings = ["batch"]
    for variant, _ in measured:
        headings += [f"{variant.precision} ms", "p10-p90", "per s"]
    table = _table()
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for points in zip_longest(*(latency.points for _, latency in measured)):
        size = next(point.batch_size for point in points if point)
        table.add_row(str(size), *(cell for point in points for cell in (_cells(point) if point else ("", "", ""))))
    return table


def _cells(point: LatencyPoint) -> tuple[str, str, str]:
    per_s = point.batch_size / point.median_ms * 1e3
    mark = BUSY_MARK * point.is_of_busy_machine
    return (
        f"{point.median_ms:.3f}{mark}",
        f"{_three_digits(point.p10_ms)}-{_three_digits(point.p90_ms)}",
        f"{per_s:,.0f}",
    )


def _files(manifest: Manifest) -> Table:
    table = _table()
    table.add_column("file", overflow="fold")
    table.add_column("bytes", justify="right", no_wrap=True)
    for name, record in manifest.files.items():
        table.add_row(escape(name), f"{record.bytes:,}")
    return table
