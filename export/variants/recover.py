"""Getting lost accuracy back: which layers hurt in INT8, and how few of them must stay in higher precision.

One sensitivity pass quantises each layer alone and measures how far the answers move: errors of layers add up
in power, so the order holds for any number of them, where leaving out one layer of a broken file shows nothing.
What a layer costs in higher precision is its multiply-adds, so the worst are those with most error for these.
The pass begins with the cheapest and ends when its time is up. Then the worst 1, 2, 4, ... are kept in higher
precision until the loss is within the budget, and the smallest number that does it is found between the last
two. All of it on the calibration images; the evaluation images see the result only. Knows the search. Knows
nothing of how files are made.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from convoy.export.progress import SILENT, Progress
from convoy.export.variants.calibrate import Method
from convoy.export.variants.precision import Recipe
from convoy.export.variants.trials import Bench, Trial
from convoy.models.bundle import TradeOff

# With more of its multiply-adds in float, a file has little left to gain from INT8.
_MOST_KEPT = 0.5
# A layer without multiply-adds costs time, too: about as much as one with this share of them.
_LEAST_SHARE = 0.01


@dataclass(slots=True)
class TimeBudget:
    """How long the search may take in all, in seconds, and how long it has."""

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
        """Empty where nothing was looked for."""
        unseen = f", so that {self.unseen} layers were not looked at" if self.unseen else ""
        took = f"looking for layers to keep took {self.spent_s:.0f} s of {self.limit_s:.0f} s{unseen}"
        return took if self.spent_s else ""


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Layers with the error that each alone brings, those first that are best kept in higher precision.

    `shares` are theirs of all multiply-adds; a layer that is not named there has none.
    """

    errors: tuple[tuple[str, float], ...]
    shares: Mapping[str, float] = field(default_factory=dict)

    @property
    def most(self) -> int:
        """How many layers may be kept; one may always be."""
        kept = 0.0
        for count, (name, _) in enumerate(self.errors):
            kept += self.shares.get(name, 0.0)
            if kept > _MOST_KEPT:
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
    """Quantise each layer alone, as far as time allows; `recipe` must take `only`.

    `shares` are those of all multiply-adds by layer, zero for what has none.
    """
    errors: dict[str, float] = {}
    with progress.step(f"find layers, {budget.limit_s:.0f} s at most", len(shares)) as step:
        for layer in sorted(shares, key=lambda name: shares[name]):
            if budget.is_over:
                budget.unseen = len(shares) - len(errors)
                break
            errors[layer] = bench.try_out(recipe, method, only=frozenset({layer})).mean_error
            step.advance()
    return ordered(errors, shares)


def ordered(errors: Mapping[str, float], shares: Mapping[str, float]) -> Sensitivity:
    """Errors add up in power, so that it is their squares that are held against multiply-adds."""
    worth = {name: error * error / (shares.get(name, 0.0) + _LEAST_SHARE) for name, error in errors.items()}
    return Sensitivity(tuple(sorted(errors.items(), key=lambda pair: -worth[pair[0]])), shares)


@dataclass(slots=True)
class Ladder:
    """One INT8 file with 0, 1, 2, ... of its worst layers in higher precision, each tried at most once.

    `sensitivity` is asked only when a layer has to be kept. Each trial is a step of `progress`.
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
        """Whether the file with so many layers kept loses no more than the budget on the calibration images.

        `caution` is the number of standard errors that its loss is taken to be higher than it was measured.
        """
        if count not in self.trials:
            keep = frozenset(self.sensitivity().worst(count)) if count else frozenset()
            name = f"try {self.recipe.file.removesuffix('.onnx')}{f', {count} kept' if count else ''}"
            with self.progress.step(name, self.bench.count) as step:
                self.trials[count] = self.bench.try_out(self.recipe, self.method, keep, step=step)
        found = self.trials[count].accuracy
        # Images that only one of the two gets right are at most those that they disagree on.
        error_points = 100 * math.sqrt((1 - found.agreement) / found.images)
        return found.loss_points + caution * error_points <= self.budget_points

    def climb(self, start: int, caution: float = 0.0) -> int | None:
        """The smallest number of kept layers, at least `start`, that passes; None where none does, or time is up.

        When time is up, the smallest that is known to pass is taken.
        """
        with self.budget:
            return self._climb(start, caution)

    def _climb(self, start: int, caution: float) -> int | None:
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
        """How many layers the file keeps that lost least of all that were tried; of equals the fewest."""
        return min(self.trials, key=lambda count: (self.trials[count].accuracy.loss_points, count))

    @property
    def trade_offs(self) -> tuple[TradeOff, ...]:
        """All that was tried, by the number of layers kept."""
        return tuple(TradeOff(count, trial.accuracy, trial.median_ms) for count, trial in sorted(self.trials.items()))
