"""Recover lost accuracy: find the layers that hurt in 8 bits, and how few must stay in higher precision.

One sensitivity pass quantises each layer alone and measures how far the answers move. Errors of layers add up in power,
so the order holds for any number of them; leaving one layer out of a broken file would show nothing. The cost of a
layer in higher precision is its multiply-adds, so the worst layers have the largest error relative to these. The pass
begins with the cheapest layers and ends when its time is up. Then the worst 1, 2, 4, ... are kept in higher precision
until the loss is within the budget, and the smallest sufficient number is found between the last two. All of it uses
the calibration images; the evaluation images only see the result.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from convoy.models.bundle import Accuracy, TradeOff
from convoy.models.spec import ModelSpec

# Enough to distinguish a broken layer from a sound one, and few enough to try every layer.
_SAMPLES = 256
_BATCH = 16


# Tries INT8 files on the calibration images before any is measured on the evaluation images. The ranges come from the
# same images, so no value is clipped unseen, and a file looks a little better than it is. If it then turns out worse on
# other images, these count less (`Ladder.passes` with caution).


@dataclass(frozen=True, slots=True)
class Trial:
    """One file on the calibration images.

    `accuracy` uses fp32's own answers as labels if the images have none. `mean_error` is the root mean square of ||a -
    b|| / ||b|| over the images, `median_ms` that of a batch of 16, or of the largest below; None if it was not
    measured.
    """

    accuracy: Accuracy
    mean_error: float
    median_ms: float | None
    kept: Mapping[str, str]


class Bench:
    """Tests files on decoded calibration images, against fp32's answers to them.

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
        chosen = images.thinned(max(2, min(_SAMPLES, (64 << 20) // max(1, nbytes))))
        with progress.step(f"Reading {chosen.count} {chosen.kind} to test variants on", chosen.count) as step:
            chunks = list(chosen.chunks(step, _BATCH))
        self._inputs = joined([chunk.inputs for chunk in chunks])
        with opened(self._spec, [REFERENCE], folder) as (fp32,):
            self._reference = self._answers(fp32, IGNORED)
        self._targets = _targets(images, chunks) if self._judge.scores_targets else None
        self._exact = self._outcomes(self._reference)

    @property
    def count(self) -> int:
        """The number of samples of each trial."""
        return count_of(self._inputs)

    def try_out(
        self,
        recipe: Recipe,
        method: Method,
        keep: frozenset[str] = frozenset(),
        *,
        only: frozenset[str] | None = None,
        step: Step = IGNORED,
        is_timed: bool = False,
    ) -> Trial:
        """Make the file and measure it; `step` advances by every sample. Raises JobError if it cannot be made."""
        assert recipe.make is not None
        path = self._folder / f"trial-{recipe.file}"
        kept = recipe.make(Conversion(self._calibrated(recipe), method, keep, only), path)
        try:
            with opened(self._spec, [replace(recipe, file=path.name)], self._folder) as (candidate,):
                outcomes = self._outcomes(self._answers(candidate, step))
                median_ms = self._median_ms(candidate) if is_timed else None
        finally:
            path.unlink(missing_ok=True)
        error = float(np.sqrt(np.mean(np.square(np.minimum(outcomes.errors, 1e6)))))
        accuracy = outcomes.accuracy(self._exact, (), 0.0, metric=self._judge.metric)
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
        return statistics.median(probe.run_ms() for _ in range(5))


def _targets(images: SampleSet, chunks: Sequence[Chunk]) -> np.ndarray | None:
    """None if fp32's own answers are the reference: without labels, or with classes other than the model's."""
    if not images.has_targets or (isinstance(images, ImageSet) and images.target_kind == "class" and not images.labels):
        return None
    return np.concatenate([chunk.targets for chunk in chunks if chunk.targets is not None])


def best_method(bench: Bench, recipe: Recipe, methods: Sequence[Method], progress: Progress) -> Method:
    """The method with the smallest error among those that agree with fp32 about as often as the best one."""
    if len(methods) == 1:
        return methods[0]
    trials = {}
    with progress.step(f"Choosing ranges for {recipe.name}", len(methods) * bench.count) as step:
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


@dataclass(slots=True)
class TimeBudget:
    """The time limit of the search in seconds, and the time spent."""

    limit_s: float
    clock: Callable[[], float] = time.monotonic
    spent_s: float = 0.0
    unseen: int = 0
    _since_s: float | None = None

    def __enter__(self) -> None:
        self._since_s = self.clock()

    def __exit__(self, *_: object) -> None:
        assert self._since_s is not None
        self.spent_s, self._since_s = self.spent_s + self.clock() - self._since_s, None

    @property
    def is_over(self) -> bool:
        running_s = 0.0 if self._since_s is None else self.clock() - self._since_s
        return self.spent_s + running_s >= self.limit_s

    @property
    def in_words(self) -> str:
        """Empty if there was no search."""
        unseen = f", {self.unseen} layers were not tested" if self.unseen else ""
        took = f"the search for layers to keep took {self.spent_s:.0f} s of {self.limit_s:.0f} s{unseen}"
        return took if self.spent_s else ""


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Layers with the error of each alone, those first that are best kept in higher precision.

    `shares` are their shares of all multiply-adds; a missing layer has none.
    """

    errors: tuple[tuple[str, float], ...]
    shares: Mapping[str, float] = field(default_factory=dict)

    @property
    def most(self) -> int:
        """How many layers may be kept, at least one."""
        kept = 0.0
        for count, (name, _) in enumerate(self.errors):
            kept += self.shares.get(name, 0.0)
            # With more of its multiply-adds in float, a file gains little from INT8.
            if kept > 0.5:
                return max(1, count)
        return len(self.errors)

    def worst(self, count: int) -> dict[str, str]:
        """The worst layers, each with the reason for keeping it."""
        return {name: f"alone moves the answers by {100 * error:.2g} %" for name, error in self.errors[:count]}


def measure_sensitivity(
    bench: Bench,
    recipe: Recipe,
    method: Method,
    shares: Mapping[str, float],
    budget: TimeBudget,
    progress: Progress,
) -> Sensitivity:
    """Quantise each layer alone, as far as time allows; `recipe` must support `only`.

    `shares` are those of all multiply-adds by layer, zero for a layer without.
    """
    errors: dict[str, float] = {}
    with progress.step(f"Testing layers of {recipe.name} (up to {budget.limit_s:.0f} s)", len(shares)) as step:
        for layer in sorted(shares, key=lambda name: shares[name]):
            if budget.is_over:
                budget.unseen = len(shares) - len(errors)
                break
            errors[layer] = bench.try_out(recipe, method, only=frozenset({layer})).mean_error
            step.advance()
    return ordered(errors, shares)


def ordered(errors: Mapping[str, float], shares: Mapping[str, float]) -> Sensitivity:
    """Errors add up in power, so their squares are compared with multiply-adds."""
    # A layer without multiply-adds takes time, too: about as much as one with this share of them.
    worth = {name: error * error / (shares.get(name, 0.0) + 0.01) for name, error in errors.items()}
    return Sensitivity(tuple(sorted(errors.items(), key=lambda pair: -worth[pair[0]])), shares)


@dataclass(slots=True)
class Ladder:
    """One INT8 file with 0, 1, 2, ... of its worst layers in higher precision, each tried at most once.

    `sensitivity` is called only if a layer must be kept. Each trial is a step of `progress`.
    """

    bench: Bench
    recipe: Recipe
    method: Method
    budget_points: float
    sensitivity: Callable[[], Sensitivity]
    budget: TimeBudget = field(default_factory=lambda: TimeBudget(math.inf))
    progress: Progress = SILENT
    trials: dict[int, Trial] = field(default_factory=dict)

    def passes(self, count: int, caution: float = 0.0) -> bool:
        """Whether the file with this many layers kept stays within the budget on the calibration images.

        `caution` is the number of standard errors added to its measured loss.
        """
        if count not in self.trials:
            keep = frozenset(self.sensitivity().worst(count)) if count else frozenset()
            kept = f" with {count} layer{'s' * (count > 1)} kept" if count else ""
            with self.progress.step(f"Testing {self.recipe.name}{kept}", self.bench.count) as step:
                self.trials[count] = self.bench.try_out(self.recipe, self.method, keep, step=step, is_timed=True)
        found = self.trials[count].accuracy
        # At most as many as the images on which the two disagree.
        error_points = 100 * math.sqrt((1 - found.agreement) / found.images)
        return found.loss_points + caution * error_points <= self.budget_points

    def climb(self, start: int, caution: float = 0.0) -> int | None:
        """The smallest number of kept layers, at least `start`, that passes; None if none does, or time is up.

        When time is up, the smallest number known to pass is returned.
        """
        with self.budget:
            most = self.sensitivity().most
            failed, count = start - 1, start
            while count <= most and not self.passes(count, caution):
                if self.budget.is_over:
                    return None
                failed, count = count, max(1, 2 * count)
            if count > most:
                if failed >= most or not self.passes(most, caution):
                    return None
                count = most
            while count - failed > 1 and not self.budget.is_over:
                middle = (count + failed) // 2
                if self.passes(middle, caution):
                    count = middle
                else:
                    failed = middle
            return count

    def best(self) -> int:
        """The number of kept layers of the file that lost the least; of equals the fewest."""
        return min(self.trials, key=lambda count: (self.trials[count].accuracy.loss_points, count))

    @property
    def trade_offs(self) -> tuple[TradeOff, ...]:
        """All tries, by the number of layers kept."""
        return tuple(TradeOff(count, trial.accuracy, trial.median_ms) for count, trial in sorted(self.trials.items()))
