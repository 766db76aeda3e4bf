"""Which versions of a model to serve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Latest:
    """The highest valid versions, this many."""

    count: int = 1


LATEST = Latest()
# Or all versions, or these numbers.
Policy = Latest | Literal["all"] | tuple[int, ...]


def allows(policy: Policy, version: int) -> bool:
    """Whether a version may be served; with Latest, any may."""
    return not isinstance(policy, tuple) or version in policy
