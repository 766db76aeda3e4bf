"""In which order the experiments run, and how long: a part at a time, each within its own budget.

What was answered before is passed over; what never ran goes before what is tried again; what does not fit any more is
left for the next call. Pure but for the `run` that it is given: tests give one without processes, and a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tests.gpu.proof.book import Book, Outcome, concluded
from tests.gpu.proof.budget import Budget, Journal
from tests.gpu.proof.experiment import Experiment, Ran

# Until a killed child is gone and its record is on the disk.
_ENDING_S = 3.0
Run = Callable[[Experiment, float], Ran]
Keep = Callable[[Book], None]


@dataclass(frozen=True, slots=True)
class Done:
    """One call's work: what it asked, and what is left for the next one."""

    outcomes: tuple[Outcome, ...]
    left: tuple[str, ...]


def queue(experiments: Sequence[Experiment], book: Book, *, fresh: bool) -> list[Experiment]:
    """What is to be asked, in this order; `fresh` asks everything again."""
    if fresh:
        return list(experiments)
    never = [one for one in experiments if book.of(one.name) is None]
    again = [one for one in experiments if (known := book.of(one.name)) is not None and not known.is_final]
    return [*never, *again]


def run_part(
    experiments: Sequence[Experiment],
    book: Book,
    budget: Budget,
    journal: Journal,
    run: Run,
    keep: Keep,
    *,
    fresh: bool = False,
) -> tuple[Book, Done]:
    """`keep` is called with the book after every experiment. Raises what `keep` raises."""
    outcomes: list[Outcome] = []
    left: list[str] = []
    for experiment in queue(experiments, book, fresh=fresh):
        time_s = budget.left_s - _ENDING_S
        if time_s < experiment.about_s:
            left.append(experiment.name)
            continue
        journal.tell(f"{experiment.name} ... (at most {min(experiment.limit_s, time_s):.0f} s)")
        ran = run(experiment, min(experiment.limit_s, time_s))
        if ran.ended == "hung" and time_s < experiment.limit_s:
            ran = replace(ran, ended="cut short", how="the part's time was over")
            left.append(experiment.name)
        outcome = concluded(experiment, ran)
        outcomes.append(outcome)
        known = book.of(experiment.name)
        # An earlier answer is worth more than half of a new one.
        if outcome.ended != "cut short" or known is None or not known.is_final:
            book = book.with_outcome(outcome)
            keep(book)
        journal.tell(f"{experiment.name}: {outcome.verdict} ({outcome.told})")
    return book, Done(tuple(outcomes), tuple(left))
