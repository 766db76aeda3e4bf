"""The plan of model control: every rule by itself, and what must hold whatever happens to a store."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from convoy.app.lifecycle.version_plan import Load, Seen, Unload, VersionOnDisk, VersionRecord, next_step, settle
from convoy.models.version_policy import Latest, Policy, allows

A, B, C = ("a",), ("b",), ("c",)


def found(*versions: int, stamp: tuple[str] = A, is_complete: bool = True) -> list[VersionOnDisk]:
    return [VersionOnDisk(version, stamp, is_complete) for version in versions]


def known(*loaded: int, refused: tuple[int, ...] = ()) -> dict[int, VersionRecord]:
    own = {version: VersionRecord(loaded=A) for version in loaded}
    return own | {version: VersionRecord(refused=A) for version in refused}


def test_latest_loads_the_highest_and_then_lets_the_others_go() -> None:
    assert next_step(found(1, 2, 3), {}, Latest()) == Load(3)
    assert next_step(found(1, 2, 3), known(2), Latest()) == Load(3)
    assert next_step(found(1, 2, 3), known(2, 3), Latest()) == Unload(2)
    assert next_step(found(1, 2, 3), known(3), Latest()) is None


def test_latest_goes_down_past_what_was_refused() -> None:
    assert next_step(found(1, 2, 3), known(refused=(3,)), Latest()) == Load(2)
    assert next_step(found(1, 2, 3), known(2, refused=(3,)), Latest()) is None
    assert next_step(found(1), known(refused=(1,)), Latest()) is None


def test_all_loads_everything_and_a_list_loads_only_its_own() -> None:
    assert next_step(found(1, 2), known(2), "all") == Load(1)
    assert next_step(found(1, 2), known(1, 2), "all") is None
    assert next_step(found(1, 2, 3), {}, (1, 2)) == Load(2)
    assert next_step(found(1, 2, 3), known(1, 2), (1, 2)) is None
    assert next_step(found(3), known(1), (1, 2)) == Unload(1)
    assert next_step(found(1, 2, 3), known(1), Latest(2)) == Load(3)
    assert next_step(found(1, 2, 3), known(1, 2, 3), Latest(2)) == Unload(1)


def test_numbers_that_are_not_there_or_are_broken_take_nothing_away_that_is_there() -> None:
    assert next_step(found(1, 2), known(2), (7,)) is None
    assert next_step(found(1), known(1, 2), (7,)) == Unload(2)
    assert next_step(found(1, 2, 3), known(1, 2, refused=(3,)), (2, 3)) is None
    assert next_step(found(2, 3), known(1, 2, refused=(3,)), (2, 3)) == Unload(1)
    assert next_step(found(1, 2, 3), known(1, 2, 3), (2, 3)) == Unload(1)


def test_removing_the_newest_loads_the_one_before_first() -> None:
    assert next_step(found(1), known(2), Latest()) == Load(1)
    assert next_step(found(1), known(1, 2), Latest()) == Unload(2)


def test_the_only_one_that_serves_stays_while_the_disk_may_still_replace_it() -> None:
    assert next_step(found(1), known(2, refused=(1,)), Latest()) is None
    assert next_step(found(1, is_complete=False), known(2), Latest()) is None
    assert next_step([], known(2), Latest()) == Unload(2)


def test_changed_files_are_loaded_again_once_and_what_was_refused_only_after_a_change() -> None:
    assert next_step(found(1, stamp=B), known(1), Latest()) == Load(1)
    assert next_step(found(1, stamp=B), {1: VersionRecord(loaded=A, refused=B)}, Latest()) is None
    assert next_step(found(1, stamp=C), {1: VersionRecord(loaded=A, refused=B)}, Latest()) == Load(1)
    assert next_step(found(1, stamp=B, is_complete=False), known(1), Latest()) is None


def test_two_looks_settle_what_is_being_written_and_what_is_gone() -> None:
    bare, other, sealed = Seen(A, is_sealed=False), Seen(B, is_sealed=False), Seen(A, is_sealed=True)
    assert settle(None, {1: bare}) == (VersionOnDisk(1, A, True),)
    assert settle({}, {1: bare}) == (VersionOnDisk(1, A, False),)
    assert settle({1: bare}, {1: bare}) == (VersionOnDisk(1, A, True),)
    assert settle({1: other}, {1: bare}) == (VersionOnDisk(1, A, False),)
    assert settle({}, {1: sealed}) == (VersionOnDisk(1, A, True),)
    assert settle({1: bare}, {}) == (VersionOnDisk(1, A, False),), "missed once is not yet removed"
    assert settle({}, {}) == ()


STAMPS = st.sampled_from([A, B])
DISK = st.dictionaries(st.integers(1, 4), st.builds(VersionOnDisk, st.just(0), STAMPS, st.booleans()), max_size=4).map(
    lambda versions: [replace(one, version=version) for version, one in versions.items()]
)
POLICIES: st.SearchStrategy[Policy] = st.one_of(
    st.sampled_from([Latest(), Latest(2), "all"]),
    st.lists(st.integers(1, 4), min_size=1, max_size=3, unique=True).map(tuple),
)


@given(st.lists(DISK, min_size=1, max_size=5), POLICIES, st.data())
def test_whatever_becomes_of_a_store_the_model_serves_on_and_the_plan_ends(
    disks: list[list[VersionOnDisk]], policy: Policy, data: st.DataObject
) -> None:
    own: dict[int, VersionRecord] = {}
    for disk in disks:
        on_disk = {one.version: one for one in disk}
        attempts: set[int] = set()
        steps = 0
        while (step := next_step(disk, own, policy)) is not None:
            steps += 1
            assert steps <= 16, "the plan comes to an end"
            before = own.get(step.version, VersionRecord())
            if isinstance(step, Load):
                assert on_disk[step.version].is_complete, "nothing is loaded that may still be written"
                assert step.version not in attempts, "nothing is tried twice"
                assert allows(policy, step.version)
                attempts.add(step.version)
                stamp = on_disk[step.version].stamp
                assert before.refused != stamp
                is_sound = data.draw(st.booleans())
                own[step.version] = (
                    VersionRecord(loaded=stamp) if is_sound else replace(before, refused=stamp)
                )  # fmt: skip
            else:
                assert before.loaded is not None
                serving = {version for version, one in own.items() if one.loaded is not None}
                allowed = [v for v in on_disk if allows(policy, v)]
                assert serving - {step.version} or not allowed, "the last one goes only with the model"
                assert allowed or step.version not in on_disk, "a policy that nothing meets takes nothing away"
                del own[step.version]
        serving = {version for version, one in own.items() if one.loaded is not None}
        if isinstance(policy, Latest):
            assert len(serving & set(on_disk)) <= policy.count
            sound = [one.version for one in disk if one.version in serving]
            newer = [one for one in disk if one.is_complete and one.version > max(serving, default=0)]
            assert all(own[one.version].refused == one.stamp for one in newer), "nothing newer is left untried"
            assert not sound or serving == set(sound)
