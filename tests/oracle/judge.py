"""Whether two builds have answered alike, and whether what differs was meant to."""

from __future__ import annotations

import difflib
import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from tests.oracle.normal import Answer, Answers, Part, normalised, plain_body

INTENDED = Path("tests/oracle/intended.toml")
_LONGEST_LINE = 400
_MOST_HEX_BYTES = 3200
_NOTHING: Answer = (Part("was not asked"),)


class Intended(msgspec.Struct, forbid_unknown_fields=True):
    """A difference that was meant.

    In the answers to `asks` (a pattern as for file names) the lines that match `before` became those that match
    `after`, one for one and in this order. Patterns match whole lines. `whole`: where those before match, any lines.
    """

    asks: str
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    reason: str = ""
    whole: bool = False
    used: int = 0

    def settle(self, name: str, gone: list[str], come: list[str]) -> bool:
        """Take its lines out of those that differ, if all of them are there."""
        if not fnmatchcase(name, self.asks):
            return False
        went, came = _found(self.before, gone), _found(self.after, come)
        if self.whole and (gone or come) and went is not None:
            went, came = range(len(gone)), range(len(come))
        if went is None or came is None:
            return False
        for lines, places in ((gone, went), (come, came)):
            lines[:] = [line for place, line in enumerate(lines) if place not in places]
        self.used += 1
        return True


@dataclass(slots=True)
class Verdict:
    """What came of a comparison.

    `differences` has a unified diff for each request that was answered otherwise. `unsteady` are requests that one
    build itself answers now so and now so.
    """

    requests: int
    equal: int
    differences: dict[str, str] = field(default_factory=dict)
    intended: list[str] = field(default_factory=list)
    unsteady: list[str] = field(default_factory=list)
    stale: list[Intended] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not self.differences and not self.stale


def intended_since(before: Path, after: Path) -> list[Intended]:
    """What the list in the tree `after` says and the one in `before` does not: that build has made it already."""
    made = read_intended(before / INTENDED)
    return [one for one in read_intended(after / INTENDED) if one not in made]


def read_intended(path: Path) -> list[Intended]:
    """Nothing where there is no list. Raises ValueError for an entry without a reason or without a line."""
    if not path.exists():
        return []
    entries = msgspec.toml.decode(path.read_bytes(), type=dict[str, list[Intended]]).get("difference", [])
    for one in entries:
        if not one.reason or not (one.before or one.after or one.whole):
            raise ValueError(f"{path.name}: the entry for {one.asks!r} needs a reason, and a line that differs")
    return entries


def differing(before: Answers, after: Answers) -> list[str]:
    """The names of all requests that were not answered alike."""
    return [name for name in {**before, **after} if _answer(name, before) != _answer(name, after)]


def judge(before: Sequence[Answers], after: Sequence[Answers], intended: Sequence[Intended]) -> Verdict:
    """`before` and `after` are the plays of each build, the first of them whole, others of what differed in it.

    A request is answered otherwise when no play of the one build equals any play of the other.
    """
    requests, different = len({**before[0], **after[0]}), differing(before[0], after[0])
    verdict = Verdict(requests, requests - len(different))
    for name in different:
        olds, news = (
            [_answer(name, one) for one in plays if one is plays[0] or name in one] for plays in (before, after)
        )
        if any(old in news for old in olds):
            verdict.unsteady.append(name)
        else:
            _judge_one(name, olds[0], news[0], intended, verdict)
    verdict.stale = [one for one in intended if not one.used]
    return verdict


def _answer(name: str, answers: Answers) -> Answer:
    return normalised(name, answers.get(name, _NOTHING))


def _judge_one(name: str, old: Answer, new: Answer, intended: Sequence[Intended], verdict: Verdict) -> None:
    lines = list(lines_of(old)), list(lines_of(new))
    diff = list(difflib.unified_diff(*lines, "before", "after", lineterm="", n=2))
    gone = [line[1:] for line in diff[2:] if line.startswith("-")]
    come = [line[1:] for line in diff[2:] if line.startswith("+")]
    settled = [entry for entry in intended if entry.settle(name, gone, come)]
    if settled and not gone and not come:
        verdict.intended.append(name)
    else:
        words = diff or ["the same when shown, but not byte by byte"]
        verdict.differences[name] = "\n".join(line[:_LONGEST_LINE] for line in words)


def lines_of(answer: Answer) -> Iterator[str]:
    """An answer for people; what is JSON is spread over lines, and what is no text is shown as hexadecimal."""
    for part in answer:
        yield from part.head.splitlines()
        yield from _body_lines(plain_body(part) if part.body else b"")
        yield ""


def _body_lines(body: bytes) -> list[str]:
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return textwrap.wrap(body[:_MOST_HEX_BYTES].hex(" "), 48)
    try:
        # Placeholders of the normaliser stand where numbers stood.
        document = json.loads(re.sub(r'(":)(<\w+>)', r'\1"\2"', text))
    except ValueError:
        return text.splitlines()
    return json.dumps(document, indent=1, ensure_ascii=False).splitlines()


def _found(patterns: tuple[str, ...], lines: list[str]) -> list[int] | None:
    """Where lines that match all patterns stand, in their order; None where one is missing."""
    places: list[int] = []
    start = 0
    for pattern in patterns:
        place = next((at for at in range(start, len(lines)) if re.fullmatch(pattern, lines[at])), None)
        if place is None:
            return None
        places.append(place)
        start = place + 1
    return places
