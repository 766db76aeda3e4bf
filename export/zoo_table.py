"""Every classification model of torchvision through the pipeline, one row each: `make zoo-table`.

Weights are random, drawn so that no output is constant (`torch_child.weights`), and so are the images, so the
table shows which graphs are exported faithfully and which variant is fast, and nothing about accuracy. A row is
written as soon as its model is done; a second run goes on where the first one stopped.
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
from export.data import ImageSet
from export.progress import SILENT
from export.proof.verify import relative_error
from export.sources.to_onnx import INLINE_BYTES
from export.sources.torch_job import OUTPUT_NAME, Inquiry, Job
from export.sources.torch_process import Answer, ask, run_job
from export.variants.making import plain_int8
from export.variants.precision import INT8_CPU, REFERENCE
from export.variants.variant import Candidate, opened
from export.zoo_page import Row, Table, read_table, write_page, write_table
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
    """Add a row for every model that has none yet, and yield it; `only` names the models to look at.

    Raises JobError when torchvision cannot be asked; what fails for one model is a row that says so.
    """
    names = ask(Inquiry("torchvision", None)).names
    table = read_table(folder)
    write_page(table, names, folder)
    for name in names:
        if name in {row.model for row in table.rows} or (only and name not in only):
            continue
        row = try_model(name, threads)
        table = Table.now(threads, (*table.rows, row))
        write_table(table, folder)
        write_page(table, names, folder)
        yield row


def try_model(name: str, threads: int) -> Row:
    """One model: exported, held against torch, quantised, timed. Never raises for what is wrong with the model."""
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="convoy-zoo-") as temporary:
        try:
            row = _try(name, Path(temporary), threads)
        except (ConvoyError, EngineFailure) as error:
            row = Row(name, "", exported=False, why=str(error))
    return row.after(time.monotonic() - started_s)


def _try(name: str, folder: Path, threads: int) -> Row:
    image = ask(Inquiry("torchvision", name)).image
    if image is None:
        raise JobError("its preprocessing is not known")
    proof = prove(name, image, folder, threads)
    row = Row(name, f"{image.height}x{image.width}", True, proof.is_proved, proof.error, proof.spread)
    return _with_int8(row, proof, folder)


def prove(name: str, image: ImageSpec, folder: Path, threads: int) -> Proof:
    """Export torchvision's `name` with random weights into `folder`, and hold it against torch in the serving engine.

    Raises JobError for what cannot be exported, EngineFailure for what does not run.
    """
    samples = np.stack([random_picture(image, seed) for seed in range(_IMAGES)])
    answer = run_job(_job(name, image, threads), samples, folder)
    answer.onnx.rename(folder / REFERENCE.file)
    spec = _spec(name, image, answer)
    with opened(spec, [REFERENCE], folder) as (fp32,):
        error = max(_error_at(fp32, samples, answer.reference, batch) for batch in BATCHES)
    return Proof(spec, samples, error, _spread(answer.reference))


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


def _with_int8(row: Row, proof: Proof, folder: Path) -> Row:
    try:
        plain_int8(folder, _pictures(proof), SILENT)
        with opened(proof.spec, [REFERENCE, INT8_CPU], folder) as (fp32, int8):
            error = relative_error(int8.logits(proof.samples), fp32.logits(proof.samples))
            fp32_ms, int8_ms = _race([fp32, int8])
    except (ConvoyError, EngineFailure) as failure:
        with opened(proof.spec, [REFERENCE], folder) as (fp32,):
            (fp32_ms,) = _race([fp32])
        return row.with_times(fp32_ms, None, None, str(failure))
    return row.with_times(fp32_ms, int8_ms, error, "")


def _pictures(proof: Proof) -> ImageSet:
    """The samples as files that reach the network unchanged: they have its size, and resizing would blur them."""
    image = proof.spec.image
    assert image is not None
    samples = tuple(
        Sample(str(index), 0, hashlib.sha256(pixels.tobytes()).hexdigest(), pixels)
        for index, pixels in enumerate(proof.samples)
    )
    return ImageSet("random pictures", samples, replace(image, resize_mode="exact"))


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
    folder = Path(arguments[0]) if arguments else Path("docs")
    for row in make_table(folder, cpu_budget(), arguments[1:]):
        print(json.dumps(row.summary()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
