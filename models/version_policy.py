"""Which versions of a model are wanted. Knows no store; what is loaded for it is decided elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Latest:
    """So many of the highest versions that are sound."""

    count: int = 1


LATEST = Latest()
# Or all of them, or these numbers.
Policy = Latest | Literal["all"] | tuple[int, ...]


def allows(policy: Policy, version: int) -> bool:
    """Whether a version may be served; of the latest, every one may."""
    return not isinstance(policy, tuple) or version in policy
