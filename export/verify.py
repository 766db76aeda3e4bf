"""Is it still right? The fp32 graph against torch, and every variant against the labels.

Knows the comparisons and the one bound that is not negotiable. Knows nothing of files or budgets. All
answers come from the serving engine, and all images through `models.images` from their encoded bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from app.engines.base import EngineFailure
from export.data import Chunk, ImageSet
from export.progress import Progress
from export.variant import Candidate
from models.bundle import Accuracy
from models.errors import JobError

# Two correct float32 implementations of a CNN differ by rounding alone, some 1e-6.
MAX_FP32_ERROR = 1e-4


@dataclass(frozen=True, slots=True)
class Score:
    """One variant's: `accuracy` is None without labels, `max_relative_error` is against fp32's own answers."""

    accuracy: Accuracy | None
    max_relative_error: float


def relative_error(answers: np.ndarray, expected: np.ndarray) -> float:
    """The largest ||a - b|| / ||b|| of any sample; both are [n, outputs]. Infinite where an answer is not finite."""
    difference = np.linalg.norm((answers - expected).astype(np.float64), axis=1)
    size = np.linalg.norm(expected.astype(np.float64), axis=1)
    errors = np.divide(difference, size, out=difference.copy(), where=size > 0)
    return float(errors.max()) if np.isfinite(errors).all() else float("inf")


def check_against_torch(fp32: Candidate, samples: np.ndarray, reference: np.ndarray) -> float:
    """The fp32 graph against torch's answers [n, outputs] to `samples` [n, ...], at batch 1, 3 and the largest.

    Returns the largest relative error. Raises JobError when it is above `MAX_FP32_ERROR` at any batch size.
    """
    largest = fp32.engine.info.batch_sizes[-1]
    worst = 0.0
    for batch in sorted({1, min(3, largest), largest}):
        try:
            answers = _in_batches(fp32, samples, batch)
        except EngineFailure as failure:
            raise JobError(
                f"the exported graph fails at batch size {batch} ({failure}); lower --max-batch"
            ) from failure
        error = relative_error(answers, reference)
        if error > MAX_FP32_ERROR:
            raise JobError(
                f"the exported graph differs from torch by {error:.2g} at batch size {batch}, allowed is "
                f"{MAX_FP32_ERROR:g}; look for operations that mix samples or depend on the batch size"
            )
        worst = max(worst, error)
    return worst


def _in_batches(candidate: Candidate, samples: np.ndarray, batch: int) -> np.ndarray:
    """Answers to all samples, every run with exactly `batch` of them: the last one is filled up from the start."""
    count = len(samples)
    indices = np.arange(-(-count // batch) * batch) % count
    answers = [candidate.logits(samples[rows]) for rows in indices.reshape(-1, batch)]
    return np.concatenate(answers)[:count]


def compare(candidates: Sequence[Candidate], samples: np.ndarray) -> tuple[Score, ...]:
    """Scores without labels: how far each variant's answers to `samples` are from the first's."""
    (tallies, _) = _tally(candidates, [Chunk(samples, np.zeros(len(samples), np.int64))])
    return tuple(Score(None, tally.worst_error) for tally in tallies)


def measure_accuracy(candidates: Sequence[Candidate], images: ImageSet, progress: Progress) -> tuple[Score, ...]:
    """Scores on labelled images; the first candidate is the fp32 reference.

    Every image is decoded once and answered by all. Raises JobError when images are broken or none is left.
    """
    largest = candidates[0].engine.info.batch_sizes[-1]
    with progress.step("measure accuracy", len(images.samples)) as step:
        tallies, count = _tally(candidates, images.chunks(step, largest))
    if count == 0:
        raise JobError(f"no image of {images.source} can be read; repair the data set")
    return tuple(tally.score(tallies[0], count) for tally in tallies)


@dataclass(slots=True)
class _Tally:
    right: int = 0
    agreeing: int = 0
    worst_error: float = 0.0

    def add(self, answers: np.ndarray, reference: np.ndarray, labels: np.ndarray) -> None:
        top1 = answers.argmax(axis=1)
        self.right += int((top1 == labels).sum())
        self.agreeing += int((top1 == reference.argmax(axis=1)).sum())
        self.worst_error = max(self.worst_error, relative_error(answers, reference))

    def score(self, reference: _Tally, count: int) -> Score:
        loss_points = 100 * (reference.right - self.right) / count
        accuracy = Accuracy(count, self.right / count, self.agreeing / count, loss_points)
        return Score(accuracy, self.worst_error)


def _tally(candidates: Sequence[Candidate], chunks: Iterable[Chunk]) -> tuple[list[_Tally], int]:
    tallies = [_Tally() for _ in candidates]
    largest = candidates[0].engine.info.batch_sizes[-1]
    count = 0
    for chunk in chunks:
        for start in range(0, len(chunk.images), largest):
            images, labels = chunk.images[start : start + largest], chunk.labels[start : start + largest]
            reference = candidates[0].logits(images)
            for candidate, tally in zip(candidates, tallies, strict=True):
                tally.add(reference if candidate is candidates[0] else candidate.logits(images), reference, labels)
            count += len(images)
    return tallies, count
