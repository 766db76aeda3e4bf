"""The report's charts: which figures of the manifest are drawn against which.

A variant keeps its colour on every chart. Tables beside them show what really runs in which precision, and why.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from convoy.app.engines.measure import Line, best_per_sample_ms, device_rate, limit
from convoy.export.report import charts
from convoy.models.bundle import TOP_1, LatencyPoint, LatencyTable, NodeAudit, Roofline, Target, Variant
from convoy.models.page import markup
from convoy.models.page.axis import Axis, number
from convoy.models.page.chart import Chart
from convoy.models.page.markup import add, element

Measured = tuple[str, Variant, LatencyTable]
# Classes of the style sheet.
PRECISION_COLOURS = {"fp32": "k0", "fp16": "k1", "int8": "k2", "fp8": "k4", "bf16": "k5"}

# INT8 files for one library; a chart may also show the general one.
INT8_COLOURS: dict[Target, str] = {"tensorrt": "k3", "openvino": "k7"}


def colour_of(variant: Variant) -> str:
    """The same on every page, whichever other variants there are."""
    if variant.precision == "int8" and variant.target in INT8_COLOURS:
        return INT8_COLOURS[variant.target]
    return PRECISION_COLOURS[variant.precision]


def timed(variants: Sequence[Variant]) -> list[Measured]:
    """The variants that were measured on this device, with their colours."""
    return [(colour_of(variant), variant, variant.latency) for variant in variants if variant.latency]


def pareto(variants: Sequence[Variant]) -> Element | None:
    """Accuracy against the time per image, at the most efficient batch size; for two variants or more."""
    dots = [
        (best_per_sample_ms(table), 100 * variant.accuracy.top1, colour, variant)
        for colour, variant, table in timed(variants)
        if variant.accuracy
    ]
    if len(dots) < 2:
        return None
    metric = next(variant.accuracy.metric for *_, variant in dots if variant.accuracy)
    y = _accuracy_axis([top1 for _, top1, _, _ in dots] + [_proved(variant) for *_, variant in dots], metric)
    chart = Chart(
        "Accuracy against time",
        f"{'Top-1 accuracy' if metric == TOP_1 else metric} over milliseconds per image: "
        + "; ".join(_said(ms, top1, variant) for ms, top1, _, variant in dots),
        Axis("milliseconds per image, at the best batch size", 0, 1.15 * max(dot[0] for dot in dots)),
        y,
    )
    front = _front([(ms, top1) for ms, top1, _, _ in dots])
    chart.line(front, "front")
    for ms, top1, colour, variant in dots:
        if (worst := _proved(variant)) < top1:
            chart.whisker(ms, worst, top1, colour)
        mark = f"{'dot' if variant.serve else 'ring'} {colour}"
        means = variant.file if variant.serve else f"{variant.file} (does not serve)"
        chart.dot(ms, top1, _said(ms, top1, variant), mark, means)
    if len(front) > 1:
        chart.explain("no variant is both faster and better", "front")
    return chart.figure()


def latency(variants: Sequence[Variant]) -> Element | None:
    """Milliseconds per batch over its size, with the fitted line."""
    measured = timed(variants)
    if not measured:
        return None
    points = [point for _, _, table in measured for point in table.points]
    chart = Chart(
        "Latency over batch size",
        "; ".join(
            f"{variant.file}: " + ", ".join(f"{number(p.median_ms)} ms at {p.batch_size}" for p in table.points)
            for _, variant, table in measured
        ),
        _batch_axis(measured),
        _log_axis("milliseconds per batch", [p.p10_ms for p in points], [p.p90_ms for p in points]),
    )
    for colour, variant, table in measured:
        chart.band([(p.batch_size, p.p10_ms, p.p90_ms) for p in table.points], colour)
        chart.line([(p.batch_size, p.median_ms) for p in table.points], f"line {colour}", variant.file)
        for p in table.points:
            says = f"{variant.file}, batch {p.batch_size}: {p.median_ms:.3f} ms"
            chart.dot(p.batch_size, p.median_ms, f"{says}{_while_busy(p)}", f"{_mark(p)} {colour}")
        if table.fixed_ms is not None and table.per_sample_ms is not None:
            line = Line(table.fixed_ms, table.per_sample_ms)
            fitted = f"{number(line.fixed_ms)} ms + {number(line.per_sample_ms)} ms per image"
            chart.line([(size, line.at(size)) for size in _dense(table)], f"dotted {colour}", fitted)
    if any(table.is_of_busy_machine for _, _, table in measured):
        chart.explain("measured while the machine was busy", "ring soft")
    return chart.figure()


def throughput(variants: Sequence[Variant]) -> Element | None:
    """Images per second over batch size."""
    measured = timed(variants)
    if not measured:
        return None
    top = max(1e3 * p.batch_size / p.p10_ms for _, _, table in measured for p in table.points)
    chart = Chart(
        "Throughput over batch size",
        "; ".join(
            f"{variant.file}: at most {number(1e3 / best_per_sample_ms(table))} images a second"
            for _, variant, table in measured
        ),
        _batch_axis(measured),
        Axis("images per second", 0, 1.05 * top),
    )
    for colour, variant, table in measured:
        chart.band(
            [(p.batch_size, 1e3 * p.batch_size / p.p90_ms, 1e3 * p.batch_size / p.p10_ms) for p in table.points], colour
        )
        rates = [(p.batch_size, 1e3 * p.batch_size / p.median_ms) for p in table.points]
        chart.line(rates, f"line {colour}", variant.file)
        for (size, rate), p in zip(rates, table.points, strict=True):
            says = f"{variant.file}, batch {size}: {number(rate)} images per second{_while_busy(p)}"
            chart.dot(size, rate, says, f"{_mark(p)} {colour}")
    if any(table.is_of_busy_machine for _, _, table in measured):
        chart.explain("measured while the machine was busy", "ring soft")
    return chart.figure()


def roofline(variants: Sequence[Variant], roof: Roofline) -> Element | None:
    """Attained operations per second over arithmetic intensity, below the device's ceilings."""
    dots = []
    for colour, variant, table in timed(variants):
        for point in dict.fromkeys((table.points[0], table.points[-1])):
            need = limit(roof, variant.precision, point.batch_size)
            if need:
                dots.append((colour, variant, point.batch_size, need.flop_per_byte, 1e3 * need.gflop / point.median_ms))
    if not dots:
        return None
    roofs = {variant.precision: (colour, device_rate(roof, variant.precision)) for colour, variant, *_ in dots}
    ridges = [rate / roof.device_gb_per_s for _, rate in roofs.values() if rate]
    xs = [*ridges, *(x for *_, x, _ in dots)]
    x = Axis("operations per byte", min(xs) / 3, max(xs) * 3, "log")
    ys = [*(rate for _, rate in roofs.values() if rate), *(y for *_, y in dots)]
    chart = Chart(
        "Roofline",
        "Attained 10^9 operations per second over operations per byte: "
        + "; ".join(f"{variant.file} at batch {size}: {number(y)}" for _, variant, size, _, y in dots),
        x,
        _log_axis("10⁹ operations per second", ys, ys),
    )
    for precision, (colour, rate) in roofs.items():
        if rate:
            corners = [
                (at, min(rate, at * roof.device_gb_per_s)) for at in (x.low, rate / roof.device_gb_per_s, x.high)
            ]
            chart.line(corners, f"dashed {colour}", f"this device in {precision}: {number(rate)}")
    for colour, variant, size, at, y in dots:
        mark = f"{'ring' if size == 1 else 'dot'} {colour}"
        chart.dot(at, y, f"{variant.file} at batch {size}: {number(y)}", mark, f"{variant.file}, batch {size}")
    return chart.figure()


