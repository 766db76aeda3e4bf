"""Is it still right? The fp32 graph against torch, and every variant against the labels.

Has the comparisons and the one fixed bound; `convoy.export.proof.proving` has the consequences. All answers come from
the serving engine, and all images pass through `convoy.models.images` from their encoded bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from convoy.app.engines.batch import EngineFailure
from convoy.export.cache import NO_CACHE, StepCache, step_key
from convoy.export.data import SampleSet
from convoy.export.progress import IGNORED, Progress, Step
from convoy.export.proof.judging import Judge, judge_of, what_scores
from convoy.export.proof.outcomes import WHOLE, AnyOutcomes, Outcomes, relative_errors
from convoy.export.rows import Chunk, Rows, count_of, joined, picked
from convoy.export.variants.variant import OpenVariant
from convoy.models.boxes import in_order_of
from convoy.models.bundle import Accuracy, sha256_file
from convoy.models.errors import JobError

# Two correct float32 implementations of a CNN differ only by rounding, about 1e-6.
MAX_FP32_ERROR = 1e-4
# Every layer rounds. A correct graph is off by about what rounding of the input does to the original, and hardly ever
# by several times as much; at most by this.
_ROUNDINGS, _MOST_ROUNDING = 5.0, 2e-3
NO_ROUNDING: Mapping[str, float] = {}
ON_NOISE = " on noise of both signs"


@dataclass(frozen=True, slots=True)
class Score:
    """One variant's scores: `accuracy` is None without labels; error and agreement are against fp32's own answers.

    `outcomes` are those of the labelled samples. `output_errors` are by output. `likeness` describes the agreement, and
    `wanted` says what would give a score, if there are no labels.
    """

    accuracy: Accuracy | None
    max_relative_error: float
    agreement: float = 1.0
    outcomes: AnyOutcomes | None = None
    output_errors: Mapping[str, float] = field(default_factory=dict)
    likeness: str = ""
    wanted: str = "--evaluate"


def relative_error(answers: np.ndarray, expected: np.ndarray, *, least_size: float = 0.0) -> float:
    """The largest ||a - b|| / ||b|| of any sample; both are [n, ...]. Infinite if an answer is not finite."""
    return float(relative_errors(answers, expected, least_size=least_size).max())


def check_against_torch(
    fp32: OpenVariant,
    samples: Rows,
    reference: Rows,
    step: Step = IGNORED,
    *,
    normalised: Collection[str] = (),
    original: str = "torch",
    on: str = "",
    rounding: Mapping[str, float] = NO_ROUNDING,
) -> dict[str, float]:
    """Check the fp32 graph against the answers of `original` to `samples`, at batch 1, 3 and the largest.

    `step` advances by every sample at every batch size; `compared_batches` has their number. Errors are relative; for
    `normalised` outputs they are absolute if the answer is shorter than 1. `on` names unusual samples, for which
    answers that are not finite are skipped. `rounding` is how far rounding of the input alone moves each output of the
    original. Returns the largest error of each output. Raises JobError if one is above `MAX_FP32_ERROR`, or what
    rounding explains, at any batch size.
    """
    rows = _finite_rows(reference) if on else np.arange(count_of(samples))
    if not len(rows):
        return dict.fromkeys(reference, 0.0)
    samples, reference = picked(samples, rows), picked(reference, rows)
    worst = dict.fromkeys(reference, 0.0)
    for batch in compared_batches(fp32):
        try:
            answers = _in_batches(fp32, samples, batch, step)
        except EngineFailure as failure:
            raise JobError(
                f"the exported graph fails at batch size {batch} ({failure}); lower --max-batch"
            ) from failure
        said = fp32.spec.detection
        if said is not None and said.is_list and all(answers[name].shape == reference[name].shape for name in answers):
            answers = in_order_of(reference, answers, said)
        for name, exact in reference.items():
            if answers[name].shape != exact.shape:
                raise JobError(
                    f"the exported graph gives {name} {list(answers[name].shape)} where {original} gives "
                    f"{list(exact.shape)}, at batch size {batch}; look for shapes that depend on the data"
                )
            error = relative_error(answers[name], exact, least_size=WHOLE if name in normalised else 0.0)
            allowed = _allowed(exact, rounding.get(name, 0.0), is_noise=bool(on))
            if error > allowed:
                which = f"{name} of " if len(reference) > 1 else ""
                advice = (
                    "look for operations that mix samples or depend on the batch size"
                    if _depends_on_the_batch(fp32, samples, name, answers[name], batch, allowed)
                    else f"look for layers that {original} computes otherwise than ONNX Runtime, and replace them"
                )
                raise JobError(
                    f"{which}the exported graph differs from {original} by {error:.2g} at batch size {batch}{on}, "
                    f"allowed is {allowed:g}; {advice}"
                )
            worst[name] = max(worst[name], error)
    return worst


def _depends_on_the_batch(
    fp32: OpenVariant, samples: Rows, name: str, answers: np.ndarray, batch: int, allowed: float
) -> bool:
    """Whether the graph itself answers `name` differently in batches of another size."""
    for other in compared_batches(fp32):
        if other != batch:
            try:
                found = _in_batches(fp32, samples, other, IGNORED)[name]
            except EngineFailure:
                return True
            if found.shape != answers.shape or relative_error(found, answers) > allowed:
                return True
    return False


def _finite_rows(reference: Rows) -> np.ndarray:
    """int64 [n], the samples whose answers are all finite."""
    are_finite = np.ones(count_of(reference), bool)
    for array in reference.values():
        if array.dtype.kind == "f":
            are_finite &= np.isfinite(array).reshape(len(array), -1).all(axis=1)
    return np.flatnonzero(are_finite)


def _allowed(exact: np.ndarray, rounding: float, *, is_noise: bool) -> float:
    """`MAX_FP32_ERROR` for numbers, more if the network itself magnifies rounding; a few close calls for decisions made
    from them, such as a class per pixel.
    """
    if exact.dtype.kind == "f":
        return max(MAX_FP32_ERROR, min(_ROUNDINGS * rounding, _MOST_ROUNDING))
    # Noise gives no clear answers.
    return 2e-2 if is_noise else 1e-3


def compared_batches(fp32: OpenVariant) -> list[int]:
    """The batch sizes at which the graph is compared with torch."""
    largest = fp32.engine.info.batch_sizes[-1]
    return sorted({1, min(3, largest), largest})


def _in_batches(candidate: OpenVariant, samples: Rows, batch: int, step: Step) -> dict[str, np.ndarray]:
    """Answers to all samples, in runs of exactly `batch`: the last one is filled up from the start."""
    count = count_of(samples)
    indices = np.arange(-(-count // batch) * batch) % count
    answers = []
    for start, rows in zip(range(0, count, batch), indices.reshape(-1, batch), strict=True):
        answers.append(candidate.answers(picked(samples, rows)))
        step.advance(min(batch, count - start))
    return picked(joined(answers), slice(count))


def compare(candidates: Sequence[OpenVariant], samples: Rows, judge: Judge | None = None) -> tuple[Score, ...]:
    """Scores without labels: how far each variant's answers to `samples` are from the first's."""
    judge = judge or judge_of(candidates[0].spec)
    outcomes = _answered(candidates, [Chunk(samples, None, np.arange(count_of(samples)))], judge)
    return tuple(_unlabelled(own, outcomes[0], candidates[0], judge) for own in outcomes)


def _unlabelled(own: AnyOutcomes, reference: AnyOutcomes, fp32: OpenVariant, judge: Judge) -> Score:
    agreement = own.agreement(reference)
    errors, wanted = _by_output(own, fp32), what_scores(fp32.spec.task)
    return Score(None, own.worst_error, agreement, None, errors, judge.likeness(agreement), wanted)


def _by_output(own: AnyOutcomes, fp32: OpenVariant) -> dict[str, float]:
    names = [output.name for output in fp32.engine.outputs]
    worst = own.errors.reshape(len(own.errors), -1).max(axis=0, initial=0.0)
    return dict(zip(names, worst.tolist(), strict=True))


def measure_accuracy(
    candidates: Sequence[OpenVariant],
    images: SampleSet,
    progress: Progress,
    *,
    budget_points: float = 1.0,
    looks: int = 1,
    cache: StepCache = NO_CACHE,
    judge: Judge | None = None,
) -> tuple[Score, ...]:
    """Scores on labelled samples; the first candidate is the fp32 reference. Without labels they have no accuracy.

    Every image is decoded once and answered by all candidates that are not cached. `looks` is how often a variant of
    this kind was tried on these images. Raises JobError if more than 1 % of the images are broken or none is left.
    """
    judge = judge or judge_of(candidates[0].spec)
    alone = f" of {candidates[1].recipe.name}" if len(candidates) == 2 else ""
    outcomes = observe(candidates, images, progress, f"Measuring accuracy{alone}", cache, judge)
    reference = outcomes[0]
    if not (images.has_targets and judge.scores_targets):
        return tuple(_unlabelled(own, reference, candidates[0], judge) for own in outcomes)
    return tuple(
        Score(
            own.accuracy(reference, images.labels, budget_points, looks=looks, metric=judge.metric),
            own.worst_error,
            own.agreement(reference),
            own,
            _by_output(own, candidates[0]),
        )
        for own in outcomes
    )


def observe(
    candidates: Sequence[OpenVariant],
    images: SampleSet,
    progress: Progress,
    step: str,
    cache: StepCache = NO_CACHE,
    judge: Judge | None = None,
) -> tuple[AnyOutcomes, ...]:
    """What each candidate answers to all samples; the first is the fp32 reference. Raises JobError as above."""
    judge = judge or judge_of(candidates[0].spec)
    keys = _keys(candidates, images, judge)
    known = [cache.read_arrays(key) for key in keys]
    missing = [candidate for candidate, found in zip(candidates, known, strict=True) if found is None]
    fresh: dict[str, AnyOutcomes] = {}
    if missing:
        # The reference answers with every other candidate: errors are differences from it.
        asked = [candidates[0], *(candidate for candidate in missing if candidate is not candidates[0])]
        largest = candidates[0].engine.info.batch_sizes[-1]
        with progress.step(f"{step} on {images.count} {images.kind}", images.count) as bar:
            answered = _answered(asked, images.chunks(bar, largest), judge)
        if not answered:
            raise JobError(f"no image of {images.source} can be read; repair the data set")
        fresh = {candidate.recipe.file: own for candidate, own in zip(asked, answered, strict=True)}
    for key, candidate in zip(keys, candidates, strict=True):
        if candidate.recipe.file in fresh:
            cache.write_arrays(key, fresh[candidate.recipe.file].arrays())
    return tuple(
        fresh[candidate.recipe.file] if found is None else judge.restored(found)
        for candidate, found in zip(candidates, known, strict=True)
    )


def _keys(candidates: Sequence[OpenVariant], images: SampleSet, judge: Judge) -> list[str]:
    # The fingerprint names CPU and library: on others, a borderline image may fall to the other side.
    own = [
        (sha256_file(candidate.path), candidate.engine.info.device_fingerprint, str(candidate.is_twin))
        for candidate in candidates
    ]
    return [step_key("outcomes", *one, *own[0], judge.key, images.key) for one in own]


def _answered(candidates: Sequence[OpenVariant], chunks: Iterable[Chunk], judge: Judge) -> tuple[AnyOutcomes, ...]:
    """Empty without samples."""
    largest = candidates[0].engine.info.batch_sizes[-1]
    parts: list[list[Any]] = [[] for _ in candidates]
    for chunk in chunks:
        for start in range(0, count_of(chunk.inputs), largest):
            rows = slice(start, start + largest)
            inputs, targets = picked(chunk.inputs, rows), None if chunk.targets is None else chunk.targets[rows]
            reference = candidates[0].answers(inputs)
            for candidate, own in zip(candidates, parts, strict=True):
                answers = reference if candidate is candidates[0] else candidate.answers(inputs)
                outcomes = judge.judged(answers, reference, targets)
                if isinstance(outcomes, Outcomes):
                    outcomes = replace(outcomes, positions=chunk.positions[rows])
                own.append(outcomes)
    return tuple(type(own[0]).joined(own) for own in parts if own)
