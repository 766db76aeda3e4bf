"""Which versions of a model should be loaded: a pure decision over what is on disk and what is loaded.

No clock, no disk, no await. The caller asks for the next step, takes it, records the result, and asks
again until there is none. The rules:
 1. A version that is wanted and not loaded is loaded, the highest first; one that was refused is not tried
    again before its files change.
 2. A version whose files changed is loaded again. Until that succeeds what was loaded goes on serving; when it
    is refused, too.
 3. A version that is no longer wanted goes only after everything wanted is loaded, and never while it is all
    that serves and something on disk may still replace it. Where versions are wanted by number, none that is
    still on disk goes before each of them serves that is there; where none of them is there, none goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from convoy.models.version_policy import Latest, Policy, allows

# Changes when the files of a version change; compared, never looked into.
Stamp = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class VersionFiles:
    """One version on disk. `is_complete`: nothing seems to be writing or removing it just now.

    A single look knows this only of a bundle, whose manifest is written last; `settle` finds it out for the others.
    `trouble`: why the version cannot be loaded as it is, which is known without trying.
    """

    stamp: Stamp
    is_complete: bool
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """What became of one version: the stamp that is loaded, and the one that was refused last.

    `may_come`: it was refused only because the store did not give it. `reason`: why it was refused, or is not loaded.
    `is_loading`: it is loaded for the first time.
    """

    loaded: Stamp | None = None
    refused: Stamp | None = None
    may_come: bool = False
    reason: str = ""
    is_loading: bool = False

    def forgiven(self) -> VersionRecord:
        """The record for another try: nothing is known any more against the files."""
        return VersionRecord(self.loaded, reason=self.reason)


# What to do, and with which version.
Step = tuple[Literal["load", "unload"], int]


def settle(before: Mapping[int, VersionFiles] | None, now: Mapping[int, VersionFiles]) -> dict[int, VersionFiles]:
    """Two looks at a model's folder, one after the other, as one picture.

    A bare model counts as complete once it has not changed between two looks, a version as removed once two
    looks have missed it: what copies or swaps folders does so in steps. Without a look before, what is there
    counts as complete.
    """
    past = now if before is None else before
    found = {version: VersionFiles(one.stamp, is_complete=False) for version, one in past.items()}
    for version, one in now.items():
        is_unchanged = version in past and past[version].stamp == one.stamp
        found[version] = replace(one, is_complete=one.is_complete or is_unchanged)
    return found


def next_step(found: Mapping[int, VersionFiles], known: Mapping[int, VersionRecord], policy: Policy) -> Step | None:
    """The next thing to do for one model; None when all is as it should be."""

    def can_serve(version: int) -> bool:
        """Whether it serves, or may after loading it."""
        one, own = found[version], known.get(version, VersionRecord())
        return own.loaded is not None or (one.is_complete and own.refused != one.stamp)

    allowed = [version for version in sorted(found, reverse=True) if allows(policy, version)]
    wanted = [version for version in allowed if can_serve(version)]
    if isinstance(policy, Latest):
        wanted = wanted[: policy.count]
    for version in wanted:
        one, own = found[version], known.get(version, VersionRecord())
        if one.is_complete and one.stamp not in (own.loaded, own.refused):
            return "load", version
    surplus = sorted(version for version, own in known.items() if own.loaded is not None and version not in wanted)
    if allowed and not wanted:
        return None
    if not allowed or (isinstance(policy, tuple) and len(wanted) < len(allowed)):
        surplus = [version for version in surplus if version not in found]
    return ("unload", surplus[0]) if surplus else None
