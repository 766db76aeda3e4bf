"""The names and numbers that clients may ask for, and what they are told about the others.

Knows names, versions and states. Knows nothing of what serves them, so that it can be asked in any process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from convoy.app.outcomes import Refusal
from convoy.models.errors import NotFound, Unavailable
from convoy.models.version_policy import Policy

Version = TypeVar("Version")


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


def choose(
    versions: Mapping[int, Version],
    others: Iterable[Listing],
    name: str,
    version: int | None,
    *,
    is_complete: bool,
) -> Version:
    """The version asked for, or the highest, of the `versions` of a model that are served.

    `others` are the versions, of any model, that are not. `is_complete`: what is in neither is not there; before the
    initial load has ended, it may still come. Raises NotFound or Unavailable.
    """
    if versions:
        found = versions.get(version) if version is not None else versions[max(versions)]
        if found is not None:
            return found
    # The beginnings of these sentences are Triton's: clients compare them.
    known = [listing for listing in others if listing.name == name]
    asked = f"'{name}'" if version is None else f"'{name}' version {version}"
    for listing in known:
        if listing.state is ModelState.LOADING and version in (None, listing.version):
            sentence = f"Request for unknown model: {asked} is not at ready state; it is loading"
            raise Unavailable(sentence, reason=Refusal.NOT_READY)
    if known and not versions and version is None:
        raise NotFound(f"Request for unknown model: '{name}' has no available versions ({known[-1].reason})")
    unknown = f"Request for unknown model: {asked} is not found"
    if not is_complete:
        raise Unavailable(f"{unknown}, yet: the models are being loaded", reason=Refusal.NOT_READY)
    raise NotFound(f"{unknown}; POST /v2/repository/index lists what is served")
