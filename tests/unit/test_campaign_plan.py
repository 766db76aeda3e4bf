"""The campaign: a seed draws the same plan again, and every invariant is broken by what it is there to catch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.campaign import checks
from tests.campaign.asks import MODELS, Ask, Asked, Script, WrongAnswer
from tests.campaign.checks import Readiness, Window
from tests.campaign.clients import (
    BY_STATUS,
    KINDS,
    PARTLY,
    Client,
    Ending,
    Place,
    error_words,
    outcome_of_grpc,
    outcome_of_words,
)
from tests.campaign.plan import LEAST_PERIOD_S, SCENES, Period, draw_plan
from tests.campaign.server import READERS, ProcessState
from tests.support.wire import WireReply

GOOD = Ending("tensors", 7, "v2", "simple", "success", 10.0, 10.1)
KILL = Window("killed", 12.0, 15.0, excuses=True)
CHANGE = Window("shift 2 added", 12.0, 15.0, excuses=False)
BEFORE = ProcessState(5, 100 << 20, 30, 20)
SEEN = Counter({("v2", "simple", "success"): 5, ("v2", "simple", "left"): 1, ("grpc", "simple", "success"): 3})


def period(kind: str = "calm") -> Period:
    return Period(0, kind, 9.0, (), ())


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.1, 0.7, 5.0]))
def test_a_seed_draws_the_same_plan_whose_faults_do_not_overlap(seed: int, minutes: float) -> None:
    plan = draw_plan(seed, minutes)
    assert plan == draw_plan(seed, minutes)
    assert minutes < 5 or {one.kind for one in plan} == set(SCENES)
    settings = [one.setting for one in plan]
    assert sum(one != other for one, other in zip(settings[1:], settings, strict=False)) == len(set(settings)) - 1
    for one in plan:
        assert one.lasts_s >= LEAST_PERIOD_S
        assert {client.kind for client in one.clients} <= set(KINDS)
        ends_s = 0.5
        for fault in one.faults:
            assert fault.at_s >= ends_s
            ends_s = fault.at_s + fault.lasts_s
            assert ends_s < one.lasts_s


# Answers


def reply(ask: Ask, *, offset: int = 0) -> WireReply:
    """As the server would write it, with this added to its last value."""
    x = ask.inputs[0].values
    right = {"shift": {"y": x + 100}, "mean": {"y": x - np.mean(x, axis=0)}}.get(ask.model, {"y": x})
    if ask.model == "simple":
        right = {"OUTPUT0": x + ask.inputs[1].values, "OUTPUT1": x - ask.inputs[1].values}
    outputs, tail = list[dict[str, Any]](), b""
    for name, values in right.items():
        own = values.astype(x.dtype)
        own.reshape(-1)[-1] += offset
        said = {"name": name, "datatype": ask.inputs[0].dtype, "shape": list(own.shape)}
        data = {"parameters": {"binary_data_size": own.nbytes}} if ask.binary else {"data": own.reshape(-1).tolist()}
        outputs.append(said | data)
        tail += own.tobytes() if ask.binary else b""
    text = json.dumps({"model_name": ask.model, "model_version": "1", "id": ask.id, "outputs": outputs}).encode()
    return WireReply(200, {"inference-header-content-length": str(len(text))} if ask.binary else {}, text + tail)


@pytest.mark.parametrize("model", MODELS)
def test_a_right_answer_passes_and_any_other_does_not(model: str) -> None:
    asks = [Script(5).ask(number, models=(model,)) for number in range(40)]
    assert {ask.binary for ask in asks} == {True, False}
    for ask in asks:
        assert ask.request() == replace(ask).request()
        if ask.is_wrong:
            continue
        right = reply(ask)
        ask.check_reply(right.headers, right.body)
        other, wrong = replace(ask, id="another"), reply(ask, offset=1)
        for asked, answer, words in (
            (other, right, "asked"),
            (ask, wrong, "version 1 said"),
            (replace(ask, is_wrong=True), right, "cannot take"),
            (ask, replace(right, body=right.body + b"x"), "last output|no JSON"),
        ):
            with pytest.raises(WrongAnswer, match=words):
                asked.check_reply(answer.headers, answer.body)


def test_the_wrong_digit_is_a_wrong_answer() -> None:
    picture = next(one for number in range(9) if not (one := Script(1).picture(number)).is_wrong)
    picture.check({"predictions": [{"label": picture.label, "score": 0.99}]})
    for best in ({"label": "x", "score": 0.99}, {"label": picture.label, "score": 1.5}):
        with pytest.raises(WrongAnswer):
            picture.check({"predictions": [best]})


class Stub(Client):
    """Two requests a call, the first of them answered."""

    def __init__(self, error: Exception) -> None:
        super().__init__(Place(1, 2, lambda: 3.0), Script(1), "v2", lambda s, n: [s.ask(n), s.ask(n + 1), s.ask(n + 2)])
        self._error = error

    def outcomes(self, number: int, asked: Sequence[Asked]) -> Iterator[tuple[str, str]]:
        yield "success", ""
        raise self._error


@pytest.mark.parametrize(
    ("error", "how"),
    [(WrongAnswer("no"), "wrong"), (TimeoutError("no"), "hung"), (ConnectionResetError("no"), "broken")],
)
def test_each_request_has_one_ending_whatever_happens(error: Exception, how: str) -> None:
    assert [one.outcome for one in Stub(error).call("stub", 0)] == ["success", how, "broken"]


def test_what_libraries_say_has_its_outcome() -> None:
    assert [BY_STATUS.get(one) for one in (400, 404, 413, 429, 503, 504, 500)] == [
        *("invalid", "invalid", "invalid", "rejected", "failed", "deadline_exceeded", None),
    ]
    assert outcome_of_grpc("StatusCode.INTERNAL", "oh", 0.1) == "undocumented"
    assert outcome_of_grpc("StatusCode.UNAVAILABLE", "the server is shutting down", 0.1) == "failed"
    assert outcome_of_grpc("StatusCode.UNAVAILABLE", "Socket closed", 0.1) == "broken"
    assert outcome_of_grpc("StatusCode.DEADLINE_EXCEEDED", "", 25.0) == "hung"
    assert outcome_of_words("Exceeds maximum queue size: 64") == "rejected"
    assert outcome_of_words("'a' is not at ready state; it is loading") == "failed"
    assert outcome_of_words("unexpected shape for input 'x'") == "invalid"
    for body in (b"", b"oops", b"[]", b'{"detail": "x"}', b'{"error": ""}', b'{"error": 5}'):
        with pytest.raises(WrongAnswer):
            error_words(body)


@pytest.mark.parametrize(
    ("kind", "ending", "windows", "is_right"),
    [
        ("calm", GOOD, (), True),
        ("calm", replace(GOOD, outcome="invalid", asked_wrong=True), (), True),
        ("calm", replace(GOOD, outcome="invalid"), (), False),
        *(("calm", replace(GOOD, outcome=how), (), False) for how in ("wrong", "hung", "rejected", "failed", "broken")),
        *(("kill", replace(GOOD, outcome=how, sent_s=13), (KILL,), False) for how in ("wrong", "hung", "undocumented")),
        ("kill", replace(GOOD, outcome="broken", ended_s=12.5), (KILL,), True),
        ("kill", replace(GOOD, outcome="broken", sent_s=16, ended_s=17), (KILL,), False),
        ("store", replace(GOOD, outcome="failed", sent_s=13, ended_s=14), (CHANGE,), False),
        ("load", replace(GOOD, outcome="failed", model="shift"), (), True),
        ("load", replace(GOOD, outcome="invalid", model="shift"), (), True),
        ("overload", replace(GOOD, outcome="rejected"), (), True),
        ("overload", replace(GOOD, words=f"{PARTLY}full"), (), True),
        ("calm", replace(GOOD, words=f"{PARTLY}full"), (), False),
        ("calm", replace(GOOD, ended_s=50.0), (), False),
    ],
)
def test_an_ending_is_allowed_or_a_breach(
    kind: str, ending: Ending, windows: tuple[Window, ...], is_right: bool
) -> None:
    assert (checks.check_endings(period(kind), [ending], windows) == []) == is_right


# What the server says of itself


@pytest.mark.parametrize(
    ("kind", "counted", "is_right"),
    [
        ("calm", {}, True),
        ("calm", {("v2", "simple", "success"): -1}, False),
        ("calm", {("v2", "simple", "success"): 1}, True),  # it may be the one that left
        ("calm", {("v2", "simple", "success"): 2}, False),
        ("calm", {("grpc", "simple", "invalid"): 1}, False),
        ("kill", {("v2", "simple", "success"): -1}, True),
        ("store", {("v2", "shift", "success"): 1}, True),
    ],
)
def test_the_books_agree(kind: str, counted: dict[tuple[str, str, str], int], is_right: bool) -> None:
    server = Counter({cell: many for cell, many in SEEN.items() if cell[2] != "left"})
    server.update(counted)
    assert (checks.check_books(period(kind), SEEN, server) == []) == is_right


@pytest.mark.parametrize("reader", READERS)
def test_readers_of_one_ledger_agree(reader: str) -> None:
    told = Counter({(one, model): 9 for one in READERS for model in ("simple", "shift")})
    assert checks.check_readers(period(), told) == []
    assert checks.check_readers(period(), told + Counter({(reader, "simple"): 1}))
    assert checks.check_readers(period(), Counter({cell: 9 for cell in told if cell[0] != reader}))
    assert checks.check_readers(period("store"), told + Counter({(reader, "shift"): 1})) == []
    assert checks.check_readers(period("kill"), told + Counter({(reader, "simple"): 1})) == []


@pytest.mark.parametrize(
    ("held", "now", "words"),
    [
        (None, BEFORE, "not answered"),
        ((0, 0, 0), None, "not answered"),
        ((1, 0, 0), BEFORE, "1 samples wait"),
        ((0, 1, 0), BEFORE, "1 requests unfinished"),
        ((0, 0, 64), BEFORE, "64 bytes"),
        ((0, 0, 0), replace(BEFORE, descriptors=35), "35 descriptors"),
        ((0, 0, 0), replace(BEFORE, threads=29), "29 threads"),
    ],
)
def test_what_is_left_behind_is_a_breach(
    held: tuple[int, int, int] | None, now: ProcessState | None, words: str
) -> None:
    assert checks.check_rest((0, 0, 0), BEFORE, replace(BEFORE, descriptors=32, threads=25)) == []
    (line,) = checks.check_rest(held, BEFORE, now)
    assert words in line


def test_memory_that_grows_and_a_log_that_admits_a_bug_are_breaches() -> None:
    grown = replace(BEFORE, own_bytes=BEFORE.own_bytes + checks.MORE_OWN_BYTES)
    assert checks.check_memory(BEFORE, grown) == []
    assert checks.check_memory(BEFORE, replace(grown, own_bytes=grown.own_bytes + 1))
    assert checks.check_log("loaded digits version 1") == []
    for text in ("Traceback (most recent call last):", "POST / failed; this is a bug", "never retrieved"):
        assert checks.check_log(f"loaded digits version 1\n{text}\n")


@pytest.mark.parametrize(
    ("look", "window", "is_right"),
    [
        (Readiness(10.0, 10.1, True, "success"), KILL, True),
        (Readiness(13.0, 13.1, False), KILL, True),
        (Readiness(10.0, 10.1, True, "failed"), KILL, False),
        (Readiness(10.0, 10.1, False), KILL, False),
        (Readiness(10.0, 10.1, None), KILL, False),
        (Readiness(13.0, 13.1, False), CHANGE, False),
        (Readiness(10.0, 10.1, True, "rejected"), KILL, True),
    ],
)
def test_readiness_is_true(look: Readiness, window: Window, is_right: bool) -> None:
    assert (checks.check_ready([look], [window], may=frozenset({"rejected"})) == []) == is_right
