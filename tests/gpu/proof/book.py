"""What the experiments found on one GPU: `results/<gpu>-experiments.json`, replaced whole after each of them.

One file and not one for each, so that little has to be brought back from a machine that is lent. Knows the records and
which of them are final; knows nothing of how anything is measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from convoy.models.checkpoint import convoy_version, write_whole
from convoy.models.errors import JobError
from convoy.models.records import RecordError, from_jsonable, to_jsonable
from tests.gpu.proof.experiment import Ended, Experiment, Ran, Verdict
from tests.gpu.proof.records import file_name

BOOK_VERSION = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """One experiment, as asked and as answered."""

    experiment: str
    part: int
    question: str
    expected: str
    verdict: Verdict
    told: str
    ended: Ended
    how: str
    at: str
    convoy: str
    seconds: float
    figures: dict[str, float]
    facts: dict[str, str]
    steps: tuple[str, ...] = ()

    @property
    def is_final(self) -> bool:
        """Whether another run on this GPU would tell nothing new.

        What was missing may have been brought along since, an exception is more often the experiment's own mistake
        than an answer, and one that was cut short was not asked to the end.
        """
        return self.verdict != "not measurable here" and self.ended in ("done", "crashed", "hung")


@dataclass(frozen=True, slots=True)
class Book:
    """All outcomes on one GPU, each experiment's latest."""

    schema_version: int
    gpu: str
    outcomes: tuple[Outcome, ...] = ()

    def of(self, name: str) -> Outcome | None:
        return next((one for one in self.outcomes if one.experiment == name), None)

    def with_outcome(self, outcome: Outcome) -> Book:
        others = tuple(one for one in self.outcomes if one.experiment != outcome.experiment)
        return replace(self, outcomes=(*others, outcome))


def concluded(experiment: Experiment, ran: Ran) -> Outcome:
    """The record of what a child brought back."""
    judgement = experiment.judged(ran)
    return Outcome(
        experiment=experiment.name,
        part=experiment.part,
        question=experiment.question,
        expected=experiment.expected,
        verdict=judgement.verdict,
        told=judgement.told,
        ended=ran.ended,
        how=ran.how,
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        convoy=convoy_version(),
        seconds=ran.seconds,
        figures=dict(ran.figures),
        facts=dict(ran.facts),
        steps=ran.steps if ran.ended != "done" else (),
    )


def book_path(folder: Path, gpu: str) -> Path:
    """`folder` is where the page lies."""
    return folder / "results" / file_name(gpu).replace(".json", "-experiments.json")


def open_book(folder: Path, gpu: str) -> Book:
    """What was found so far, or an empty book. Raises JobError for a file that is something else."""
    path = book_path(folder, gpu)
    if not path.exists():
        return Book(BOOK_VERSION, gpu)
    try:
        return _read(path)
    except (RecordError, ValueError) as error:
        raise JobError(f"{path} cannot be gone on with ({error}); move it away and run again") from error


def write_book(book: Book, folder: Path) -> Path:
    """Raises JobError when the disk does not take it."""
    path = book_path(folder, book.gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(to_jsonable(book), indent=1) + "\n").encode())
    return path


def read_books(folder: Path) -> Iterable[Book]:
    """All that lie in `folder`/results; others' files are passed over."""
    for path in sorted((folder / "results").glob("*-experiments.json")):
        try:
            yield _read(path)
        except (RecordError, ValueError):
            continue


def _read(path: Path) -> Book:
    book = from_jsonable(Book, json.loads(path.read_text()), path.name)
    if book.schema_version != BOOK_VERSION:
        raise RecordError(f"{path.name}: schema_version {book.schema_version}, and {BOOK_VERSION} is known")
    return book
