"""Every invariant of a campaign: holds over what is sound, and is broken by each thing that it is there to catch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.campaign import __main__ as command
from tests.campaign import checks
from tests.campaign.asks import Script, WrongAnswer
from tests.campaign.checks import Readiness, Window
from tests.campaign.clients import Client, Place, Said, error_words
from tests.campaign.endings import BOUND_S, PARTLY, Ending, outcome_of_grpc, outcome_of_status, outcome_of_words
from tests.campaign.field import READERS, Calls, ProcessState, Readers
from tests.campaign.page import render
from tests.campaign.plan import Period, draw_plan
from tests.campaign.records import PeriodRun, Records, Sample

GOOD = Ending("httpx", 7, "v2", "simple", "success", 10.0, 10.1)
KILL = Window("kill core", 12.0, 15.0, "core 5 killed", excuses=True)
CHANGE = Window("store", 12.0, 15.0, "shift 2 added", excuses=False)
CORE = ProcessState(5, "core", 100 << 20, 30, 20)
SOUND_REST = ((0, 0, 0), [CORE], [CORE], list[int]())


def period(kind: str = "calm") -> Period:
    return Period(0, 2, kind, "poll", 9.0, (), ())


def endings_broken(kind: str, *endings: Ending, windows: tuple[Window, ...] = ()) -> list[str]:
    return checks.check_endings(period(kind), endings, windows)


# Recovery


@pytest.mark.parametrize(
    ("outcomes", "recovery_s"),
    [
        pytest.param(["success"] * 6, 0.0, id="nobody-felt-it"),
        pytest.param(["success", None, "failed", None, "success", "success"], 2.1, id="until-all-are-answered"),
        pytest.param(["success", None, "success", None, "success", "success"], 2.1, id="it-came-and-went"),
        pytest.param([None] * 6, None, id="never"),
    ],
)
def test_the_time_to_recover_ends_with_the_first_answer_after_which_none_failed(
    outcomes: list[str | None], recovery_s: float | None
) -> None:
    looks = [Readiness(11.5 + i / 2, 11.6 + i / 2, outcome is not None, outcome) for i, outcome in enumerate(outcomes)]
    found = checks.recovery_s(replace(KILL, over_s=11.5), looks)
    assert found == (None if recovery_s is None else pytest.approx(recovery_s))


def test_only_trouble_that_may_be_felt_has_a_time_to_recover() -> None:
    records = Records(draw_plan(1, 1.0, (0,)), "")
    windows = (replace(KILL, over_s=12.0), replace(CHANGE, over_s=12.0))
    records.runs.append(PeriodRun(period(), 10.0, 20.0, windows, Calls(), Calls(), ()))
    records.looks += [Readiness(13.0, 13.1, None), Readiness(13.5, 13.6, True, "success")]
    assert records.recoveries_s() == {"kill core": [pytest.approx(1.6)]}
    assert "Time to recover" in render(records)


# Answers


def test_good_calls_break_nothing() -> None:
    assert not endings_broken("calm", GOOD, replace(GOOD, outcome="invalid", asked_wrong=True))


@pytest.mark.parametrize(
    "outcome", ["wrong", "hung", "undocumented", "rejected", "deadline_exceeded", "failed", "broken"]
)
def test_nothing_goes_wrong_in_calm(outcome: str) -> None:
    (line,) = endings_broken("calm", replace(GOOD, outcome=outcome, words="the words"))
    assert outcome in line
    assert "the words" in line
    assert "number 7" in line


@pytest.mark.parametrize("outcome", ["wrong", "hung", "undocumented"])
def test_some_things_have_no_excuse(outcome: str) -> None:
    assert endings_broken("kill core", replace(GOOD, outcome=outcome, sent_s=12.5, ended_s=13), windows=(KILL,))


def test_a_good_request_must_not_be_called_wrong() -> None:
    assert endings_broken("calm", replace(GOOD, outcome="invalid"))
    assert endings_broken("load", replace(GOOD, outcome="invalid"))
    assert not endings_broken("load", replace(GOOD, outcome="invalid", model="shift")), "it may be away"
    assert endings_broken("store", replace(GOOD, outcome="invalid", model="shift")), "version 1 always stays"


def test_calls_are_lost_only_where_something_was_done() -> None:
    lost = replace(GOOD, outcome="broken")
    assert not endings_broken("kill core", replace(lost, sent_s=11.0, ended_s=12.5), windows=(KILL,))
    assert endings_broken("kill core", replace(lost, sent_s=10.0, ended_s=11.0), windows=(KILL,))
    assert endings_broken("kill core", replace(lost, sent_s=15.5, ended_s=16.0), windows=(KILL,))
    assert endings_broken("store", replace(lost, sent_s=12.5, ended_s=13.0), windows=(CHANGE,))


def test_a_form_of_which_files_were_refused_needs_a_cause() -> None:
    partly = replace(GOOD, words=f"{PARTLY}Exceeds maximum queue size")
    assert endings_broken("calm", partly)
    assert not endings_broken("overload", partly)
    assert endings_broken("kill core", replace(partly, sent_s=10.0, ended_s=11.0), windows=(KILL,))
    assert not endings_broken("kill core", replace(partly, sent_s=12.5, ended_s=13.0), windows=(KILL,))


def test_an_answer_that_takes_for_ever_is_a_breach() -> None:
    assert endings_broken("overload", replace(GOOD, ended_s=10.0 + BOUND_S + 6))


def test_many_of_one_kind_are_one_line() -> None:
    (line,) = endings_broken("calm", *[replace(GOOD, outcome="failed", number=number) for number in range(50)])
    assert line.startswith("50 calls")


# Books

SEEN = Calls({("v2", "simple", "success"): 10, ("v2", "simple", "invalid"): 2})


def test_books_that_agree_break_nothing() -> None:
    assert not checks.check_books(period(), SEEN, Calls(SEEN))


@pytest.mark.parametrize("outcome", ["success", "invalid", "rejected", "deadline_exceeded", "failed", "cancelled"])
def test_books_that_are_off_by_one_are_broken(outcome: str) -> None:
    more = SEEN + Calls({("v2", "simple", outcome): 1})
    assert checks.check_books(period(), SEEN, more), "the server has counted one too many"
    if outcome != "cancelled":
        assert checks.check_books(period(), more, Calls(SEEN)), "the server has missed one"


def test_books_are_kept_by_protocol_and_model() -> None:
    assert checks.check_books(
        period(), SEEN, Calls({("grpc", model, outcome): n for (_, model, outcome), n in SEEN.items()})
    )
    assert checks.check_books(
        period(), SEEN, Calls({(wire, "mean", outcome): n for (wire, _, outcome), n in SEEN.items()})
    )


def test_who_left_may_have_been_counted_as_anything_once() -> None:
    left = SEEN + Calls({("v2", "simple", "left"): 2})
    assert not checks.check_books(period(), left, Calls(SEEN))
    assert not checks.check_books(
        period(), left, SEEN + Calls({("v2", "simple", "cancelled"): 1, ("v2", "simple", "success"): 1})
    )
    assert checks.check_books(period(), left, SEEN + Calls({("v2", "simple", "cancelled"): 3}))


def test_who_left_over_grpc_may_have_named_no_model_yet() -> None:
    left = SEEN + Calls({("grpc", "simple", "left"): 2})
    assert not checks.check_books(period(), left, SEEN + Calls({("grpc", "", "cancelled"): 2}))
    assert checks.check_books(period(), left, SEEN + Calls({("grpc", "", "cancelled"): 3}))
    assert checks.check_books(period(), left, SEEN + Calls({("v2", "", "cancelled"): 1}))


def test_books_are_not_compared_where_they_are_lost() -> None:
    assert not checks.check_books(period("kill core"), SEEN, Calls())
    missed = Calls({("v2", "simple", "failed"): 1})
    assert not checks.check_books(period("descriptors"), SEEN + missed, Calls(SEEN)), "known, and only with edges"
    assert checks.check_books(replace(period("descriptors"), edges=0), SEEN + missed, Calls(SEEN))
    assert checks.check_books(period("descriptors"), SEEN + Calls({("v2", "simple", "success"): 1}), Calls(SEEN))
    gone = Calls({("v2", "shift", "success"): 3})
    assert not checks.check_books(period("store"), SEEN + gone, Calls(SEEN))
    assert checks.check_books(period("calm"), SEEN + gone, Calls(SEEN))


def test_readers_of_one_ledger_say_the_same() -> None:
    told = Readers({(reader, model): 7 for reader in READERS for model in ("simple", "shift", "digits")})
    assert not checks.check_readers(period(), told)
    (line,) = checks.check_readers(period(), told + Readers({(READERS[0], "simple"): 1}))
    assert "simple" in line
    assert f"8 {READERS[0]}" in line
    for reader in READERS:
        missing = Readers({cell: count for cell, count in told.items() if cell != (reader, "simple")})
        assert checks.check_readers(period(), missing), "a reader that knows nothing of a model disagrees, too"
        mute = Readers({cell: count for cell, count in told.items() if cell[0] != reader})
        assert f"{reader} says nothing at all" in checks.check_readers(period(), mute)
    assert not checks.check_readers(period(), told + Readers({(READERS[1], "digits"): 5})), "each file is a request"
    changed = told + Readers({(READERS[0], "shift"): 1})
    assert not checks.check_readers(period("store"), changed), "a version that has left took its series with it"
    assert checks.check_readers(period("calm"), changed)
    for kind in ("leavers", "spoiled", "kill core"):
        assert not checks.check_readers(period(kind), told + Readers({(READERS[0], "simple"): 1}))


# Rest, memory, readiness, log


def test_a_server_at_rest_breaks_nothing() -> None:
    assert not checks.check_rest(*SOUND_REST)
    assert not checks.check_rest((0, 0, 0), [CORE], [replace(CORE, pid=6, descriptors=32, threads=25)], [])


@pytest.mark.parametrize(
    ("held", "now", "left", "words"),
    [
        (None, [CORE], [], "not answered"),
        ((1, 0, 0), [CORE], [], "1 samples wait"),
        ((0, 1, 0), [CORE], [], "1 requests unfinished"),
        ((0, 0, 64), [CORE], [], "64 bytes"),
        ((0, 0, 0), [], [], "processes"),
        ((0, 0, 0), [CORE, replace(CORE, pid=6)], [], "2 core"),
        ((0, 0, 0), [CORE], [99], "99 outlived"),
        ((0, 0, 0), [replace(CORE, descriptors=35)], [], "35 descriptors"),
        ((0, 0, 0), [replace(CORE, threads=29)], [], "29 threads"),
    ],
)
def test_what_is_left_behind_is_a_breach(
    held: tuple[int, int, int] | None, now: list[ProcessState], left: list[int], words: str
) -> None:
    lines = checks.check_rest(held, [CORE], now, left)
    assert any(words in line for line in lines), lines


def test_a_process_that_dies_of_what_its_clients_did_is_a_breach() -> None:
    assert not checks.check_alive([CORE], [CORE])
    (line,) = checks.check_alive([CORE], [replace(CORE, pid=6)])
    assert "core 5" in line


def test_memory_that_grows_is_a_breach() -> None:
    grown = replace(CORE, own_bytes=CORE.own_bytes + checks.MORE_OWN_BYTES)
    assert not checks.check_memory([CORE], [grown])
    assert checks.check_memory([CORE], [replace(grown, own_bytes=grown.own_bytes + 1)])
    assert checks.check_memory([CORE], [grown, replace(CORE, pid=6)]), "all processes count together"


READY = Readiness(10.0, 10.1, True, "success")


def ready_broken(look: Readiness, *windows: Window, may: frozenset[str] = frozenset()) -> list[str]:
    return checks.check_ready([look], windows, may=may)


def test_readiness_that_is_true_breaks_nothing() -> None:
    assert not ready_broken(READY)
    assert not ready_broken(replace(READY, ready=False, outcome=None, began_s=13.0, ended_s=13.1), KILL)
    assert not ready_broken(replace(READY, outcome="rejected"), may=frozenset({"rejected"}))


def test_readiness_that_is_not_true_is_a_breach() -> None:
    assert ready_broken(replace(READY, outcome="failed"), KILL)
    assert ready_broken(replace(READY, ready=False, outcome=None), KILL)
    assert ready_broken(replace(READY, ready=None, outcome=None))
    assert ready_broken(replace(READY, ready=False, began_s=13.0, ended_s=13.1), CHANGE), "no change excuses that"


@pytest.mark.parametrize(
    "text",
    ["Traceback (most recent call last):", "POST / failed; this is a bug", "Fatal Python error", "never retrieved"],
)
def test_a_log_that_admits_a_bug_is_a_breach(text: str) -> None:
    assert not checks.check_log("loaded digits version 1")
    assert checks.check_log(f"loaded digits version 1\n{text}\n")


# Clients


class Stub(Client):
    """Two requests a call, the first of them answered."""

    kind = "stub"

    def __init__(self, error: Exception | None) -> None:
        super().__init__(Place(1, 2, lambda: 3.0), Script(1))
        self._error = error

    def about(self, number: int) -> tuple[str, str, bool, int]:
        return "v2", "simple", False, 2

    def say(self, number: int) -> Iterator[Said]:
        yield Said("v2", "simple", "success")
        if self._error is not None:
            raise self._error
        yield Said("v2", "simple", "success")


@pytest.mark.parametrize(
    ("error", "second"),
    [
        (None, "success"),
        (WrongAnswer("no"), "wrong"),
        (TimeoutError("no"), "hung"),
        (ConnectionResetError("no"), "broken"),
    ],
)
def test_each_request_has_one_ending_whatever_happens(error: Exception | None, second: str) -> None:
    assert [one.outcome for one in Stub(error).call(0)] == ["success", second]


def test_statuses_have_their_words() -> None:
    assert [outcome_of_status(one) for one in (200, 400, 404, 413, 429, 503, 504)] == [
        *("success", "invalid", "invalid", "invalid", "rejected", "failed", "deadline_exceeded"),
    ]
    assert {outcome_of_status(one) for one in (0, 201, 302, 418, 500, 502)} == {"undocumented"}
    assert outcome_of_grpc("StatusCode.NOT_FOUND", "no such model", 0.1) == "invalid"
    assert outcome_of_grpc("StatusCode.INTERNAL", "oh", 0.1) == "undocumented"
    assert outcome_of_grpc("StatusCode.UNAVAILABLE", "the server is shutting down", 0.1) == "failed"
    assert outcome_of_grpc("StatusCode.UNAVAILABLE", "Socket closed", 0.1) == "broken"
    assert outcome_of_grpc("StatusCode.CANCELLED", "", 0.1) == "broken"
    assert outcome_of_grpc("StatusCode.DEADLINE_EXCEEDED", "", BOUND_S) == "hung"
    assert outcome_of_words("Exceeds maximum queue size: 64") == "rejected"
    assert outcome_of_words("'a' is not at ready state; it is loading") == "failed"
    assert outcome_of_words("unexpected shape for input 'x'") == "invalid"


@pytest.mark.parametrize("body", [b"", b"oops", b"[]", b'{"detail": "x"}', b'{"error": ""}', b'{"error": 5}'])
def test_an_error_in_another_form_is_a_wrong_answer(body: bytes) -> None:
    assert error_words(b'{"error": "the words"}') == "the words"
    with pytest.raises(WrongAnswer):
        error_words(body)


# The page and the command


def some_records(*breaches: str) -> Records:
    plan = draw_plan(4, 0.5, (0, 2))
    records = Records(plan, "python -m tests.campaign --seed 4")
    for place, own in enumerate(plan.periods):
        at_s = 10.0 * place
        windows = (Window("kill core", at_s + 2, at_s + 4, "<core> 5 killed", excuses=True),)
        run = PeriodRun(own, at_s, at_s + 9, windows, Calls(SEEN), Calls(SEEN), breaches)
        records.runs.append(run)
        records.endings.append(replace(GOOD, sent_s=at_s, ended_s=at_s + 1))
        records.looks += [replace(READY, began_s=at_s + 1), Readiness(at_s + 3, at_s + 3.1, None)]
        records.samples.append(Sample(at_s, 100 << 20, 1, 30, 20, (0, 2, 0) if place else None))
    return records


def test_the_page_tells_the_story_and_escapes_what_others_wrote() -> None:
    page = render(some_records("answer <script> was wrong"))
    assert "&lt;script&gt; was wrong" in page
    assert "<script>" not in page
    assert "&lt;core&gt; 5 killed" in page
    assert "python -m tests.campaign --seed 4" in page
    assert page.count("<figure>") == 10
    assert "every invariant held" not in page
    assert "every invariant held" in render(some_records())


@pytest.mark.parametrize("breaches", [(), ("the answer was wrong",)])
def test_the_exit_code_says_whether_it_held(
    breaches: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "wage", lambda records, *_: records.runs.extend(some_records(*breaches).runs))
    monkeypatch.setattr(command.logging, "disable", lambda level: None)
    code = command.main(["--seed", "4", "--minutes", "0.5", "--out", str(tmp_path)])
    written = capsys.readouterr()
    replay = "python -m tests.campaign --minutes 0.5 --seed 4 --edges 0,2"
    assert replay in written.out
    assert (tmp_path / "campaign.html").exists()
    assert (tmp_path / "plan.json").exists()
    assert code == (1 if breaches else 0)
    assert ("the answer was wrong" in written.err) == bool(breaches)
    assert (replay in written.err) == bool(breaches)
