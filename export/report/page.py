"""The bundle's report for people: the manifest as one self-contained HTML page.

The order of the story: the result, whether it is right, how fast it is, how far from the limit, and where it comes
from. `convoy.export.report.charts` draws; every figure is in the manifest, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from xml.etree.ElementTree import Element

from convoy.app.engines.measure import WORTHWHILE_SPEEDUP, best_per_sample_ms, limit, share_of_limit
from convoy.export.proof.judging import what_scores
from convoy.export.report import charts
from convoy.export.report.charts import kept_layers, recovery
from convoy.export.report.comparisons import compared_pictures
from convoy.export.report.mistakes import wrong_answers
from convoy.export.report.verdict import fastest, verdict_of
from convoy.models.bundle import (
    BUSY_MARK,
    ON_CPU,
    TOP_1,
    BuilderVerdict,
    ClassAccuracy,
    LatencyPoint,
    LatencyTable,
    Manifest,
    Roofline,
    Target,
    Variant,
    busy_words,
    counted,
)
from convoy.models.page.axis import number
from convoy.models.page.markup import Content, add, element, page, section, spanning_cell, table
from convoy.models.tasks import Task

_STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
_MOST_CARDS_IN_ROW = 4
_TOP5 = "top-5, %"
_ACCURACY = (_TOP5, "agrees with fp32, %", "points lost", "at most (95 %)")
_COUNTED: dict[Task, str] = {"detect": "objects", "segment": "pixels"}
_SPEED = ("ms, batch 1", "images / s", "times fp32", "95 % interval")
_DEVICES: dict[Target, str] = {
    "cpu": "CPUs",
    "openvino": "OpenVINO on a processor with BF16",
    "cuda": "GPUs",
    "tensorrt": "GPUs",
}
# In the terms of docs/precisions.md.
_MADE_FOR: dict[Target, str] = {"cpu": "CPU", "openvino": "OpenVINO", "cuda": "GPU", "tensorrt": "TensorRT"}


def render(manifest: Manifest) -> str:
    """The whole page. It has the hashes of all files except its own."""
    body = element(
        "main",
        _head(manifest),
        _cards(manifest),
        _overview(manifest),
        _busy(manifest),
        *section("Accuracy", *_accuracy(manifest)),
        *section("Wrong predictions", *wrong_answers(manifest)),
        *section("Largest differences", *compared_pictures(manifest)),
        *section("Speed", *_speed(manifest)),
        *section("Distance from the hardware limit", *_limits(manifest)),
        *section("Precision of each layer", *kept_layers(manifest.variants)),
        *section("Results of the TensorRT builder", *_builder(manifest)),
        *section("Accuracy recovery", *recovery(manifest.variants)),
        *section("Origin", *_origin(manifest)),
        *section("Files", _files(manifest)),
    )
    return page(f"{manifest.spec.name}: export report", body, _STYLE)


def _head(manifest: Manifest) -> Element:
    spec, origin = manifest.spec, manifest.provenance
    takes = ", ".join(f"{t.name} {t.dtype} {_shape(t.shape)}" for t in spec.inputs)
    classes = f"{len(spec.labels)} classes, " if spec.labels else ""
    again = f", latencies measured again {_when(origin.remeasured_at)}" if origin.remeasured_at else ""
    return element(
        "header",
        element("h1", spec.name),
        _banner(manifest),
        element("p", f"{origin.source}, exported {_when(origin.created_at)}{again}", class_="lead"),
        element("p", f"Takes {takes}; {classes}batches of up to {spec.max_batch_size}.", class_="lead"),
    )


def _banner(manifest: Manifest) -> Element:
    """The verdict, as an alarm with every objection if there are any."""
    verdict = verdict_of(manifest)
    banner = element("div", element("p", verdict.sentence), class_=f"banner {verdict.tone}")
    if verdict.tone == "alarm":
        banner.set("role", "alert")
    if manifest.objections:
        add(banner, element("b", "It was published with --force."))
    if len(manifest.objections) > 1:
        add(banner, element("ul", *(element("li", one) for one in manifest.objections)))
    return banner


def _cards(manifest: Manifest) -> Element:
    """The cards of all variants, in rows of about equal length."""
    count = len(manifest.variants)
    rows = math.ceil(count / _MOST_CARDS_IN_ROW)
    cards = [_card(manifest, variant) for variant in manifest.variants]
    return element("div", *cards, class_="cards", style=f"--columns: {math.ceil(count / max(1, rows))}")


def _card(manifest: Manifest, variant: Variant) -> Element:
    is_good = variant.serve and not manifest.objections
    words = _verdict(variant) + (", although it should not" if variant.serve and manifest.objections else "")
    verdict = element("span", words, class_=f"verdict {'good' if is_good else 'bad'}")
    text = element("p", variant.reason)
    return element(
        "div", element("header", element("b", variant.file), verdict), text, class_=f"card {charts.colour_of(variant)}"
    )


def _verdict(variant: Variant) -> str:
    if not variant.serve:
        return "does not serve"
    accuracy = variant.accuracy
    is_bounded = accuracy is not None and accuracy.loss_bound_points is not None
    # Files for a GPU have passed the gate here, but whether they serve is decided there.
    word = "serves" if variant.target in ON_CPU else "may serve on a GPU"
    return f"{word}, not proved" if accuracy and is_bounded and not accuracy.is_proved else word


def _overview(manifest: Manifest) -> Element:
    # With few classes, the best five mean nothing.
    has_top5 = any(one.accuracy and one.accuracy.top5 is not None for one in manifest.variants)
    score = f"{TOP_1}, %" if manifest.metric == TOP_1 else manifest.metric
    of_set = list(next((one.accuracy.set_metrics for one in manifest.variants if one.accuracy), {}))
    accuracy = [*of_set, score, *(one for one in _ACCURACY if one != _TOP5 or has_top5)]
    rows = [_overview_row(manifest, variant, accuracy) for variant in manifest.variants]
    return table(("variant", "for", "MB", *accuracy, *_SPEED), rows)


def _overview_row(manifest: Manifest, variant: Variant, accuracy: Sequence[str]) -> list[Content]:
    record = manifest.files.get(variant.file)
    size = f"{record.bytes / 1e6:.2f}" if record else "–"
    made_for = "every engine" if variant.precision == "fp32" else _MADE_FOR[variant.target]
    return [
        variant.file,
        made_for,
        size,
        *_accuracy_cells(manifest, variant, accuracy),
        *_speed_cells(variant, fastest(variant)),
    ]


def _unmeasured(manifest: Manifest, variant: Variant) -> str:
    # fp32's answers are the reference.
    is_held = variant.precision != "fp32" and variant.agreement is not None
    agreement = f"; agrees with fp32 to {100 * (variant.agreement or 0):.2f} %" if is_held else ""
    what = "images" if manifest.spec.image else "samples"
    return f"no labelled {what}{agreement}"


def _accuracy_cells(manifest: Manifest, variant: Variant, headings: Sequence[str]) -> list[Content]:
    accuracy = variant.accuracy
    if accuracy is None:
        return [spanning_cell(_unmeasured(manifest, variant), len(headings))]
    top5 = [] if _TOP5 not in headings else ["–" if accuracy.top5 is None else f"{100 * accuracy.top5:.2f}"]
    bound = "–" if accuracy.loss_bound_points is None else f"{accuracy.loss_bound_points:.2f}"
    score = f"{100 * accuracy.top1:.2f}" if accuracy.metric == TOP_1 else accuracy.in_words
    shares = [
        *(f"{value:.4f}" for value in accuracy.set_metrics.values()),
        score,
        *top5,
        f"{100 * accuracy.agreement:.2f}",
    ]
    return [*shares, f"{accuracy.loss_points:.2f}", bound]


def _speed_cells(variant: Variant, latency: LatencyTable | None) -> list[Content]:
    if latency is None:
        return [spanning_cell(f"made for {_DEVICES[variant.target]}", len(_SPEED))]
    gain = latency.speedup
    ratio: list[Content] = [spanning_cell("the reference", 2)]
    if gain is not None:
        ratio = [f"{gain.median:.2f}", f"{gain.low:.2f} to {gain.high:.2f}"]
    first = latency.points[0]
    best = min(latency.points, key=lambda point: point.median_ms / point.batch_size)
    rate = number(1e3 / best_per_sample_ms(latency))
    if gain is not None and latency.is_of_busy_machine:
        ratio[0] = f"{ratio[0]} {BUSY_MARK}"
    return [_marked(number(first.median_ms), first), _marked(rate, best), *ratio]


def _marked(figure: str, point: LatencyPoint) -> str:
    """Marked if the machine was busy with something else."""
    return f"{figure} {BUSY_MARK}" if point.is_of_busy_machine else figure


def _accuracy(manifest: Manifest) -> list[Element | None]:
    fp32 = manifest.variants[0]
    if fp32.accuracy is None:
        return [
            element("p", f"Not verified: there are no labels. Export again with {what_scores(manifest.spec.task)}."),
            *_outputs(manifest.variants),
        ]
    is_of_classes = fp32.accuracy.metric == TOP_1
    what = (
        "labelled images, from encoded bytes through the server's own preprocessing"
        if is_of_classes
        else f"samples by {fp32.accuracy.metric}, a number for each, more is better; a point is a hundredth of it"
    )
    about = f"Measured on {fp32.accuracy.images:,} {what}. Whiskers show the 95 % bound of the loss."
    checks = [element("p", f"Reference: {one}.") for one in manifest.findings]
    words = element("div", *checks, element("p", about, class_="note"))
    chart = charts.pareto(manifest.variants)
    both = words if chart is None else element("div", chart, words, class_="charts")
    return [both, *_classes(manifest.variants, manifest.spec.task), *_outputs(manifest.variants)]


def _outputs(variants: Sequence[Variant]) -> list[Element]:
    """The error of each output, if there are several."""
    names = list(variants[0].output_errors)
    if not names:
        return []
    rows = [[variant.file, *(f"{variant.output_errors[name]:.2g}" for name in names)] for variant in variants]
    about = (
        "||a - b|| / ||b|| of the worst sample: of fp32 against the original, of the others against fp32. Of whole "
        "numbers it is the share that differs."
    )
    return [
        element("h3", "Largest error of each output"),
        element("p", about, class_="note"),
        table(("variant", *names), rows),
    ]


def _classes(variants: Sequence[Variant], task: Task) -> list[Element]:
    measured = [(v, v.accuracy) for v in variants if v.accuracy and v.accuracy.per_class]
    if not measured:
        return []
    scored = [(charts.colour_of(variant), variant, accuracy.per_class) for variant, accuracy in measured]
    reference = scored[0][2]
    others = [{one.label: one.recall for one in own} for _, _, own in scored[1:]]

    def worst_first(one: ClassAccuracy) -> tuple[float, float]:
        return min((recalls.get(one.label, one.recall) - one.recall for recalls in others), default=0.0), one.recall

    rows: list[list[Element | str]] = []
    for one in sorted(reference, key=worst_first)[:25]:
        row: list[Element | str] = [one.label, f"{one.images:,}", _bar(one.recall, scored[0][0])]
        row += [_bar(r.get(one.label, 0.0), colour) for r, (colour, _, _) in zip(others, scored[1:], strict=True)]
        rows.append(row)
    order = "Largest loss first." if others else "Lowest first."
    shown = f"{order} {len(rows)} of {len(reference)} classes; the manifest lists all."
    # Of the published mean, such as mask mAP@50:95.
    measure = measured[0][1].headline[0].replace("mAP", "AP").removeprefix("mean ") if task in _COUNTED else "Recall"
    counted = _COUNTED.get(task, "images")
    title = element("h3", f"{measure[0].upper()}{measure[1:]} per class")
    headings = ["class", counted, *(variant.file for _, variant, _ in scored)]
    return [title, element("p", shown, class_="note"), table(headings, rows, class_="classes")]


def _bar(share: float, colour: str) -> Element:
    bar = element("span", class_=f"share {colour}", style=f"width: {100 * share:.1f}%")
    figure = element("span", f"{100 * share:.1f} %", class_="figure")
    return element("span", element("span", bar, class_="track"), figure, class_="barred")


def _speed(manifest: Manifest) -> list[Element | None]:
    measured = charts.timed(manifest.variants)
    if not measured:
        return []
    about = (
        f"Measured on {measured[0][2].device_fingerprint}, each file in the engine that it was made for; they take "
        "turns. Lines are medians; bands span the 10th to the 90th percentile. The ratio to fp32 is the geometric mean "
        "over batch sizes of the median paired ratio, with a bootstrap interval over the pairs. A variant that is "
        f"timed here serves only if the lower end is above {WORTHWHILE_SPEEDUP:g}."
    )
    both = element("div", charts.latency(manifest.variants), charts.throughput(manifest.variants), class_="charts")
    rows = [
        [
            f"{variant.file}, batch {point.batch_size}",
            _marked(f"{point.median_ms:.3f}", point),
            *(f"{ms:.3f}" for ms in (point.p10_ms, point.p90_ms)),
            number(1e3 * point.batch_size / point.median_ms),
            "not known" if point.others_share is None else f"{100 * point.others_share:.0f} %",
        ]
        for _, variant, latency in measured
        for point in latency.points
    ]
    figures = table(("", "median ms", "10th percentile", "90th percentile", "images / s", "CPU taken by others"), rows)
    details = element("details", element("summary", "All figures"), figures)
    return [element("p", about, class_="note"), both, *_other_engines(manifest), details]


def _other_engines(manifest: Manifest) -> list[Element]:
    """The times of each file in every engine of the export machine, and which of them do not run a file."""
    rows: list[list[Content]] = [
        [f"{variant.file} in {one.library}", *_speed_cells(variant, one)]
        for variant in manifest.variants
        for one in variant.latencies
        if variant.other_latencies
    ]
    refused = [
        element("p", f"{variant.file} is not served in {library} there: {why}.", class_="note")
        for variant in manifest.variants
        for library, why in variant.refused_by.items()
    ]
    shown = [element("h3", "Engines of this machine"), table(("", *_SPEED), rows)] if rows else []
    return [*shown, *refused]


def _busy(manifest: Manifest) -> Element | None:
    share = manifest.busiest_share
    if not share:
        return None
    return element("p", busy_words(share, "the folder of this bundle"), class_="warning")


def _limits(manifest: Manifest) -> list[Element | None]:
    roof = manifest.roofline
    if roof is None:
        return []
    int8 = roof.device_int8_gop_per_s
    about = (
        f"One image needs {number(roof.gflop_per_sample)} GFLOP (a multiplication and an addition are two) and moves "
        f"{number(roof.mb_per_sample)} MB between operators; the weights are {number(roof.weights_mb)} MB, all in "
        f"float32. This device attained {number(roof.device_gflop_per_s)} GFLOP/s in a large float32 matrix product"
        + (f", {number(int8)} Gop/s in an 8-bit one," if int8 else "")
        + f" and {number(roof.device_gb_per_s)} GB/s adding large arrays, measured in the same run. The least time is "
        "the larger of operations and bytes at these rates (Williams et al., CACM 52(4), 2009), as if every "
        "operator ran in the variant's precision."
    )
    rows = [row for _, variant, _ in charts.timed(manifest.variants) for row in _limit_rows(variant, roof)]
    headings = ("", "measured ms", "least ms", "bound by", "share of the limit")
    chart = charts.roofline(manifest.variants, roof)
    return [element("p", about, class_="note"), element("div", chart, table(headings, rows), class_="charts")]


def _limit_rows(variant: Variant, roof: Roofline) -> list[list[str]]:
    rows = []
    for point in variant.latency.points if variant.latency else ():
        need, share = limit(roof, variant.precision, point.batch_size), share_of_limit(roof, variant.precision, point)
        if need and share:
            times = [number(point.median_ms), number(need.least_ms)]
            rows.append([f"{variant.file}, batch {point.batch_size}", *times, need.bound_by, f"{100 * share:.0f} %"])
    return rows


def _builder(manifest: Manifest) -> list[Element | None]:
    asked = [(variant.file, variant.builder) for variant in manifest.variants if variant.builder is not None]
    if not asked:
        return []
    by = ", ".join(dict.fromkeys(one.library for _, one in asked))
    about = (
        f"{by} was given each file, to build a plan that several kinds of GPU can run; no GPU was needed, and how fast "
        "a plan is shows only on a GPU. Layers are its convolutions and matrix products, by the type of their inputs."
    )
    rows = [
        [
            file,
            f"{one.plan_bytes / 1e6:.1f}" if one.accepted else "–",
            f"{one.build_s:.1f}",
            counted(one.layers) or "–",
            _said(one),
        ]
        for file, one in asked
    ]
    return [
        element("p", about, class_="note"),
        table(("variant", "plan, MB", "seconds", "layers", "result"), rows, class_="words"),
    ]


def _said(verdict: BuilderVerdict) -> str:
    if not verdict.accepted:
        return f"{'refused' if verdict.asked else 'could not be asked'}: {verdict.reason}"
    warnings = "; ".join(warning.removesuffix(".") for warning in verdict.warnings)
    return f"accepted, and warns: {warnings}" if warnings else "accepted"


def _origin(manifest: Manifest) -> list[Element | None]:
    origin = manifest.provenance
    rows: list[list[str]] = [["source", origin.source]]
    if origin.weights_sha256:
        rows.append(["weights", f"sha256 {origin.weights_sha256}"])
    if origin.weights_entry:
        rows.append(["weights entry", origin.weights_entry])
    if origin.free_sizes:
        rows.append(["verified at", f"{', '.join(origin.free_sizes)} (height x width); other sizes work, too"])
    if origin.preprocessing:
        rows.append(["preprocessing", origin.preprocessing])
    if manifest.scores:
        rows.append(["scores", manifest.scores])
    samples = "images" if manifest.spec.image else "samples"
    for name, data in (("calibrated on", origin.calibration), ("evaluated on", origin.evaluation)):
        rows.append([name, f"{data.images:,} {samples} of {data.source}, sha256 {data.sha256}" if data else "nothing"])
    methods = {v.file: v.calibration_method for v in manifest.variants if v.calibration_method}
    rows += [[f"ranges of {file}", method] for file, method in methods.items()]
    rows += [[tool, version] for tool, version in origin.tools.items()]
    return [table(("", ""), rows, class_="words")]


def _files(manifest: Manifest) -> Element:
    rows: list[list[Content]] = [
        [name, f"{one.bytes:,}", element("code", one.sha256)] for name, one in manifest.files.items()
    ]
    return table(("file", "bytes", "sha256"), rows)


def _when(iso: str) -> str:
    return f"{iso[:19].replace('T', ' ')} UTC"


def _shape(shape: Sequence[int]) -> str:
    return "[" + ", ".join(["N", *(str(size) if size >= 0 else "?" for size in shape)]) + "]"
