"""Files that cannot be made, checked or measured, each with its reason. The others go on without them.

Whatever a library raises about one file says nothing of the rest, so every exception counts, memory that ran out
included. An interrupt ends all, and so does a disk that takes no more: the bundle would not fit either. Knows no step
of making.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from convoy.export.sources.torch_job import one_line
from convoy.export.variants.precision import Recipe
from convoy.models.errors import ConvoyError

_Result = TypeVar("_Result")


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
