"""Every classification model of torchvision through the pipeline, one row each: `make zoo-table`.

Weights are random, drawn so that no output is constant (`torch_child.weights`), and so are the images, so the
table shows which graphs are exported faithfully, which variant is fast and what TensorRT's builder takes, and nothing
about accuracy. A row is written as soon as its model is done; a second run goes on where the first one stopped, and a
row that only lacks the builder gets that alone.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from app.engines.base import EngineFailure
from app.engines.cpu import cpu_budget
from app.engines.measure import make_probe
from export import zoo_builder
from export.data import ImageSet
from export.progress import SILENT
from export.proof.verify import relative_error
from export.sources.to_onnx import INLINE_BYTES
from export.sources.torch_job import OUTPUT_NAME, Inquiry, Job
from export.sources.torch_process import Answer, ask, run_job
from export.variants.calibrate import Calibration
from export.variants.making import plain_calibration
from export.variants.precision import INT8_CPU, RECIPES, REFERENCE, Recipe
from export.variants.variant import Candidate, opened
from export.zoo_page import write_page
from export.zoo_rows import BuilderCell, Row, Table, read_table, write_table
from models.errors import ConvoyError, JobError
from models.samples import Sample
from models.spec import ImageSpec, ModelSpec, TensorSpec

MAX_ERROR = 1e-3
BATCHES = (1, 3, 8)
# Below this share of the outputs that differs between images, agreeing would prove nothing.
MIN_SPREAD = 1e-3
_IMAGES = max(BATCHES)
_TIMING_S = 3.0
_FEWEST_ROUNDS, _MOST_ROUNDS = 5, 100
# What the builder is shown. A file that is added here is built for every row that there is.
_BUILT = tuple(recipe for recipe in RECIPES if recipe.file in ("fp16.onnx", "int8-trt.onnx"))
# What one model may cost its row, and never the run.
_FAILURES = (ConvoyError, EngineFailure, MemoryError)
# Enough for a graph of 2 GB that is held several times over; the largest are to fail and not to starve the machine.
_MOST_BYTES = 16 << 30


@dataclass(frozen=True, slots=True)
class Proof:
    """`samples` uint8 [8, H, W, C] were answered by torch and by ONNX Runtime with a relative error of `error`.

    `spread` is how much of the answers differs between samples.
    """

    spec: ModelSpec
    samples: np.ndarray
    error: float
    spread: float

    @property
    def is_proved(self) -> bool:
        return self.error <= MAX_ERROR and self.spread >= MIN_SPREAD


def make_table(folder: Path, threads: int, only: Sequence[str] = ()) -> Iterator[Row]:
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
        table = replace(table.with_row(row), builder=zoo_builder.library() or table.builder)
        write_table(table, folder)
        write_page(table, names, folder)
        yield row


def _missing(table: Table, names: Sequence[str], only: Sequence[str]) -> list[tuple[str, Row | None]]:
    """The models with something left to do, in this order, each with the row that it has."""
    wanted = [(name, table.find(name)) for name in names if not only or name in only]
    lacking = [(name, row) for name, row in wanted if row is not None and row.exported and _unbuilt(row)]
    return [*lacking, *((name, None) for name, row in wanted if row is None)]


def _unbuilt(row: Row) -> tuple[Recipe, ...]:
    """The files that the builder has not seen yet; none where there is no builder."""
    known = {cell.precision for cell in row.builder}
    return tuple(recipe for recipe in _BUILT if recipe.precision not in known) if zoo_builder.library() else ()


def try_model(name: str, threads: int) -> Row:
    """One model: exported, held against torch, quantised, timed, built. Never raises for what is wrong with it."""
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="convoy-zoo-") as temporary:
        try:
            row = _try(name, Path(temporary), threads)
        except _FAILURES as error:
            row = Row(name, "", exported=False, why=_reason(error))
    return row.after(time.monotonic() - started_s)


def try_builder(name: str, threads: int, recipes: Sequence[Recipe]) -> list[BuilderCell]:
    """What the builder makes of files of one model, each exported and made anew. Never raises for what is wrong."""
    with tempfile.TemporaryDirectory(prefix="convoy-zoo-") as temporary:
        try:
            image = _image(name)
            samples = _samples(image)
            # The weights are drawn by what they make of the samples, so it takes all of them to get the row's network.
            _export(name, image, samples, Path(temporary), threads)
            calibration = plain_calibration(Path(temporary), _pictures(image, samples), SILENT)
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
        recipe.make(calibration, "minmax", frozenset(), path, None)
    except _FAILURES as error:
        return _refused([recipe], error)
    cell = zoo_builder.build(path, recipe.precision)
    path.unlink()
    return [cell]


def _reason(error: BaseException) -> str:
    return "not enough memory" if isinstance(error, MemoryError) else str(error)


def _try(name: str, folder: Path, threads: int) -> Row:
    image = _image(name)
    proof = prove(name, image, folder, threads)
    row = Row(name, f"{image.height}x{image.width}", True, proof.is_proved, proof.error, proof.spread)
    try:
        calibration = plain_calibration(folder, _pictures(image, proof.samples), SILENT)
    except _FAILURES as error:
        return row.with_times(_time_alone(proof, folder), None, None, _reason(error)).with_builder(
            _refused(_unbuilt(row), error)
        )
    return _with_int8(row, proof, calibration).with_builder(_built(calibration, _unbuilt(row)))


def _image(name: str) -> ImageSpec:
    image = ask(Inquiry("torchvision", name)).image
    if image is None:
        raise JobError("its preprocessing is not known")
    return image


def prove(name: str, image: ImageSpec, folder: Path, threads: int) -> Proof:
    """Export torchvision's `name` with random weights into `folder`, and hold it against torch in the serving engine.

    Raises JobError for what cannot be exported, EngineFailure for what does not run.
    """
    samples = _samples(image)
    answer = _export(name, image, samples, folder, threads)
    spec = _spec(name, image, answer)
    with opened(spec, [REFERENCE], folder) as (fp32,):
        error = max(_error_at(fp32, samples, answer.reference, batch) for batch in BATCHES)
    return Proof(spec, samples, error, _spread(answer.reference))


def _samples(image: ImageSpec) -> np.ndarray:
    return np.stack([random_picture(image, seed) for seed in range(_IMAGES)])


def _export(name: str, image: ImageSpec, samples: np.ndarray, folder: Path, threads: int) -> Answer:
    answer = run_job(_job(name, image, threads), samples, folder)
    answer.onnx.rename(folder / REFERENCE.file)
    return answer


def _job(name: str, image: ImageSpec, threads: int) -> Job:
    return Job(
        kind="torchvision",
        name=name,
        file=None,
        weights_from="random",
        weights=None,
        classes=None,
        uint8_front=True,
        mean=image.mean,
        std=image.std,
        max_batch=max(BATCHES),
        threads=threads,
        inline_bytes=INLINE_BYTES,
    )


def _spec(name: str, image: ImageSpec, answer: Answer) -> ModelSpec:
    inputs = (TensorSpec("images", image.tensor_dtype, image.tensor_shape),)
    outputs = (TensorSpec(OUTPUT_NAME, "FP32", (answer.reference.shape[1],)),)
    return ModelSpec(name, inputs, outputs, max(BATCHES), image, "softmax", ())


def random_picture(image: ImageSpec, seed: int) -> np.ndarray:
    """uint8 [height, width, channels]: coloured squares of several sizes over each other.

    Plain noise looks the same to a network whatever its seed; squares differ as photographs do.
    """
    generator = np.random.default_rng(seed)
    canvas = np.zeros((image.height, image.width, image.channels))
    for cells in (2, 7, 28):
        rows, columns = (np.arange(size) * cells // size for size in (image.height, image.width))
        canvas += generator.random((cells, cells, image.channels))[rows][:, columns]
    picture: np.ndarray = (canvas * (255 / 3)).astype(np.uint8)
    return picture


def _spread(answers: np.ndarray) -> float:
    """How much of the answers [n, outputs] differs between images: ||a - mean|| / ||a||."""
    return float(np.linalg.norm(answers - answers.mean(axis=0)) / max(float(np.linalg.norm(answers)), 1e-30))


def _error_at(candidate: Candidate, samples: np.ndarray, reference: np.ndarray, batch: int) -> float:
    answers = [candidate.logits(samples[start : start + batch]) for start in range(0, len(samples), batch)]
    return relative_error(np.concatenate(answers), reference)


def _with_int8(row: Row, proof: Proof, calibration: Calibration) -> Row:
    folder = calibration.graph.parent
    try:
        assert INT8_CPU.make is not None
        INT8_CPU.make(calibration, "minmax", frozenset(), folder / INT8_CPU.file, None)
        with opened(proof.spec, [REFERENCE, INT8_CPU], folder) as (fp32, int8):
            error = relative_error(int8.logits(proof.samples), fp32.logits(proof.samples))
            fp32_ms, int8_ms = _race([fp32, int8])
    except _FAILURES as failure:
        return row.with_times(_time_alone(proof, folder), None, None, _reason(failure))
    return row.with_times(fp32_ms, int8_ms, error, "")


def _time_alone(proof: Proof, folder: Path) -> float:
    with opened(proof.spec, [REFERENCE], folder) as (fp32,):
        return _race([fp32])[0]


def _pictures(image: ImageSpec, samples: np.ndarray) -> ImageSet:
    """The samples as files that reach the network unchanged: they have its size, and resizing would blur them."""
    listed = tuple(
        Sample(str(index), 0, hashlib.sha256(pixels.tobytes()).hexdigest(), pixels)
        for index, pixels in enumerate(samples)
    )
    return ImageSet("random pictures", listed, replace(image, resize_mode="exact"))


def _race(candidates: Sequence[Candidate]) -> list[float]:
    """Median milliseconds of one image in each, taking turns because a machine's speed drifts."""
    probes = [make_probe(candidate.engine, 1) for candidate in candidates]
    runs_ms: list[list[float]] = [[] for _ in probes]
    for probe in probes:
        probe.run_ms()
    end_s = time.monotonic() + _TIMING_S
    while len(runs_ms[0]) < _FEWEST_ROUNDS or (len(runs_ms[0]) < _MOST_ROUNDS and time.monotonic() < end_s):
        for probe, own in zip(probes, runs_ms, strict=True):
            own.append(probe.run_ms())
    return [float(np.median(own)) for own in runs_ms]


def main(arguments: Sequence[str]) -> None:
    """`python -m export.zoo_table [FOLDER [MODEL...]]`: add what is missing to the table in FOLDER."""
    zoo_builder.limit_memory(_MOST_BYTES)
    folder = Path(arguments[0]) if arguments else Path("docs")
    for row in make_table(folder, cpu_budget(), arguments[1:]):
        print(json.dumps(row.summary()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
