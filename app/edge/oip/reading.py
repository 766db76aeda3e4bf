"""Outputs to what they say of their pictures, those together that come together.

A batch's answers come in one turn of the event loop, and numpy takes as long for one of them as for all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from convoy.app.batch import Answer
from convoy.app.edge.oip.answering import Wanted
from convoy.app.edge.oip.call import Call
from convoy.app.scheduling.request import Done
from convoy.models.geometry import Extent
from convoy.models.spec import ModelSpec

_log = logging.getLogger("convoy")


@dataclass(slots=True, eq=False)
class PictureQuestion:
    """What outputs are to be read for: a picture of this upright size."""

    spec: ModelSpec
    size: Extent
    wanted: Wanted


@dataclass(slots=True, eq=False)
class _Unread:
    call: Call
    question: PictureQuestion
    done: Done
    on_found: Callable[[Any], None]


class Readings:
    """Outputs that come in one turn of the event loop are read together, as a batch's do: a few calls of numpy for all.

    Only those that are short to read.
    """

    def __init__(self) -> None:
        self._due: list[_Unread] = []

    def read(self, call: Call, question: PictureQuestion, done: Done, on_found: Callable[[Any], None]) -> None:
        """`on_found` hears what an answer says, or the error in its place, unless the call ends before."""
        if call.core.open_calls < 2:  # there is nobody to wait for
            on_found(_found([done.answers], question.spec, [question.size], question.wanted)[0])
            return
        self._due.append(_Unread(call, question, done, on_found))
        if len(self._due) == 1:
            asyncio.get_running_loop().call_soon(self._read_due)

    def _read_due(self) -> None:
        due, self._due = self._due, []
        alike: dict[tuple[int, Wanted], list[_Unread]] = {}
        for one in due:
            if not one.call.has_ended:  # of one that has the memory is another's
                alike.setdefault((id(one.question.spec), one.question.wanted), []).append(one)
        for several in alike.values():
            spec, wanted = several[0].question.spec, several[0].question.wanted
            answers, sizes = [one.done.answers for one in several], [one.question.size for one in several]
            for one, found in zip(several, _found(answers, spec, sizes, wanted), strict=True):
                try:
                    one.on_found(found)
                except Exception:  # must not cost the others their answers
                    _log.exception("what was read of a picture could not be told; this is a bug")


def _found(answers: Sequence[Sequence[Answer]], spec: ModelSpec, sizes: Sequence[Extent], wanted: Wanted) -> list[Any]:
    try:
        return wanted.answering.read_each(answers, spec, sizes, wanted)
    except Exception as error:  # a bug, which nobody may wait for without an end
        return [error] * len(answers)