def trade_off(variant: Variant) -> Element:
    """Points lost over the layers kept in higher precision."""
    steps, colour = variant.trade_offs, colour_of(variant)
    metric = steps[0].accuracy.metric
    losses = [step.accuracy.loss_points for step in steps]
    bounds = [step.accuracy.loss_bound_points for step in steps]
    every = [*losses, *(bound for bound in bounds if bound is not None)]
    most = max(1, *(step.layers_kept for step in steps))
    span = max(1.0, max(every) - min(0.0, *every))
    chart = Chart(
        f"What {variant.file} loses with more layers kept",
        f"Points of {metric} lost against fp32: "
        + "; ".join(
            f"{number(loss)} with {step.layers_kept} layers kept" for step, loss in zip(steps, losses, strict=True)
        ),
        Axis("layers kept in higher precision", 0, most * 1.05, marked=tuple(range(0, most + 1, 1 + most // 10))),
        Axis(f"points of {metric} lost", min(0.0, *every) - 0.05 * span, max(every) + 0.08 * span),
    )
    chart.line([(step.layers_kept, loss) for step, loss in zip(steps, losses, strict=True)], f"line {colour}")
    for step, loss, bound in zip(steps, losses, bounds, strict=True):
        if bound is not None:
            chart.whisker(step.layers_kept, bound, loss, colour)
        timing = f", {step.median_ms:.3f} ms" if step.median_ms is not None else ""
        says = f"{step.layers_kept} layers kept: {loss:.2f} points lost{timing}"
        chart.dot(step.layers_kept, loss, says, f"dot {colour}")
    chart.explain("measured loss, with its 95 % bound where it was computed", f"dot {colour}")
    return chart.figure()


def _said(ms: float, top1: float, variant: Variant) -> str:
    return f"{variant.file}: {variant.accuracy.in_words if variant.accuracy else top1} at {number(ms)} ms"


def _proved(variant: Variant) -> float:
    """Top-1 in percent if the loss is as large as its bound."""
    assert variant.accuracy is not None
    top1, bound = 100 * variant.accuracy.top1, variant.accuracy.loss_bound_points
    return top1 if bound is None else top1 + variant.accuracy.loss_points - bound


def _accuracy_axis(percents: Sequence[float], metric: str) -> Axis:
    low, high = min(percents), max(percents)
    margin = max(0.25, 0.15 * (high - low))
    if metric != TOP_1:  # it may be below 0 or above 1
        return Axis(_measured_in(metric), low - margin, high + margin)
    return Axis(_measured_in(metric), max(0.0, low - margin), min(100.5, high + margin))


def _measured_in(metric: str) -> str:
    return "top-1 accuracy, %" if metric == TOP_1 else f"{metric}, hundredths"


def _front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other beats in both, fastest first."""
    front: list[tuple[float, float]] = []
    for ms, top1 in sorted(points):
        if not front or top1 > front[-1][1]:
            front += [(ms, front[-1][1]), (ms, top1)] if front else [(ms, top1)]
    return front


def _batch_axis(measured: Sequence[Measured]) -> Axis:
    sizes = sorted({point.batch_size for _, _, table in measured for point in table.points})
    return Axis("images per batch", sizes[0] / 1.15, sizes[-1] * 1.15, "log", tuple(sizes))


def _log_axis(label: str, lows: Sequence[float], highs: Sequence[float]) -> Axis:
    return Axis(label, min(lows) / 1.5, max(highs) * 1.5, "log")


def _mark(point: LatencyPoint) -> str:
    return "ring" if point.is_of_busy_machine else "dot"


def _while_busy(point: LatencyPoint) -> str:
    share = point.others_share
    return f", while others took {100 * share:.0f} % of the CPUs" if share and point.is_of_busy_machine else ""


def _dense(table: LatencyTable) -> list[float]:
    """Sizes so dense that a straight line bends correctly on logarithmic axes."""
    first, last = table.points[0].batch_size, table.points[-1].batch_size
    return [first * (last / first) ** (step / 40) for step in range(41)]


_MOST_LAYERS = 40


def kept_layers(variants: Sequence[Variant]) -> list[Element]:
    """For each audited variant: its operators by precision, and the layers kept in a higher one."""
    return [part for one in variants if one.audit for part in _audited(one.file, one.audit, one.search)]


def _audited(file: str, audit: NodeAudit, search: str) -> list[Element]:
    total = max(1, sum(audit.by_precision.values()))
    counts = sorted(audit.by_precision.items(), key=lambda pair: -pair[1])
    bar, legend = element("div", class_="stack", aria_hidden="true"), element("div", class_="legend flush")
    for precision, nodes in counts:
        colour = charts.PRECISION_COLOURS.get(precision, "k6")
        add(bar, element("i", class_=colour, style=f"flex: {nodes}"))
        text = f"{nodes} of {total} operators {_named(precision)} ({100 * nodes / total:.0f} %)"
        add(legend, element("span", element("i", class_=f"swatch {colour}"), text))
    parts = [element("h3", file), bar, legend]
    if told := "; ".join(filter(None, (audit.share_in_words, search))):
        parts.append(element("p", f"{told[0].upper()}{told[1:]}.", class_="note"))
    if not audit.kept:
        return [*parts, element("p", "No layer was kept in a higher precision.", class_="note")]
    rows = list(audit.kept.items())
    parts.append(markup.table(("kept in higher precision", "because"), rows[:_MOST_LAYERS], class_="words"))
    if len(rows) > _MOST_LAYERS:
        parts.append(element("p", f"{_MOST_LAYERS} of {len(rows)}; the manifest has all of them.", class_="note"))
    return parts


def recovery(variants: Sequence[Variant]) -> list[Element]:
    """For each variant that needed it: the cost and gain of keeping more layers in higher precision."""
    return [part for variant in variants if len(variant.trade_offs) > 1 for part in _recovered(variant)]


def _recovered(variant: Variant) -> list[Element]:
    steps = variant.trade_offs
    rows = [
        [
            f"{step.layers_kept}{', published' if step.layers_kept == variant.kept_layers else ''}",
            step.accuracy.in_words,
            f"{step.accuracy.loss_points:.2f}",
            "–" if step.accuracy.loss_bound_points is None else f"{step.accuracy.loss_bound_points:.2f}",
            "–" if step.median_ms is None else f"{step.median_ms:.3f}",
        ]
        for step in steps
    ]
    outcome = {
        True: "Recovered: with these layers kept, the file passes the gate.",
        False: "Not recovered: no file that was tried passes the gate. The one in the bundle is the best of them, and "
        "does not serve.",
        None: "",
    }[variant.is_recovered]
    about = (
        f"Tried on {steps[0].accuracy.images:,} calibration images, so that the images of the verdict stay unseen; "
        "where they have no labels, fp32's answers stand for them. Times are of one batch, quickly measured."
    )
    figures = markup.table(
        ("layers kept", steps[0].accuracy.metric, "points lost", "at most (95 %)", "median ms"), rows
    )
    both = element("div", charts.trade_off(variant), figures, class_="charts")
    verdict = element("p", outcome, class_="bad" if variant.is_recovered is False else "good") if outcome else None
    told = [element("h3", variant.file), verdict, element("p", about, class_="note"), both]
    return [one for one in told if one is not None]


def _named(precision: str) -> str:
    return "only convert" if precision == "conversion" else f"in {precision}"
