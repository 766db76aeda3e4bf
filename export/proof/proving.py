"""Every variant made, held against the labels, and made again with more layers kept where it fell short.

Knows the loop between making and measuring. Each further look that a variant takes at the evaluation images is
paid for with a wider bound (`Outcomes.accuracy`), and there are few of them: many would find a lucky file. A file that
cannot be made, checked or measured is left out with its reason (`LeftOut`), and the others go on without it.
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
from convoy.export.proof.gate import AccuracyGate
from convoy.export.proof.judging import Judge
from convoy.export.proof.verify import Score, compare, measure_accuracy
from convoy.export.sources.torch_job import one_line
from convoy.export.variants.making import Made, Maker
from convoy.export.variants.precision import REFERENCE, Recipe
from convoy.export.variants.variant import opened
from convoy.models.errors import ConvoyError
from convoy.models.spec import ModelSpec
from convoy.models.store import disk_errors

_Result = TypeVar("_Result")


# Files that cannot be made, checked or measured, each with its reason. The others go on without them. Whatever a
# library raises about one file says nothing of the rest, so every exception counts, memory that ran out included. An
# interrupt ends all, and so does a disk that takes no more: the bundle would not fit either.


def in_words(reasons: Mapping[str, str]) -> str:
    """Reasons by file, in one line; files of one reason together. Empty where there are none."""
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
        """Note the recipe's file where the block raises any exception, and go on behind it."""
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
        """What `work` gives for all recipes, or for those that it does not fail for; and which these are.

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
        except Exception as error:  # each does by itself, and all together do not, as where memory is short
            if _is_of_the_disk(error):
                raise
            self.reasons |= {recipe.file: reason for recipe in left[1:]}
            return [reference], alone


def _is_of_the_disk(error: Exception) -> bool:
    """Whether it is, or was made of, what the system says of a disk that is full or takes nothing."""
    refused = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
    return any(isinstance(one, OSError) and one.errno in refused for one in (error, error.__cause__))


def _reason(error: Exception) -> str:
    if isinstance(error, ConvoyError):
        return str(error)
    if isinstance(error, MemoryError):
        return "there was not enough memory for it"
    words = one_line(str(error))
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


_MOST_LOOKS = 3

Proved = tuple[Made, Score]


@dataclass(frozen=True, slots=True)
class Prover:
    """Scores the variants that lie in `folder`; by the judge of the task, unless there is another."""

    spec: ModelSpec
    folder: Path
    data: ExportData
    gate: AccuracyGate
    progress: Progress
    cache: StepCache
    judge: Judge | None = None

    def make_and_score(self, recipes: Sequence[Recipe], maker: Maker | None, left_out: LeftOut) -> list[Proved]:
        """The files of all recipes with their scores; `maker` is None where only fp32 is wanted.

        What cannot be made or scored is `left_out`. Raises JobError when the images cannot be read.
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
        """Tried again where it lost too much; what is given back, and lies in the folder, is the best of it."""
        best, tried = (made, score), made
        for looks in range(2, _MOST_LOOKS + 1):
            if not self._loses_too_much(score):
                break
            kept = self._set_aside(best[0])
            # The calibration images promised more than they kept, so they are believed less each time.
            again = maker.retry(tried, caution=float(looks - 1))
            if again is None:
                break
            tried, (_, score) = again, self._scores([REFERENCE, made.recipe], looks)
            if _lost_points(score) < _lost_points(best[1]):
                best = tried, score
            else:
                kept.replace(self.folder / made.recipe.file)
        drift = ""
        if self._loses_too_much(best[1]) and made.recipe.has_eight_bits and self.data.evaluation is not None:
            drift = maker.drift(self.data.evaluation)
        return replace(best[0], trade_offs=maker.trail(made.recipe), drift=drift), best[1]

    def _loses_too_much(self, score: Score) -> bool:
        return score.accuracy is not None and score.accuracy.loss_points > self.gate.budget_points

    def _set_aside(self, made: Made) -> Path:
        aside = self.folder / f"best-{made.recipe.file}"
        with disk_errors(self.folder):
            shutil.copyfile(self.folder / made.recipe.file, aside)
        return aside

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
