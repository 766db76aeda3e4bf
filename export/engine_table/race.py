"""One network of torchvision, every variant that a CPU takes in every engine that is here, in turns.

Weights are random and so are the pictures: the times are those of the graph, and agreement is with fp32, not with
labels.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from convoy.app.batch import EngineFailure
from convoy.app.engines.base import Engine, run_arrays
from convoy.app.engines.machine import find_cpu
from convoy.app.engines.measure import Pace, make_probe, take_turns
from convoy.app.engines.speedup import paired_speedup
from convoy.app.engines.table import ROWS, Row
from convoy.export.progress import SILENT
from convoy.export.proof.verify import relative_error
from convoy.export.variants.calibrate import Conversion
from convoy.export.variants.making import plain_calibration
from convoy.export.variants.precision import RECIPES, REFERENCE, Recipe, without_needless_pairs
from convoy.export.variants.variant import open_engine
from convoy.export.zoo_table.proof import Proof, image_of, pictures_of, prove
from convoy.models.bundle import Interval
from convoy.models.errors import ConvoyError

BATCHES = (1, 8)
_PACE = Pace(budget_s=0, limit_s=math.inf, warm_up=3, fewest=25, most=25)


@dataclass(frozen=True, slots=True)
class Throughput:
    """`speedup`: how many times faster than ONNX Runtime in fp32; None for that itself."""

    images_per_s: float
    speedup: Interval | None


@dataclass(frozen=True, slots=True)
class EngineResult:
    """One variant of a network in one engine. `paces` are by `BATCHES`; empty, with the `problem`, where it fails.

    `agreement` is the share of pictures whose first class is fp32's, `error` the worst relative error.
    """

    model: str
    engine: str
    library: str
    precision: str
    paces: tuple[Throughput, ...] = ()
    agreement: float = 0.0
    error: float = 0.0
    problem: str = ""


def race(name: str, threads: int) -> list[EngineResult]:
    """Never raises for what is wrong with the network."""
    with tempfile.TemporaryDirectory(prefix="convoy-engines-") as temporary, ExitStack() as stack:
        folder = Path(temporary)
        try:
            image = image_of(name)
            proof = prove(name, image, folder, threads)
            recipes = _made(folder, proof)
        except (ConvoyError, EngineFailure) as failure:
            return [EngineResult(name, "", "", "", problem=str(failure))]
        spec = replace(proof.spec, max_batch_size=max(BATCHES))
        opened: list[Engine] = []
        failed: list[EngineResult] = []
        for row, recipe in _pairs(recipes):
            try:
                engine = open_engine(spec, recipe, row, folder / recipe.file)
                stack.callback(engine.close)
                engine.warm_up()
                opened.append(engine)
            except (ConvoyError, EngineFailure) as failure:
                failed.append(EngineResult(name, row.name, "", recipe.precision, problem=str(failure)))
        return [*_entries(name, opened, proof.samples), *failed]


def _made(folder: Path, proof: Proof) -> tuple[Recipe, ...]:
    assert proof.spec.image is not None
    calibration = plain_calibration(folder, pictures_of(proof.spec.image, proof.samples), SILENT)
    recipes = without_needless_pairs([one for one in RECIPES if one.row is not None], folder / REFERENCE.file)
    for recipe in recipes:
        if recipe.make is not None:
            recipe.make(Conversion(calibration), folder / recipe.file)
    return recipes


def _pairs(recipes: Sequence[Recipe]) -> list[tuple[Row, Recipe]]:
    """The reference in ONNX Runtime first; of several files of one precision each engine has its own."""
    rows = [row for row in ROWS if not row.is_on_gpus and row.probe(find_cpu())[0]]
    pairs = [(row, one) for row in rows for one in recipes if one is REFERENCE or one.target in row.targets]
    own = {(row.name, one.precision) for row, one in pairs if one.row is row}
    return [(row, one) for row, one in pairs if one.row is row or (row.name, one.precision) not in own]


def _entries(name: str, engines: Sequence[Engine], samples: np.ndarray) -> list[EngineResult]:
    by_size = [take_turns([make_probe(engine, size) for engine in engines], _PACE) for size in BATCHES]
    answers = [run_arrays(one, {one.inputs[0].name: samples})[one.outputs[0].name] for one in engines]
    entries = []
    for index, engine in enumerate(engines):
        paces = tuple(
            Throughput(
                1e3 * size / float(np.median(runs[index])), paired_speedup([runs[0]], [runs[index]]) if index else None
            )
            for size, runs in zip(BATCHES, by_size, strict=True)
        )
        agreement = float(np.mean(answers[index].argmax(axis=1) == answers[0].argmax(axis=1)))
        error = relative_error(answers[index], answers[0])
        info = engine.info
        entries.append(EngineResult(name, info.engine, info.library, info.precision, paces, agreement, error))
    return entries
