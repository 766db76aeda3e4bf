"""Make every variant, measure its accuracy, and make it again with more layers kept if it loses too much.

Each further measurement of a variant on the evaluation images widens its bound (`Outcomes.accuracy`), and there are
only a few, because many would select a lucky file. A file that cannot be made, checked or measured is left out with
its reason (`LeftOut`), and the others go on without it.
"""

from __future__ import annotations

import errno
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from convoy.export.cache import StepCache
from convoy.export.data import ExportData
from convoy.export.progress import Progress
from convoy.export.proof.judging import Judge
from convoy.export.proof.verify import Score, compare, measure_accuracy
from convoy.export.sources.torch_job import one_line
from convoy.export.variants.making import Made, Maker
from convoy.export.variants.precision import REFERENCE, Recipe
from convoy.export.variants.variant import opened
from convoy.models.bundle import TOP_1, Accuracy
from convoy.models.errors import ConvoyError
from convoy.models.spec import ModelSpec
from convoy.models.store import disk_errors

_Result = TypeVar("_Result")


# Files that cannot be made, checked or measured, each with its reason. The others continue without them. Whatever a
# library raises about one file says nothing about the rest, so every exception counts, including a lack of memory. An
# interrupt ends everything, and so does a full disk, on which the bundle would not fit either.


def in_words(reasons: Mapping[str, str]) -> str:
    """The reasons in one line, with files that share a reason together; empty if there are none."""
    files: dict[str, list[str]] = {}
    for file, reason in reasons.items():
        files.setdefault(reason, []).append(file)
    return "; ".join(f"no {' and no '.join(own)}: {reason}" for reason, own in files.items())


@dataclass(slots=True)
class LeftOut:
    """The reasons by file, as far as they are known."""

    reasons: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def where_it_fails(self, recipe: Recipe) -> Iterator[None]:
        """Record the recipe's file if the block raises, and continue after it."""
        try:
            yield
        except Exception as error:
            if _is_of_the_disk(error):
                raise
            self.reasons[recipe.file] = _reason(error)

    def of(self, recipes: Sequence[Recipe]) -> list[Recipe]:
        """The recipes without those that are left out."""
        return [recipe for recipe in recipes if recipe.file not in self.reasons]

    def without_failing(
        self, recipes: Sequence[Recipe], work: Callable[[Sequence[Recipe]], _Result]
    ) -> tuple[Sequence[Recipe], _Result]:
        """The result of `work` for all recipes, or for those on which it succeeds; and which these are.

        The first is the reference: what fails for it alone is raised.
        """
        try:
            return recipes, work(recipes)
        except Exception as error:
            if _is_of_the_disk(error):
                raise
            reference, *others = recipes
            alone = work([reference])
            reason = _reason(error)
        for recipe in others:
            with self.where_it_fails(recipe):
                work([reference, recipe])
        left = self.of(recipes)
        if len(left) == 1:
            return left, alone
        try:
            return left, work(left)
        except Exception as error:  # each succeeds alone but not all together, as when memory is short
            if _is_of_the_disk(error):
                raise
            self.reasons |= {recipe.file: reason for recipe in left[1:]}
            return [reference], alone


def _is_of_the_disk(error: Exception) -> bool:
    """Whether the error, or its cause, is a full or read-only disk."""
    refused = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
    return any(isinstance(one, OSError) and one.errno in refused for one in (error, error.__cause__))


def _reason(error: Exception) -> str:
    if isinstance(error, ConvoyError):
        return str(error)
    if isinstance(error, MemoryError):
        return "there was not enough memory for it"
    words = one_line(str(error))
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


Proved = tuple[Made, Score]


