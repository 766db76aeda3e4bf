"""Getting lost accuracy back: which layers hurt in INT8, and how few of them must stay in higher precision.

One sensitivity pass quantises each layer alone and measures how far the answers move: errors of layers add up
in power, so the order holds for any number of them, where leaving out one layer of a broken file shows nothing.
Then the worst 1, 2, 4, ... are kept in higher precision until the loss is within the budget, and the smallest
number that does it is found between the last two. All of it on the calibration images; the evaluation images
see the result only. Knows the search. Knows nothing of how files are made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from convoy.export.progress import SILENT, Progress
from convoy.export.variants.calibrate import Method
from convoy.export.variants.precision import Recipe
from convoy.export.variants.trials import Bench, Trial
from convoy.models.bundle import TradeOff

# With more of its layers in float, a file has nothing left to gain from INT8.
_MOST_KEPT = 0.75


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Layers with the error that each alone brings, worst first."""

    errors: tuple[tuple[str, float], ...]

    def worst(self, count: int) -> dict[str, str]:
        """The worst layers, each with the reason for keeping it."""
        return {name: f"alone moves the answers by {100 * error:.2g} %" for name, error in self.errors[:count]}


def measure_sensitivity(
    bench: Bench, recipe: Recipe, method: Method, layers: Sequence[str], progress: Progress
) -> Sensitivity:
    """Quantise each layer alone; `recipe` must take `only`."""
    errors = []
    with progress.step("find sensitive layers", len(layers)) as step:
        for layer in layers:
            errors.append((layer, bench.try_out(recipe, method, only=frozenset({layer})).mean_error))
            step.advance()
    return Sensitivity(tuple(sorted(errors, key=lambda pair: -pair[1])))


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
        """The smallest number of kept layers, at least `start`, that passes; None where none does."""
        most = int(_MOST_KEPT * len(self.sensitivity().errors))
        failed, count = start - 1, start
        while count <= most and not self.passes(count, caution):
            failed, count = count, max(1, 2 * count)
        if count > most:
            if failed >= most or not self.passes(most, caution):
                return None
            count = most
        while count - failed > 1:
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
