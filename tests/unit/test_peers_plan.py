"""The order of a comparison, and which setting counts as a peer's best."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from convoy.loadtest.peers.campaign import Entrant
from convoy.loadtest.peers.contender import Contender
from convoy.loadtest.peers.definition import find_peers
from convoy.loadtest.peers.plan import LOADS, Tryout, best_setting, duels, tryouts
from convoy.loadtest.peers.results import ClosedLoad, Reading, Setting, SweepTrial
from convoy.loadtest.peers.server import Launch

ONE, MANY = ClosedLoad("binary", 1), ClosedLoad("binary", 16)
OFF, EIGHT, SIXTEEN = Setting(1, 0.0), Setting(8, 1.0), Setting(16, 1.0)

contenders = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(LOADS)), unique=True, max_size=8)


def reading(rps: float, p50_ms: float = 1.0, failed: int = 0) -> Reading:
    return Reading(1.0, int(rps), failed, p50_ms, p50_ms, 10.0, 1.0)


def trial(load: ClosedLoad, setting: Setting, made: Reading, peer: str = "a") -> SweepTrial:
    return SweepTrial(peer, load, setting, made)


@given(contenders, st.integers(1, 7), st.integers(1, 4), st.integers(0, 100))
def test_every_contender_has_all_its_rounds_and_as_many_starts_as_any_other(
    pairs: list[tuple[str, ClosedLoad]], rounds: int, per_start: int, seed: int
) -> None:
    planned = duels(pairs, rounds, per_start, seed)
    assert [duel.round for duel in planned] == [first for first in range(0, rounds, per_start) for _ in pairs]
    for one in pairs:
        own = [duel for duel in planned if (duel.peer, duel.load) == one]
        turns = [duel.round + turn for duel in own for turn in range(len(duel.ours_first))]
        assert turns == list(range(rounds))


@given(contenders, st.integers(0, 100))
def test_the_seed_decides_the_order(pairs: list[tuple[str, ClosedLoad]], seed: int) -> None:
    assert duels(pairs, 3, 2, seed) == duels(pairs, 3, 2, seed)


def test_rounds_differ_in_order_and_both_sides_begin_now_and_then() -> None:
    planned = duels([(peer, load) for peer in "abc" for load in LOADS], 5, 1, 0)
    orders = {tuple((duel.peer, duel.load) for duel in planned if duel.round == turn) for turn in range(5)}
    assert len(orders) == 5
    assert {duel.ours_first for duel in planned} == {(True,), (False,)}


@given(st.integers(1, 4), st.integers(0, 100))
def test_every_start_is_tried_in_every_round_under_all_its_loads(rounds: int, seed: int) -> None:
    starts = [Tryout("a", OFF, (ONE, MANY)), Tryout("a", EIGHT, (ONE, MANY)), Tryout("b", OFF, (ONE,))]
    planned = tryouts(starts, rounds, seed)
    assert Counter((one.peer, one.setting) for one in planned) == Counter(
        [(one.peer, one.setting) for one in starts] * rounds
    )
    assert all(set(one.loads) == ({ONE, MANY} if one.peer == "a" else {ONE}) for one in planned)


def test_who_decodes_is_a_setting_only_where_pictures_are_sent() -> None:
    settings = (OFF, Setting(1, 0.0, 2))
    png, jpeg = ClosedLoad("png", 1), ClosedLoad("jpeg340", 16)
    (mosec,) = find_peers(["mosec"], None)
    contender = Contender("a", "A", mosec.routes, lambda *_: Launch((), {}, 1.0))
    # One start serves one network.
    assert Counter(Entrant(contender, settings, (png, MANY, jpeg, ONE)).starts) == Counter(
        [
            Tryout("a", OFF, (MANY, ONE)),
            *(Tryout("a", setting, loads) for setting in settings for loads in ((png,), (jpeg,))),
        ]
    )


def test_the_best_setting_is_the_quickest_for_one_connection_and_the_fullest_for_many() -> None:
    trials = [
        trial(ONE, OFF, reading(4000, p50_ms=0.25)),
        trial(ONE, EIGHT, reading(4100, p50_ms=2.5)),
        trial(MANY, OFF, reading(4000, p50_ms=3.0)),
        trial(MANY, EIGHT, reading(13000, p50_ms=9.0)),
        trial(MANY, SIXTEEN, reading(99000), peer="b"),
    ]
    assert best_setting(trials, "a", ONE) == OFF
    assert best_setting(trials, "a", MANY) == EIGHT
    assert best_setting(trials, "b", MANY) == SIXTEEN


def test_one_lucky_trial_does_not_make_a_setting_the_best() -> None:
    lucky = [trial(MANY, EIGHT, reading(rps)) for rps in (100, 100, 900)]
    steady = [trial(MANY, SIXTEEN, reading(rps)) for rps in (200, 200, 200)]
    assert best_setting([*lucky, *steady], "a", MANY) == SIXTEEN


def test_a_setting_under_which_requests_failed_is_out() -> None:
    trials = [
        trial(MANY, EIGHT, reading(900)),
        trial(MANY, EIGHT, reading(900, failed=1)),
        trial(MANY, OFF, reading(100)),
    ]
    assert best_setting(trials, "a", MANY) == OFF
    assert best_setting(trials[:2], "a", MANY) is None
    assert best_setting(trials, "a", ONE) is None