@dataclass(frozen=True, slots=True)
class Prover:
    """Scores the variants in `folder`, with `judge` or else the judge of the task."""

    spec: ModelSpec
    folder: Path
    data: ExportData
    gate: AccuracyGate
    progress: Progress
    cache: StepCache
    judge: Judge | None = None

    def make_and_score(self, recipes: Sequence[Recipe], maker: Maker | None, left_out: LeftOut) -> list[Proved]:
        """Make and score the files of all recipes; `maker` is None if only fp32 is wanted.

        What cannot be made or scored goes to `left_out`. Raises JobError when the images cannot be read.
        """
        made: dict[str, Made] = {}
        for recipe in recipes:
            with left_out.where_it_fails(recipe):
                made[recipe.file] = maker.make(recipe) if maker else Made(recipe)
        left, scores = left_out.without_failing(left_out.of(recipes), self._scores)
        rows = [(made[recipe.file], score) for recipe, score in zip(left, scores, strict=True)]
        if maker is None or self.data.evaluation is None:
            return rows
        improved: list[Proved] = []
        for one, score in rows:
            with left_out.where_it_fails(one.recipe):
                improved.append(self._improved(one, score, maker))
        return improved

    def _improved(self, made: Made, score: Score, maker: Maker) -> Proved:
        """Make the variant again if it loses too much. The best file is returned and stays in the folder."""
        best, tried = (made, score), made
        for looks in range(2, 3 + 1):
            if not self._loses_too_much(score):
                break
            kept, written = self.folder / f"best-{made.recipe.file}", self.folder / made.recipe.file
            with disk_errors(self.folder):
                shutil.copyfile(written, kept)
            # The calibration images were too optimistic, so each retry is more cautious.
            again = maker.retry(tried, caution=float(looks - 1))
            if again is None:
                break
            tried, (_, score) = again, self._scores([REFERENCE, made.recipe], looks)
            if _lost_points(score) < _lost_points(best[1]):
                best = tried, score
            else:
                kept.replace(written)
        drift = ""
        if self._loses_too_much(best[1]) and made.recipe.has_eight_bits and self.data.evaluation is not None:
            drift = maker.drift(self.data.evaluation)
        return replace(best[0], trade_offs=maker.trail(made.recipe), drift=drift), best[1]

    def _loses_too_much(self, score: Score) -> bool:
        return score.accuracy is not None and score.accuracy.loss_points > self.gate.budget_points

    def _scores(self, recipes: Sequence[Recipe], looks: int = 1) -> tuple[Score, ...]:
        with opened(self.spec, recipes, self.folder) as candidates:
            if self.data.evaluation is None:
                return compare(candidates, self.data.samples, self.judge)
            return measure_accuracy(
                candidates,
                self.data.evaluation,
                self.progress,
                budget_points=self.gate.budget_points,
                looks=looks,
                cache=self.cache,
                judge=self.judge,
            )


def _lost_points(score: Score) -> float:
    return math.inf if score.accuracy is None else score.accuracy.loss_points


@dataclass(frozen=True, slots=True)
class AccuracyGate:
    """A variant may lose `budget_points` of top-1 against fp32; `strict` requires that this is proved."""

    budget_points: float
    strict: bool = False

    def passes(self, accuracy: Accuracy) -> bool:
        """Whether a variant with these scores may serve."""
        return accuracy.loss_points <= self.budget_points and (accuracy.is_proved or not self.strict)

    def verdict(self, score: Score, *, real: bool = True, samples: str = "images") -> tuple[bool, str]:
        """Whether the variant may serve, and why. `real`: the inputs were not random; `samples` names them."""
        accuracy = score.accuracy
        if accuracy is None:
            what = "samples" if real else "random inputs"
            return False, (
                f"not verified on labels: {score.likeness} some {what}{_by_output(score)}; "
                f"export with {score.wanted} to let it serve"
            )
        samples = samples if accuracy.metric == TOP_1 else "samples"
        points = accuracy.loss_points
        change = f"loses {points:.2f}" if points >= 0 else f"gains {-points:.2f}"
        loss = f"{change} points of {accuracy.metric} on {accuracy.images} {samples}"
        if accuracy.loss_points > self.budget_points:
            return False, f"{loss}, over the budget of {self.budget_points:g}"
        if accuracy.is_proved:
            return True, f"{loss}{accuracy.bound_in_words}, within the budget of {self.budget_points:g}"
        unproved = f"a budget of {self.budget_points:g} is not proved with {accuracy.images} {samples}"
        doubt = f"{loss}{accuracy.bound_in_words}; {unproved}"
        return not self.strict, f"{doubt}, and --strict-gate wants it proved" if self.strict else doubt


def _by_output(score: Score) -> str:
    """The error of each output, if there are several."""
    if len(score.output_errors) < 2:
        return ""
    each = ", ".join(f"{100 * error:.2g} % in {name}" for name, error in score.output_errors.items())
    return f" (off by at most {each})"
