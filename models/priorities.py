"""The priority levels of a model's requests."""

from __future__ import annotations

from dataclasses import dataclass

from convoy.models.errors import BundleError


@dataclass(frozen=True, slots=True)
class Priorities:
    """How many levels a model has, with 1 the most urgent, and the level of requests without a priority.

    By default there is one level above the ordinary one and one below it.
    """

    levels: int = 3
    default: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.default <= self.levels:
            raise BundleError(
                f"the default priority level must be from 1 to the number of levels, {self.levels}; got {self.default}"
            )


ORDINARY_PRIORITIES = Priorities()
