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

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from convoy.models.version_policy import Latest, Policy, allows

# Changes when the files of a version change; compared, never looked into.
Stamp = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Seen:
    """One version as one look at the disk found it. `is_sealed`: something that is written last is there.

    `trouble`: why it could not be looked at, if it could not; the stamp is then of that.
    """

    stamp: Stamp
    is_sealed: bool
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class VersionOnDisk:
    """One version on disk. `is_complete`: nothing seems to be writing or removing it just now.

    `trouble`: why it cannot be loaded as it is, which is known without trying.
    """

    version: int
    stamp: Stamp
    is_complete: bool
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """What became of one version: the stamp that is loaded, and the one that was refused last.

    `may_come`: it was refused only because the store did not give it.
    """

    loaded: Stamp | None = None
    refused: Stamp | None = None
    may_come: bool = False

    def forgiven(self) -> VersionRecord:
        """The record as if nothing had been refused, for another try."""
        return VersionRecord(self.loaded)


@dataclass(frozen=True, slots=True)
class Load:
    version: int


@dataclass(frozen=True, slots=True)
class Unload:
    version: int


def settle(before: Mapping[int, Seen] | None, now: Mapping[int, Seen]) -> tuple[VersionOnDisk, ...]:
    """Two looks at a model's folder, one after the other, as one picture, highest version first.

    A bare model counts as complete once it has not changed between two looks, a version as removed once two
    looks have missed it: what copies or swaps folders does so in steps. Without a look before, what is there
    counts as complete.
    """
    past = now if before is None else before

    def is_complete(version: int, seen: Seen) -> bool:
        return seen.is_sealed or (version in past and past[version].stamp == seen.stamp)

    found = [VersionOnDisk(number, one.stamp, is_complete(number, one), one.trouble) for number, one in now.items()]
    found += [VersionOnDisk(number, one.stamp, False) for number, one in past.items() if number not in now]
    return tuple(sorted(found, key=lambda one: -one.version))


def next_step(
    found: Collection[VersionOnDisk], known: Mapping[int, VersionRecord], policy: Policy
) -> Load | Unload | None:
    """The next thing to do for one model; None when all is as it should be."""
    in_order = sorted(found, key=lambda one: -one.version)
    allowed = [one for one in in_order if allows(policy, one.version)]
    wanted = [one for one in allowed if _can_serve(one, known.get(one.version))]
    if isinstance(policy, Latest):
        wanted = wanted[: policy.count]
    for one in wanted:
        own = known.get(one.version)
        if one.is_complete and (own is None or one.stamp not in (own.loaded, own.refused)):
            return Load(one.version)
    numbers, on_disk = {one.version for one in wanted}, {one.version for one in found}
    surplus = sorted(version for version, own in known.items() if own.loaded is not None and version not in numbers)
    if allowed and not wanted:
        return None
    if not allowed or (isinstance(policy, tuple) and len(wanted) < len(allowed)):
        surplus = [version for version in surplus if version not in on_disk]
    return Unload(surplus[0]) if surplus else None


def _can_serve(one: VersionOnDisk, known: VersionRecord | None) -> bool:
    """Whether it serves, or may after loading it."""
    if known is not None and known.loaded is not None:
        return True
    return one.is_complete and (known is None or known.refused != one.stamp)
