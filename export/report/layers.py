"""The report's pages on precision: what really runs in which, what was kept higher and why, and what that bought."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from convoy.export.report import charts
from convoy.models.bundle import NodeAudit, Variant
from convoy.models.page.markup import add, element, table

_MOST_LAYERS = 40


def kept_layers(variants: Sequence[Variant]) -> list[Element]:
    """For each variant that was audited: its operators by precision, and the layers kept in a higher one."""
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
    parts.append(table(("kept in higher precision", "because"), rows[:_MOST_LAYERS], class_="words"))
    if len(rows) > _MOST_LAYERS:
        parts.append(element("p", f"{_MOST_LAYERS} of {len(rows)}; the manifest has all of them.", class_="note"))
    return parts


def recovery(variants: Sequence[Variant]) -> list[Element]:
    """For each variant that needed it: what keeping more layers in higher precision cost and gained."""
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
        True: "Recovered: with so many layers kept, the file passes the gate.",
        False: "Not recovered: no file that was tried passes the gate. The one in the bundle is the best of them, and "
        "does not serve.",
        None: "",
    }[variant.is_recovered]
    about = (
        f"Tried on {steps[0].accuracy.images:,} calibration images, so that the images of the verdict stay unseen; "
        "where they have no labels, fp32's answers stand for them. Times are of one batch, quickly measured."
    )
    figures = table(("layers kept", steps[0].accuracy.metric, "points lost", "at most (95 %)", "median ms"), rows)
    both = element("div", charts.trade_off(variant), figures, class_="charts")
    verdict = element("p", outcome, class_="bad" if variant.is_recovered is False else "good") if outcome else None
    told = [element("h3", variant.file), verdict, element("p", about, class_="note"), both]
    return [one for one in told if one is not None]


def _named(precision: str) -> str:
    return "only convert" if precision == "conversion" else f"in {precision}"
