"""The proof's experiments as records and in their order: budgets, resuming, verdicts, the book and the page."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from convoy.models.errors import JobError
from tests.gpu.proof import parts
from tests.gpu.proof.__main__ import main
from tests.gpu.proof.book import BOOK_VERSION, Book, book_path, concluded, open_book, read_books, write_book
from tests.gpu.proof.budget import Budget, Journal
from tests.gpu.proof.children import read_notes
from tests.gpu.proof.experiment import Experiment, Judgement, Ran
from tests.gpu.proof.page import PAGE, render, write_page
from tests.gpu.proof.records import SCHEMA_VERSION, Proof
from tests.gpu.proof.schedule import Done, run_part
from tests.support import proof_play
from tests.unit.test_gpu_proof_figures import WHERE

ROOT = Path(__file__).resolve().parents[2]
EMPTY = Book(BOOK_VERSION, "NVIDIA H200")
WELL = Ran("done", figures={"value": 2.0}, seconds=1.0)


def is_two(ran: Ran) -> Judgement:
    return Judgement.of(ran.figures["value"] == 2, f"value {ran.figures['value']:g}")


def asked(name: str, about_s: float = 10.0, limit_s: float = 60.0, may_crash: bool = False) -> Experiment:
    return Experiment(
        name, 1, f"Is {name} two?", "two", proof_play.answer, is_two, about_s, limit_s, may_crash=may_crash
    )


class Rehearsal:
    """Children that are not there: each takes so long, and ends so; what was asked and kept is written down."""

    def __init__(self, takes_s: Mapping[str, float] | None = None, ends: Mapping[str, Ran] | None = None) -> None:
        self.now_s = 0.0
        self.takes_s, self.ends = dict(takes_s or {}), dict(ends or {})
        self.asked: list[tuple[str, float]] = []
        self.kept: list[Book] = []

    def run(self, experiment: Experiment, limit_s: float) -> Ran:
        self.asked.append((experiment.name, limit_s))
        took_s = self.takes_s.get(experiment.name, 10.0)
        self.now_s += min(took_s, limit_s)
        return Ran("hung", "it did not end in its time") if took_s > limit_s else self.ends.get(experiment.name, WELL)

    def part(
        self, *experiments: Experiment, book: Book = EMPTY, budget_s: float = 480.0, fresh: bool = False
    ) -> tuple[Book, Done]:
        budget = Budget(budget_s, lambda: self.now_s)
        journal = Journal(budget, lambda line: None)
        return run_part(experiments, book, budget, journal, self.run, self.kept.append, fresh=fresh)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.asked]


def test_everything_is_asked_in_order_and_kept_after_each() -> None:
    rehearsal = Rehearsal()
    book, done = rehearsal.part(asked("a"), asked("b"))
    assert rehearsal.names == ["a", "b"]
    assert [len(kept.outcomes) for kept in rehearsal.kept] == [1, 2]
    assert [one.verdict for one in book.outcomes] == ["as expected"] * 2
    assert done.left == ()


def test_what_was_answered_is_passed_over_and_asked_again_only_afresh() -> None:
    book, _ = Rehearsal().part(asked("a"))
    again, fresh = Rehearsal(), Rehearsal()
    again.part(asked("a"), asked("b"), book=book)
    assert again.names == ["b"]
    fresh.part(asked("a"), asked("b"), book=book, fresh=True)
    assert fresh.names == ["a", "b"]


@pytest.mark.parametrize(
    ("ran", "is_final"),
    [
        (WELL, True),
        (Ran("done", figures={"value": 3.0}), True),
        (Ran("crashed", "SIGABRT"), True),
        (Ran("hung", "it did not end in its time"), True),
        (Ran("failed", "ValueError: mine"), False),
        (Ran("done", not_measurable="no provider"), False),
    ],
)
def test_what_was_missing_or_the_experiments_own_mistake_is_tried_again(ran: Ran, is_final: bool) -> None:
    book, _ = Rehearsal(ends={"a": ran}).part(asked("a"))
    later = Rehearsal()
    later.part(asked("a"), asked("b"), book=book)
    # After what was never tried.
    assert later.names == (["b"] if is_final else ["b", "a"])


def test_what_does_not_fit_is_left_and_something_shorter_goes_before_it() -> None:
    rehearsal = Rehearsal(takes_s={"a": 40.0})
    _, done = rehearsal.part(asked("a"), asked("long", about_s=30.0), asked("short", about_s=10.0), budget_s=60.0)
    assert rehearsal.asked == [("a", 57.0), ("short", 17.0)]
    assert done.left == ("long",)
    assert rehearsal.now_s <= 60.0


def test_the_parts_end_cuts_short_what_its_own_limit_would_have_let_go_on() -> None:
    rehearsal = Rehearsal(takes_s={"a": 100.0})
    book, done = rehearsal.part(asked("a", limit_s=200.0), budget_s=60.0)
    (outcome,) = book.outcomes
    assert (outcome.ended, outcome.verdict, done.left) == ("cut short", "not answered yet", ("a",))
    assert not outcome.is_final
    assert rehearsal.now_s <= 60.0


def test_an_earlier_answer_outlives_one_that_was_cut_short() -> None:
    book, _ = Rehearsal().part(asked("a"))
    rehearsal = Rehearsal(takes_s={"a": 100.0})
    later, _ = rehearsal.part(asked("a", limit_s=200.0), book=book, budget_s=60.0, fresh=True)
    assert later == book
    assert rehearsal.kept == []


def test_a_hang_at_its_own_limit_is_an_answer_and_the_rest_goes_on() -> None:
    rehearsal = Rehearsal(takes_s={"a": 100.0})
    book, done = rehearsal.part(asked("a"), asked("b"))
    assert [(one.experiment, one.ended) for one in book.outcomes] == [("a", "hung"), ("b", "done")]
    assert done.left == ()


def test_a_crash_is_judged_only_where_it_is_a_part_of_the_question() -> None:
    crashed = Ran("crashed", "SIGABRT", {"value": 2.0}, steps=("closing",))
    assert asked("a", may_crash=True).judged(crashed) == Judgement("as expected", "value 2")
    assert asked("a").judged(crashed) == Judgement("otherwise", "crashed: SIGABRT after: closing")


def test_figures_that_are_missing_make_no_verdict_of_their_own() -> None:
    judgement = asked("a").judged(Ran("done"))
    assert judgement.verdict == "otherwise"
    assert "not complete" in judgement.told


def test_notes_are_read_up_to_the_torn_line() -> None:
    text = '{"step": "one"}\n{"figure": "a", "value": 1.5}\n{"fact": "b", "value": "c"}\n{"fig'
    ran = read_notes(text, -6, "terminate called\n", 2.0)
    assert (ran.ended, ran.how) == ("crashed", "SIGABRT: terminate called")
    assert (ran.figures, ran.facts, ran.steps) == ({"a": 1.5}, {"b": "c"}, ("one",))
    assert read_notes('{"done": true}\n', -11, "", 1.0).how == "SIGSEGV when it had done everything"
    assert read_notes("", 3, "", 1.0).how == "exit code 3"


# The book


def test_a_book_comes_back_as_it_was_and_another_gpu_has_its_own(tmp_path: Path) -> None:
    book = EMPTY.with_outcome(concluded(asked("a"), replace(WELL, facts={"b": "c"})))
    path = write_book(book, tmp_path)
    assert path.name == "nvidia-h200-experiments.json"
    assert open_book(tmp_path, "NVIDIA H200") == book
    assert open_book(tmp_path, "NVIDIA H100") == Book(BOOK_VERSION, "NVIDIA H100")
    assert list(read_books(tmp_path)) == [book]


@pytest.mark.parametrize("content", ["{", '{"schema_version": 1}', '{"schema_version": 9, "gpu": "x", "outcomes": []}'])
def test_a_book_that_is_something_else_is_not_written_over(tmp_path: Path, content: str) -> None:
    path = book_path(tmp_path, "NVIDIA H200")
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(JobError, match="move it away"):
        open_book(tmp_path, "NVIDIA H200")
    assert list(read_books(tmp_path)) == []


# The table


def test_every_part_fits_into_its_time_or_says_what_it_leaves() -> None:
    assert len({one.name for one in parts.EXPERIMENTS}) == len(parts.EXPERIMENTS)
    for one in parts.EXPERIMENTS:
        assert one.part in parts.TITLES
        assert one.about_s < one.limit_s <= 477, one.name
        assert one.question.endswith("?")
        assert one.expected
        json.dumps(dict(one.arguments))
    for part in parts.PARTS:
        assert sum(one.about_s for one in parts.of_part(part)) <= 470, f"part {part}"


# The page


def test_the_page_says_what_was_not_run(tmp_path: Path) -> None:
    page = render([])
    for one in parts.EXPERIMENTS:
        assert re.search(rf"\| {one.name} \|.*\| not run \|", page), one.name
    assert "No results yet." in page


def test_verdicts_and_figures_stand_on_the_page_beside_the_benchmark(tmp_path: Path) -> None:
    row = next(one for one in parts.EXPERIMENTS if one.name == "bus-id")
    told = replace(WELL, figures={"NULs inside": 0.0}, facts={"bus id": "b'1'", "name": "b'H200'", "NVML by it": "x"})
    write_book(EMPTY.with_outcome(concluded(row, told)), tmp_path)
    (tmp_path / "results" / "zoo-experiments.json").write_text("[]")
    write_page(tmp_path)
    page = (tmp_path / PAGE).read_text()
    assert re.search(r"\| bus-id \| .* \| \*\*as expected\*\* \|", page)
    assert "- bus id: b'1'" in page
    assert "Not run: machine, " in page
    both = render([Proof(SCHEMA_VERSION, WHERE, label="onnxruntime")], read_books(tmp_path))
    assert both.count("## NVIDIA H200\n") == 1
    assert "### Benchmark (onnxruntime)" in both


def test_the_committed_page_is_what_the_committed_results_make() -> None:
    write_to = ROOT / "docs"
    proofs, books = [], list(read_books(write_to))
    from tests.gpu.proof.page import _proofs

    proofs = list(_proofs(write_to / "results"))
    assert (write_to / PAGE).read_text() == render(proofs, books), "run python -m tests.gpu.proof --page"


# The command


def test_the_command_refuses_what_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--part", "9"]) == 2
    assert main(["--only", "nothing"]) == 2
    assert main(["--carry", str(tmp_path), "--part", "0"]) == 1
    said = capsys.readouterr().err
    assert "there is no part 9, only 0, 1, 2, 3, 4" in said
    assert "no experiment nothing" in said
    assert "has no wheel" in said


def test_without_a_gpu_one_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["--out", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gpu-proof: there is no GPU here, so nothing can be proved: ")
    assert list(tmp_path.iterdir()) == []
