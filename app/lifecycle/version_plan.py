"""Which versions of a model to load: a pure decision over what is on disk and what is loaded.

No clock, no disk, no await. The caller asks for the next step, takes it, records the result, and asks again until there
is none. The rules:

    1. A wanted version that is not loaded is loaded, the highest first. A refused version is not tried again before its
       files change.
    2. A version whose files changed is loaded again. Until that succeeds, and also if it is refused, the loaded one
       keeps serving.
    3. A version that is no longer wanted is unloaded only after everything wanted is loaded, and never while it is all
       that serves and something on disk may still replace it. If versions are wanted by number, none that is still on
       disk is unloaded before each existing wanted version serves; if none of them exists, none is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from convoy.models.version_policy import Latest, Policy, allows

# Changes when the files of a version change; only compared.
Stamp = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class VersionFiles:
    """One version on disk. `is_complete` means that nothing seems to be writing or removing it right now.

    A single look knows this only for a bundle, whose manifest is written last; `settle` finds it out for others.
    `trouble` says why the version cannot be loaded, if that is known without trying.
    """

    stamp: Stamp
    is_complete: bool
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """The result for one version: the stamp that is loaded, and the one that was refused last.

    `may_come` means that it was refused only because it could not be fetched. `reason` says why it was refused or is
    not loaded. `is_loading` means that it is loading for the first time.
    """

    loaded: Stamp | None = None
    refused: Stamp | None = None
    may_come: bool = False
    reason: str = ""
    is_loading: bool = False

    def forgiven(self) -> VersionRecord:
        """The record for another try, without what is known against the files."""
        return VersionRecord(self.loaded, reason=self.reason)


# What to do, and with which version.
Step = tuple[Literal["load", "unload"], int]


def settle(before: Mapping[int, VersionFiles] | None, now: Mapping[int, VersionFiles]) -> dict[int, VersionFiles]:
    """Combine two consecutive looks at a model's folder.

    A bare model counts as complete if it has not changed between two looks, a version as removed if two looks have
    missed it, because tools copy and swap folders in steps. Without an earlier look, everything counts as complete.
    """
    past = now if before is None else before
    found = {version: VersionFiles(one.stamp, is_complete=False) for version, one in past.items()}
    for version, one in now.items():
        is_unchanged = version in past and past[version].stamp == one.stamp
        found[version] = replace(one, is_complete=one.is_complete or is_unchanged)
    return found


def next_step(found: Mapping[int, VersionFiles], known: Mapping[int, VersionRecord], policy: Policy) -> Step | None:
    """The next thing to do for one model; None if everything is as wanted."""

    def can_serve(version: int) -> bool:
        """Whether it serves, or may serve after loading."""
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
