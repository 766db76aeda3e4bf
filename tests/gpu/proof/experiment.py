"""What an experiment is: a question, what is expected, and how its figures are judged.

Measuring happens in a process of its own (`child`), because a kernel that breaks the device, a library that calls
std::terminate or a call that never returns must cost one experiment and not the rest. Judging is pure: the same
figures give the same verdict anywhere. Knows nothing of CUDA.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Verdict = Literal["as expected", "otherwise", "not measurable here", "not answered yet"]
# By itself, by an exception, by a signal, at its own limit, at the end of the part's time.
Ended = Literal["done", "failed", "crashed", "hung", "cut short"]


class NotMeasurable(Exception):
    """What the question needs is not on this machine; the message says what."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What a child brought back. `how` is its last words: an exception, a signal's name, a reason."""

    ended: Ended
    how: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[str, ...] = ()
    seconds: float = 0.0
    not_measurable: str = ""


@dataclass(frozen=True, slots=True)
class Judgement:
    """`told` is one sentence with the figures that it rests on."""

    verdict: Verdict
    told: str

    @staticmethod
    def of(is_expected: bool, told: str) -> Judgement:
        return Judgement("as expected" if is_expected else "otherwise", told)


Judge = Callable[[Ran], Judgement]


@dataclass(frozen=True, slots=True)
class Experiment:
    """One row of the table in `parts`.

    `measure` is called in the child as measure(bench, **arguments). `about_s`: it is not begun with less time left;
    `limit_s`: what takes longer hangs. `may_crash`: how the process ends is a part of the question, so that `judge`
    is asked then, too.
    """

    name: str
    part: int
    question: str
    expected: str
    measure: Callable[..., None]
    judge: Judge
    about_s: float
    limit_s: float
    arguments: Mapping[str, Any] = field(default_factory=dict)
    may_crash: bool = False

    @property
    def path(self) -> str:
        """Where the child finds what measures."""
        return f"{self.measure.__module__}:{self.measure.__name__}"

    def judged(self, ran: Ran) -> Judgement:
        """What is to be thought of it. Never raises."""
        if ran.not_measurable:
            return Judgement("not measurable here", ran.not_measurable)
        if ran.ended == "done" or (ran.ended == "crashed" and self.may_crash):
            try:
                return self.judge(ran)
            except (KeyError, ValueError, ZeroDivisionError, StopIteration) as error:
                return Judgement("otherwise", f"its figures are not complete ({type(error).__name__}: {error})")
        last = f" after: {ran.steps[-1]}" if ran.steps else ""
        verdict: Verdict = "not answered yet" if ran.ended == "cut short" else "otherwise"
        return Judgement(verdict, f"{ran.ended}{': ' if ran.how else ''}{ran.how}{last}")


class Bench:
    """The child's side: what it finds out is in the file at once, one JSON object a line, whatever kills it next."""

    def __init__(self, notes: Path, results: Path, limit_s: float) -> None:
        self._descriptor = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._end_s = time.monotonic() + limit_s
        self.folder = notes.parent
        self.results = results

    @property
    def left_s(self) -> float:
        """Until the parent gives up."""
        return max(0.0, self._end_s - time.monotonic())

    def step(self, text: str) -> None:
        """What is about to happen: the last one is known if it never returns."""
        self.write(step=text)

    def figure(self, name: str, value: float) -> None:
        self.write(figure=name, value=float(value))

    def fact(self, name: str, value: object) -> None:
        self.write(fact=name, value=" ".join(str(value).split())[:600])

    def write(self, **note: object) -> None:
        os.write(self._descriptor, (json.dumps(note) + "\n").encode())
