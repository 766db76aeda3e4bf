"""The names, numbers and states of versions, as clients are told of them. Knows nothing of what serves them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from convoy.models.version_policy import Policy


class ModelState(Enum):
    """The protocol's words for how far a version is."""

    LOADING = "LOADING"
    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"
    UNLOADING = "UNLOADING"


# In the place of a version: the model's folder itself, whose versions nobody can see.
WHOLE_MODEL = 0


@dataclass(frozen=True, slots=True)
class Listing:
    """One line of the repository's index; `version` may be WHOLE_MODEL."""

    name: str
    version: int
    state: ModelState
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Override:
    """What a request to load says in the place of configuration; None: as it is without."""

    max_batch_size: int | None = None
    versions: Policy | None = None
