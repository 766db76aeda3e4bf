"""The whole export in one sentence: what is served where, its gain and cost, or why nothing should be.

Uses only the manifest, so report and terminal agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from convoy.app.engines.select import fastest_measured
from convoy.export.proof.judging import what_scores
from convoy.models.bundle import ON_CPU, TOP_1, Accuracy, LatencyTable, Manifest, Variant
from convoy.models.spec import ModelSpec

# "alarm": the model should not be served; "doubt": it may be, but that it is right was not proved.
Tone = Literal["good", "doubt", "alarm"]
# Libraries as people write them.
TITLES = {"openvino": "OpenVINO", "onnxruntime": "ONNX Runtime"}


@dataclass(frozen=True, slots=True)
class ExportVerdict:
    """`sentence` is plain text for people."""

    sentence: str
    tone: Tone


def fastest(variant: Variant) -> LatencyTable | None:
    """In the engine that serves this file; None if nothing was measured."""
    tables = variant.latencies
    return tables[fastest_measured(tables)] if tables else None


def verdict_of(manifest: Manifest) -> ExportVerdict:
    """For a manifest of any version."""
    name = manifest.spec.name
    if manifest.objections:
        others = len(manifest.objections) - 1
        more = f" (and {others} more, below)" if others else ""
        return ExportVerdict(f"{name} should not be served: {manifest.objections[0]}{more}.", "alarm")
    serving = _on_cpus(manifest.variants)
    elsewhere = _on_gpus(manifest.variants)
    if serving is None:
        reasons = "; ".join(f"{variant.file}: {variant.reason}" for variant in manifest.variants)
        return ExportVerdict(f"{elsewhere or f'No file of {name} is served'} ({reasons}).", "alarm")
    served, table = serving
    gain = _gain(served, table)
    told = f"CPUs use {served.file}{gain}, {_accuracy(manifest, served)}{_others(manifest.variants)}"
    sentence = f"{told}; {elsewhere}." if elsewhere else f"{told}."
    return ExportVerdict(
        f"{_only_tensors(manifest.spec)}{sentence}",
        "good" if served.accuracy and served.accuracy.is_proved else "doubt",
    )


def _only_tensors(spec: ModelSpec) -> str:
    """Why `/predictions` does not answer, as a sentence of its own; empty if it does."""
    if spec.image is not None and spec.task != "none":
        return ""
    why = "it has no image preprocessing" if spec.image is None else "the meaning of its outputs is unknown"
    return f"/predictions does not answer for {spec.name}, because {why}. "


def _on_cpus(variants: Sequence[Variant]) -> tuple[Variant, LatencyTable | None] | None:
    """What serves there and its measurements, by the server's own rule: the significantly fastest."""
    may_serve = [variant for variant in variants if variant.serve and variant.target in ON_CPU]
    measured = [(variant, table) for variant in may_serve for table in variant.latencies]
    if not measured:
        return (may_serve[0], None) if may_serve else None
    return measured[fastest_measured([table for _, table in measured])]


def _gain(variant: Variant, table: LatencyTable | None) -> str:
    if table is None or table.speedup is None:
        return ""
    gain, where = table.speedup, ""
    if table is not variant.latency:
        where = f" in {TITLES.get(table.library.partition(' ')[0], table.library)}"
    other = " in ONNX Runtime" if variant.precision == "fp32" else ""
    pace = f"{gain.median:.2f} times as fast as fp32{other} on the export machine ({gain.low:.2f} to {gain.high:.2f})"
    return f"{where}, {pace}"


def _accuracy(manifest: Manifest, serving: Variant) -> str:
    accuracy = serving.accuracy
    is_of_images = manifest.spec.image is not None
    if accuracy is not None:
        samples = f"{accuracy.images:,} {'image' if is_of_images else 'sample'}{'s' * (accuracy.images != 1)}"
        if accuracy.metric == TOP_1:
            told = f"with {100 * accuracy.top1:.2f} % top-1 on {samples}"
        else:
            told = f"with {' '.join(accuracy.headline)} on {samples}"
        return told if serving.precision == "fp32" else f"{told}, {_change(accuracy)}"
    what = "labelled images" if is_of_images and manifest.spec.task == "classify" else "targets"
    return f"accuracy not measured, because there are no {what} ({what_scores(manifest.spec.task)})"


def _change(accuracy: Accuracy) -> str:
    lost = accuracy.loss_points
    change = f"{abs(lost):.2f} points {'less' if lost > 0 else 'more'} than fp32" if lost else "the same as fp32"
    if accuracy.set_metrics:
        # The gate's measure is another than the one shown.
        change = f"{accuracy.metric} {change}"
    doubt = "" if accuracy.is_proved else "; not proved to be within the budget"
    return f"{change}{accuracy.bound_in_words}{doubt}"


def _others(variants: Sequence[Variant]) -> str:
    """Why the other files for CPUs do not serve."""
    refused = [variant for variant in variants if not variant.serve and variant.target in ON_CPU]
    slow = [variant.file for variant in refused if variant.passes_gate]
    # A manifest of an older version does not have the gate's verdict.
    poor = [variant.file for variant in refused if variant.passes_gate is False and variant.accuracy is not None]
    reasons = [
        *([f"{_listed(slow)} {'is' if len(slow) == 1 else 'are'} not significantly faster"] if slow else []),
        *([f"{_listed(poor)} {'does' if len(poor) == 1 else 'do'} not pass the accuracy gate"] if poor else []),
    ]
    return f", while {_listed(reasons)}" if reasons else ""


def _on_gpus(variants: Sequence[Variant]) -> str:
    files = [variant.file for variant in variants if variant.serve and variant.target not in ON_CPU]
    return f"GPUs may use {_listed(files)}" if files else ""


def _listed(parts: Sequence[str]) -> str:
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last
