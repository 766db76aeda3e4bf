"""The levels of urgency that a model's requests may have. Knows nothing of how they are kept."""

from __future__ import annotations

from dataclasses import dataclass

from convoy.models.errors import BundleError


@dataclass(frozen=True, slots=True)
class Priorities:
    """Into how many levels a model's requests fall, 1 the most urgent, and where those belong that name none of them.

    Who says nothing of levels has one above the ordinary and one below it.
    """

    levels: int = 3
    default: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.default <= self.levels:
            raise BundleError(
                f"the default priority level must be from 1 to the number of levels, {self.levels}; got {self.default}"
            )


ORDINARY_PRIORITIES = Priorities()
