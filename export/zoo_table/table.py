"""Every classification model of torchvision through the pipeline, one row each.

Weights are random, drawn so that no output is constant (`torch_child.random_weights`), and so are the images, so the
table shows which graphs are exported faithfully, which variant is fast and what TensorRT's builder takes, and nothing
about accuracy. A row is written as soon as its model is done; a second run goes on where the first one stopped, and a
row that only lacks the builder gets that alone.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from convoy.app.batch import EngineFailure
from convoy.app.engines.measure import Pace, make_probe, take_turns
from convoy.export.progress import SILENT
from convoy.export.proof.verify import relative_error
from convoy.export.sources.torch_job import Inquiry
from convoy.export.sources.torch_process import ask
from convoy.export.variants.calibrate import Calibration, Conversion
from convoy.export.variants.making import plain_calibration
from convoy.export.variants.precision import INT8_CPU, RECIPES, REFERENCE, Recipe
from convoy.export.variants.variant import OpenVariant, opened
from convoy.export.zoo_table import builder
from convoy.export.zoo_table.page import write_page
from convoy.export.zoo_table.proof import Proof, export_random, image_of, logits_of, pictures_of, prove, samples_of
from convoy.export.zoo_table.rows import BuilderCell, Table, ZooRow, read_table, write_table
from convoy.models.errors import ConvoyError

_PACE = Pace(budget_s=3.0, limit_s=math.inf, warm_up=1, fewest=5, most=100)
# What the builder is shown. A file that is added here is built for every row that there is.
BUILT_FILES = tuple(recipe for recipe in RECIPES if recipe.file in ("fp16.onnx", "int8-trt.onnx"))
# What one model may cost its row, and never the run.
_FAILURES = (ConvoyError, EngineFailure, MemoryError)


def make_table(folder: Path, threads: int, only: Sequence[str] = ()) -> Iterator[ZooRow]:
    """Add what is missing, first to the rows that there are, and yield each row; `only` names the models to look at.

    Raises JobError when torchvision cannot be asked; what fails for one model is a row that says so.
    """
    names = ask(Inquiry("torchvision", None)).names
    table = read_table(folder)
    write_page(table, names, folder)
    for name, known in _missing(table, names, only):
        if known is None:
            row = try_model(name, threads)
            table = table.timed(threads)
        else:
            row = known.with_builder(try_builder(name, threads, _unbuilt(known)))
        table = replace(table.with_row(row), builder=builder.library() or table.builder)
        write_table(table, folder)
        write_page(table, names, folder)
        yield row


def _missing(table: Table, names: Sequence[str], only: Sequence[str]) -> list[tuple[str, ZooRow | None]]:
    """The models with something left to do, in this order, each with the row that it has."""
    wanted = [(name, table.find(name)) for name in names if not only or name in only]
    lacking = [(name, row) for name, row in wanted if row is not None and row.exported and _unbuilt(row)]
    return [*lacking, *((name, None) for name, row in wanted if row is None)]


def _unbuilt(row: ZooRow) -> tuple[Recipe, ...]:
    """The files that the builder has not seen yet; none where there is no builder."""
    known = {cell.precision for cell in row.builder}
    return tuple(recipe for recipe in BUILT_FILES if recipe.precision not in known) if builder.library() else ()


def try_model(name: str, threads: int) -> ZooRow:
    """One model: exported, held against torch, quantised, timed, built. Never raises for what is wrong with it."""
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="convoy-zoo-") as temporary:
        try:
            row = _try(name, Path(temporary), threads)
        except _FAILURES as error:
            row = ZooRow(name, "", exported=False, why=_reason(error))
    return replace(row, seconds=round(time.monotonic() - started_s, 1))


def try_builder(name: str, threads: int, recipes: Sequence[Recipe]) -> list[BuilderCell]:
    """What the builder makes of files of one model, each exported and made anew. Never raises for what is wrong."""
    with tempfile.TemporaryDirectory(prefix="convoy-zoo-") as temporary:
        try:
            image = image_of(name)
            samples = samples_of(image)
            export_random(name, image, samples, Path(temporary), threads)
            calibration = plain_calibration(Path(temporary), pictures_of(image, samples), SILENT)
        except _FAILURES as error:
            return _refused(recipes, error)
        return _built(calibration, recipes)


def _refused(recipes: Sequence[Recipe], error: BaseException) -> list[BuilderCell]:
    return [BuilderCell(recipe.precision, accepted=False, why=_reason(error)) for recipe in recipes]


def _built(calibration: Calibration, recipes: Sequence[Recipe]) -> list[BuilderCell]:
    return [cell for recipe in recipes for cell in _made_and_built(calibration, recipe)]


def _made_and_built(calibration: Calibration, recipe: Recipe) -> list[BuilderCell]:
    assert recipe.make is not None
    path = calibration.graph.with_name(recipe.file)
    try:
        recipe.make(Conversion(calibration), path)
    except _FAILURES as error:
        return _refused([recipe], error)
    cell = builder.build(path, recipe.precision)
    path.unlink()
    return [cell]


def _reason(error: BaseException) -> str:
    return "not enough memory" if isinstance(error, MemoryError) else str(error)


def _try(name: str, folder: Path, threads: int) -> ZooRow:
    image = image_of(name)
    proof = prove(name, image, folder, threads)
    row = ZooRow(name, f"{image.height}x{image.width}", True, proof.is_proved, proof.error, proof.spread)
    try:
        calibration = plain_calibration(folder, pictures_of(image, proof.samples), SILENT)
    except _FAILURES as error:
        return row.with_times(_time_alone(proof, folder), None, None, _reason(error)).with_builder(
            _refused(_unbuilt(row), error)
        )
    return _with_int8(row, proof, calibration).with_builder(_built(calibration, _unbuilt(row)))


def _with_int8(row: ZooRow, proof: Proof, calibration: Calibration) -> ZooRow:
    folder = calibration.graph.parent
    try:
        assert INT8_CPU.make is not None
        INT8_CPU.make(Conversion(calibration), folder / INT8_CPU.file)
        with opened(proof.spec, [REFERENCE, INT8_CPU], folder) as (fp32, int8):
            error = relative_error(logits_of(int8, proof.samples), logits_of(fp32, proof.samples))
            fp32_ms, int8_ms = _race([fp32, int8])
    except _FAILURES as failure:
        return row.with_times(_time_alone(proof, folder), None, None, _reason(failure))
    return row.with_times(fp32_ms, int8_ms, error, "")


def _time_alone(proof: Proof, folder: Path) -> float:
    with opened(proof.spec, [REFERENCE], folder) as (fp32,):
        return _race([fp32])[0]


def _race(candidates: Sequence[OpenVariant]) -> list[float]:
    """Median milliseconds of one image in each, taking turns because a machine's speed drifts."""
    runs_ms = take_turns([make_probe(candidate.engine, 1) for candidate in candidates], _PACE)
    return [float(np.median(own)) for own in runs_ms]
