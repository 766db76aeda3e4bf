"""The plan of model control: every rule by itself, and what must hold whatever happens to a store."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.app.lifecycle.version_plan import Step, VersionFiles, VersionRecord, next_step, settle
from convoy.models.version_policy import Latest, Policy, allows

A, B, C = ("a",), ("b",), ("c",)


def found(*versions: int, stamp: tuple[str] = A, is_complete: bool = True) -> dict[int, VersionFiles]:
    return {version: VersionFiles(stamp, is_complete) for version in versions}


def known(*loaded: int, refused: tuple[int, ...] = ()) -> dict[int, VersionRecord]:
    own = {version: VersionRecord(loaded=A) for version in loaded}
    return own | {version: VersionRecord(refused=A) for version in refused}


CHANGED_BEFORE = {1: VersionRecord(loaded=A, refused=B)}


@pytest.mark.parametrize(
    ("on_disk", "own", "policy", "step"),
    [
        # The highest first, and then the others go.
        (found(1, 2, 3), {}, Latest(), ("load", 3)),
        (found(1, 2, 3), known(2), Latest(), ("load", 3)),
        (found(1, 2, 3), known(2, 3), Latest(), ("unload", 2)),
        (found(1, 2, 3), known(3), Latest(), None),
        # Down past what was refused.
        (found(1, 2, 3), known(refused=(3,)), Latest(), ("load", 2)),
        (found(1, 2, 3), known(2, refused=(3,)), Latest(), None),
        (found(1), known(refused=(1,)), Latest(), None),
        # All, a list, and several of the latest.
        (found(1, 2), known(2), "all", ("load", 1)),
        (found(1, 2), known(1, 2), "all", None),
        (found(1, 2, 3), {}, (1, 2), ("load", 2)),
        (found(1, 2, 3), known(1, 2), (1, 2), None),
        (found(3), known(1), (1, 2), ("unload", 1)),
        (found(1, 2, 3), known(1), Latest(2), ("load", 3)),
        (found(1, 2, 3), known(1, 2, 3), Latest(2), ("unload", 1)),
        # Numbers that are not there or are broken take nothing away that is there.
        (found(1, 2), known(2), (7,), None),
        (found(1), known(1, 2), (7,), ("unload", 2)),
        (found(1, 2, 3), known(1, 2, refused=(3,)), (2, 3), None),
        (found(2, 3), known(1, 2, refused=(3,)), (2, 3), ("unload", 1)),
        (found(1, 2, 3), known(1, 2, 3), (2, 3), ("unload", 1)),
        # Where the newest is removed, the one before is loaded first.
        (found(1), known(2), Latest(), ("load", 1)),
        (found(1), known(1, 2), Latest(), ("unload", 2)),
        # The only one that serves stays while the disk may still replace it.
        (found(1), known(2, refused=(1,)), Latest(), None),
        (found(1, is_complete=False), known(2), Latest(), None),
        ({}, known(2), Latest(), ("unload", 2)),
        # Changed files are loaded again once, and what was refused only after a change.
        (found(1, stamp=B), known(1), Latest(), ("load", 1)),
        (found(1, stamp=B), CHANGED_BEFORE, Latest(), None),
        (found(1, stamp=C), CHANGED_BEFORE, Latest(), ("load", 1)),
        (found(1, stamp=B, is_complete=False), known(1), Latest(), None),
    ],
)
def test_the_next_step(
    on_disk: dict[int, VersionFiles], own: dict[int, VersionRecord], policy: Policy, step: Step | None
) -> None:
    assert next_step(on_disk, own, policy) == step


BARE, OTHER, SEALED = VersionFiles(A, False), VersionFiles(B, False), VersionFiles(A, True)


@pytest.mark.parametrize(
    ("before", "now", "is_complete"),
    [
        (None, {1: BARE}, True),
        ({}, {1: BARE}, False),
        ({1: BARE}, {1: BARE}, True),
        ({1: OTHER}, {1: BARE}, False),
        ({}, {1: SEALED}, True),
        ({1: BARE}, {}, False),  # missed once is not yet removed
    ],
)
def test_two_looks_settle_what_is_being_written_and_what_is_gone(
    before: dict[int, VersionFiles] | None, now: dict[int, VersionFiles], is_complete: bool
) -> None:
    assert settle(before, now) == {1: VersionFiles(A, is_complete)}


STAMPS = st.sampled_from([A, B])
DISK = st.dictionaries(st.integers(1, 4), st.builds(VersionFiles, STAMPS, st.booleans()), max_size=4)
POLICIES: st.SearchStrategy[Policy] = st.one_of(
    st.sampled_from([Latest(), Latest(2), "all"]),
    st.lists(st.integers(1, 4), min_size=1, max_size=3, unique=True).map(tuple),
)


@given(st.lists(DISK, min_size=1, max_size=5), POLICIES, st.data())
def test_whatever_becomes_of_a_store_the_model_serves_on_and_the_plan_ends(
    disks: list[dict[int, VersionFiles]], policy: Policy, data: st.DataObject
) -> None:
    own: dict[int, VersionRecord] = {}
    for disk in disks:
        attempts: set[int] = set()
        steps = 0
        while (step := next_step(disk, own, policy)) is not None:
            steps += 1
            assert steps <= 16, "the plan comes to an end"
            action, version = step
            before = own.get(version, VersionRecord())
            if action == "load":
                assert disk[version].is_complete, "nothing is loaded that may still be written"
                assert version not in attempts, "nothing is tried twice"
                assert allows(policy, version)
                attempts.add(version)
                stamp = disk[version].stamp
                assert before.refused != stamp
                is_sound = data.draw(st.booleans())
                own[version] = (
                    VersionRecord(loaded=stamp) if is_sound else replace(before, refused=stamp)
                )  # fmt: skip
            else:
                assert before.loaded is not None
                serving = {version for version, one in own.items() if one.loaded is not None}
                allowed = [v for v in disk if allows(policy, v)]
                assert serving - {version} or not allowed, "the last one goes only with the model"
                assert allowed or version not in disk, "a policy that nothing meets takes nothing away"
                del own[version]
        serving = {version for version, one in own.items() if one.loaded is not None}
        if isinstance(policy, Latest):
            assert len(serving & set(disk)) <= policy.count
            sound = serving & set(disk)
            newer = [v for v, one in disk.items() if one.is_complete and v > max(serving, default=0)]
            assert all(own[v].refused == disk[v].stamp for v in newer), "nothing newer is left untried"
            assert not sound or serving == sound
