"""The page of the engines' table, for people. Knows the Markdown and nothing of how it is measured."""

from __future__ import annotations

from collections.abc import Sequence

from convoy.export.engine_table.race import BATCHES, EngineResult, Throughput

_INTRODUCTION = """# The engines of the CPU beside each other

Written by `make engine-table`. Networks of torchvision with random weights, each variant in each engine that takes it,
all of a network in turns within one process. *Times*: how many times faster than ONNX Runtime in fp32, with its 95 %
interval over paired rounds. *Agrees*: the share of eight random pictures whose first class is that of fp32 in ONNX
Runtime, and the worst relative error; with random weights, and ranges of min-max alone, that is no
accuracy.
"""


def render(machine: str, entries: Sequence[EngineResult]) -> str:
    """The whole page."""
    libraries = sorted({entry.library for entry in entries if entry.library})
    sizes = [f"{what} at {size}" for size in BATCHES for what in ("images/s", "times")]
    head = ["network", "variant", "engine", *sizes, "agrees", "error"]
    lines = [_INTRODUCTION, f"Machine: {machine}. {', '.join(libraries)}.", "", _line(head), "|---" * len(head) + "|"]
    return "\n".join([*lines, *(_line(_cells(entry)) for entry in entries)]) + "\n"


def _cells(entry: EngineResult) -> list[str]:
    if entry.problem:
        nothing = [""] * (2 * len(BATCHES) + 1)
        return [entry.model, entry.precision, entry.engine, *nothing, " ".join(entry.problem.split()).replace("|", "/")]
    paces = [cell for pace in entry.paces for cell in (f"{pace.images_per_s:.1f}", _times(pace))]
    return [entry.model, entry.precision, entry.engine, *paces, f"{entry.agreement:.0%}", f"{entry.error:.1g}"]


def _times(pace: Throughput) -> str:
    gain = pace.speedup
    return "1" if gain is None else f"{gain.median:.2f} ({gain.low:.2f} to {gain.high:.2f})"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
