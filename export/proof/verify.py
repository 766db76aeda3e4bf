"""Is it still right? The fp32 graph against torch, and every variant against the labels.

Knows the comparisons and the one bound that is not negotiable. Knows nothing of files or budgets' consequences
(`convoy.export.proof.gate` does). All answers come from the serving engine, and all images through
`convoy.models.images` from their encoded bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from convoy.app.batch import EngineFailure
from convoy.export.cache import NO_CACHE, StepCache, step_key
from convoy.export.data import Chunk, Images
from convoy.export.progress import IGNORED, Progress, Step
from convoy.export.proof.outcomes import LEAST_SHARE, Outcomes, relative_errors
from convoy.export.variants.variant import OpenVariant
from convoy.models.bundle import Accuracy, sha256_file
from convoy.models.errors import JobError

# Two correct float32 implementations of a CNN differ by rounding alone, some 1e-6.
MAX_FP32_ERROR = 1e-4


@dataclass(frozen=True, slots=True)
class Score:
    """One variant's: `accuracy` is None without labels; error and agreement are against fp32's own answers.

    `outcomes` are those of the labelled images, from which the rest follows.
    """

    accuracy: Accuracy | None
    max_relative_error: float
    agreement: float = 1.0
    outcomes: Outcomes | None = None


def relative_error(answers: np.ndarray, expected: np.ndarray, *, least_size: float = 0.0) -> float:
    """The largest ||a - b|| / ||b|| of any sample; both are [n, outputs]. Infinite where an answer is not finite."""
    return float(relative_errors(answers, expected, least_size=least_size).max())


def check_against_torch(
    fp32: OpenVariant, samples: np.ndarray, reference: np.ndarray, step: Step = IGNORED, *, are_shares: bool = False
) -> float:
    """The fp32 graph against torch's answers [n, outputs] to `samples` [n, ...], at batch 1, 3 and the largest.

    `step` advances by every sample at every batch size, of which `compared_batches` tells how many there are.
    `are_shares`: they are probabilities, of which a millionth is no more than a rounding error. Returns the largest
    relative error. Raises JobError when it is above `MAX_FP32_ERROR` at any batch size.
    """
    worst = 0.0
    for batch in compared_batches(fp32):
        try:
            answers = _in_batches(fp32, samples, batch, step)
        except EngineFailure as failure:
            raise JobError(
                f"the exported graph fails at batch size {batch} ({failure}); lower --max-batch"
            ) from failure
        error = relative_error(answers, reference, least_size=LEAST_SHARE if are_shares else 0.0)
        if error > MAX_FP32_ERROR:
            raise JobError(
                f"the exported graph differs from torch by {error:.2g} at batch size {batch}, allowed is "
                f"{MAX_FP32_ERROR:g}; look for operations that mix samples or depend on the batch size"
            )
        worst = max(worst, error)
    return worst


def compared_batches(fp32: OpenVariant) -> list[int]:
    """The batch sizes at which the graph is held against torch."""
    largest = fp32.engine.info.batch_sizes[-1]
    return sorted({1, min(3, largest), largest})


def _in_batches(candidate: OpenVariant, samples: np.ndarray, batch: int, step: Step) -> np.ndarray:
    """Answers to all samples, every run with exactly `batch` of them: the last one is filled up from the start."""
    count = len(samples)
    indices = np.arange(-(-count // batch) * batch) % count
    answers = []
    for start, rows in zip(range(0, count, batch), indices.reshape(-1, batch), strict=True):
        answers.append(candidate.logits(samples[rows]))
        step.advance(min(batch, count - start))
    return np.concatenate(answers)[:count]


def compare(candidates: Sequence[OpenVariant], samples: np.ndarray) -> tuple[Score, ...]:
    """Scores without labels: how far each variant's answers to `samples` are from the first's."""
    outcomes = _answered(candidates, [Chunk(samples, np.zeros(len(samples), np.int64), np.arange(len(samples)))])
    return tuple(Score(None, own.worst_error, own.agreement(outcomes[0])) for own in outcomes)


def measure_accuracy(
    candidates: Sequence[OpenVariant],
    images: Images,
    progress: Progress,
    *,
    budget_points: float = 1.0,
    looks: int = 1,
    cache: StepCache = NO_CACHE,
) -> tuple[Score, ...]:
    """Scores on labelled images; the first candidate is the fp32 reference.

    Every image is decoded once and answered by all whose answers the cache does not hold. `looks` is how many
    times a variant of this kind was held against these images. Raises JobError when more than 1 % of the images
    are broken or none is left.
    """
    outcomes = observe(candidates, images, progress, "measure accuracy", cache)
    reference = outcomes[0]
    return tuple(
        Score(
            own.accuracy(reference, images.labels, budget_points, looks=looks),
            own.worst_error,
            own.agreement(reference),
            own,
        )
        for own in outcomes
    )


def observe(
    candidates: Sequence[OpenVariant], images: Images, progress: Progress, step: str, cache: StepCache = NO_CACHE
) -> tuple[Outcomes, ...]:
    """What each candidate answers to all images; the first is the fp32 reference. Raises JobError as above."""
    keys = _keys(candidates, images)
    known = [cache.read_arrays(key) for key in keys]
    missing = [candidate for candidate, found in zip(candidates, known, strict=True) if found is None]
    fresh: dict[str, Outcomes] = {}
    if missing:
        # The reference answers along with every other: errors are differences from it.
        asked = [candidates[0], *(candidate for candidate in missing if candidate is not candidates[0])]
        largest = candidates[0].engine.info.batch_sizes[-1]
        with progress.step(step, images.count) as bar:
            answered = _answered(asked, images.chunks(bar, largest))
        if not answered:
            raise JobError(f"no image of {images.source} can be read; repair the data set")
        fresh = {candidate.recipe.file: own for candidate, own in zip(asked, answered, strict=True)}
    for key, candidate in zip(keys, candidates, strict=True):
        if candidate.recipe.file in fresh:
            cache.write_arrays(key, fresh[candidate.recipe.file].arrays())
    return tuple(
        fresh[candidate.recipe.file] if found is None else Outcomes(**found)
        for candidate, found in zip(candidates, known, strict=True)
    )


def _keys(candidates: Sequence[OpenVariant], images: Images) -> list[str]:
    # The fingerprint tells CPU and library: on others, or in a twin, an image on the edge may fall to the other side.
    own = [
        (sha256_file(candidate.path), candidate.engine.info.device_fingerprint, str(candidate.is_twin))
        for candidate in candidates
    ]
    return [step_key("outcomes", *one, *own[0], candidates[0].activation, images.key) for one in own]


def _answered(candidates: Sequence[OpenVariant], chunks: Iterable[Chunk]) -> tuple[Outcomes, ...]:
    """Empty without images."""
    largest = candidates[0].engine.info.batch_sizes[-1]
    parts: list[list[Outcomes]] = [[] for _ in candidates]
    for chunk in chunks:
        for start in range(0, len(chunk.images), largest):
            images, labels, positions = (
                part[start : start + largest] for part in (chunk.images, chunk.labels, chunk.positions)
            )
            reference = candidates[0].logits(images)
            for candidate, own in zip(candidates, parts, strict=True):
                answers = reference if candidate is candidates[0] else candidate.logits(images)
                own.append(Outcomes.of(answers, reference, labels, candidate.activation, positions))
    return tuple(Outcomes.joined(own) for own in parts if own)
