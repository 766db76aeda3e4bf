"""Trying out INT8 files on the calibration images, before any of them is held against the evaluation images.

Knows how good a file is on images that may be looked at as often as one likes: how often it agrees with fp32,
what it loses where the images have labels, and how long a batch takes. Decides nothing.

The ranges come from the same images, so that no value here is cut off unseen, and a file looks a little better than it
is. Whoever then finds it worse on other images should believe these less (`Ladder.passes` with caution).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from convoy.app.engines.measure import make_probe
from convoy.export.data import ImageSet, SampleSet
from convoy.export.progress import IGNORED, SILENT, Progress, Step
from convoy.export.proof.judging import Judge, judge_of
from convoy.export.proof.outcomes import AnyOutcomes
from convoy.export.rows import Chunk, Rows, count_of, joined, picked
from convoy.export.variants.calibrate import Calibration, Conversion, Method
from convoy.export.variants.precision import REFERENCE, Recipe
from convoy.export.variants.variant import OpenVariant, opened
from convoy.models.bundle import Accuracy
from convoy.models.spec import ModelSpec

# Enough to tell a broken layer from a sound one, and few enough to try every layer.
_SAMPLES = 256
_SAMPLES_BYTES = 64 << 20
_BATCH = 16
_TIMED_RUNS = 5


@dataclass(frozen=True, slots=True)
class Trial:
    """One file on the calibration images.

    `accuracy` counts fp32's own answers as the labels where the images have none. `mean_error` is the root mean
    square of ||a - b|| / ||b|| over the images, `median_ms` that of a batch of 16, or of the largest below.
    """

    accuracy: Accuracy
    mean_error: float
    median_ms: float
    kept: Mapping[str, str]


class Bench:
    """A place to try files: decoded calibration images, fp32's answers to them, and a folder.

    `calibrated` gives what each recipe's files are made of.
    """

    def __init__(
        self,
        spec: ModelSpec,
        calibrated: Callable[[Recipe], Calibration],
        images: SampleSet,
        folder: Path,
        progress: Progress = SILENT,
        judge: Judge | None = None,
    ) -> None:
        self._spec = replace(spec, max_batch_size=min(_BATCH, spec.max_batch_size))
        self._calibrated = calibrated
        self._folder = folder
        self._judge = judge or judge_of(spec)
        nbytes = sum(math.prod(one.drawn_shape) * one.numpy_dtype.itemsize for one in spec.inputs)
        chosen = images.thinned(max(2, min(_SAMPLES, _SAMPLES_BYTES // max(1, nbytes))))
        with progress.step("read samples to try on", chosen.count) as step:
            chunks = list(chosen.chunks(step, _BATCH))
        self._inputs = joined([chunk.inputs for chunk in chunks])
        with opened(self._spec, [REFERENCE], folder) as (fp32,):
            self._reference = self._answers(fp32, IGNORED)
        self._targets = _targets(images, chunks) if self._judge.scores_targets else None
        self._exact = self._outcomes(self._reference)

    @property
    def count(self) -> int:
        """How many samples each trial is on."""
        return count_of(self._inputs)

    def try_out(
        self,
        recipe: Recipe,
        method: Method,
        keep: frozenset[str] = frozenset(),
        *,
        only: frozenset[str] | None = None,
        step: Step = IGNORED,
    ) -> Trial:
        """Make the file and measure it; `step` advances by every sample. Raises JobError where it cannot be made."""
        assert recipe.make is not None
        path = self._folder / f"trial-{recipe.file}"
        kept = recipe.make(Conversion(self._calibrated(recipe), method, keep, only), path)
        try:
            with opened(self._spec, [replace(recipe, file=path.name)], self._folder) as (candidate,):
                outcomes = self._outcomes(self._answers(candidate, step))
                median_ms = self._median_ms(candidate)
        finally:
            path.unlink(missing_ok=True)
        error = float(np.sqrt(np.mean(np.square(np.minimum(outcomes.errors, 1e6)))))
        accuracy = self._judge.accuracy(outcomes, self._exact, (), 0.0)
        return Trial(accuracy, error, median_ms, kept)

    def _outcomes(self, answers: Rows) -> AnyOutcomes:
        return self._judge.judged(answers, self._reference, self._targets)

    def _answers(self, candidate: OpenVariant, step: Step) -> dict[str, np.ndarray]:
        size = self._spec.max_batch_size
        answers = []
        for start in range(0, count_of(self._inputs), size):
            answers.append(candidate.answers(picked(self._inputs, slice(start, start + size))))
            step.advance(count_of(answers[-1]))
        return joined(answers)

    def _median_ms(self, candidate: OpenVariant) -> float:
        probe = make_probe(candidate.engine, self._spec.max_batch_size)
        probe.run_ms()
        return statistics.median(probe.run_ms() for _ in range(_TIMED_RUNS))


def _targets(images: SampleSet, chunks: Sequence[Chunk]) -> np.ndarray | None:
    """None where fp32's own answers are the measure: without any, or with classes that are others than the model's."""
    if not images.has_targets or (isinstance(images, ImageSet) and not images.labels):
        return None
    return np.concatenate([chunk.targets for chunk in chunks if chunk.targets is not None])


def best_method(bench: Bench, recipe: Recipe, methods: Sequence[Method], progress: Progress) -> Method:
    """Of the methods whose files agree with fp32 as often as the best one's, but for chance: the smallest error."""
    if len(methods) == 1:
        return methods[0]
    trials = {}
    with progress.step(f"compare ranges {recipe.file.removesuffix('.onnx')}", len(methods) * bench.count) as step:
        for method in methods:
            trials[method] = bench.try_out(recipe, method, step=step)
    fewest = min(map(_disagreements, trials.values()))
    return min(
        (method for method in methods if not _is_more(_disagreements(trials[method]), fewest)),
        key=lambda method: trials[method].mean_error,
    )


def _disagreements(trial: Trial) -> int:
    return round((1 - trial.accuracy.agreement) * trial.accuracy.images)


def _is_more(count: int, other: int) -> bool:
    """Whether by more than a standard error of the difference of two counts."""
    return count - other > math.sqrt(count + other)
