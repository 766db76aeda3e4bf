"""How often a server is asked, and for how long, until there is an answer or none is to be had.

Plain steps: what is to be sent and how long is to be waited. Whoever runs them does so, in a thread or on an event
loop; here is no socket, no clock and no sleep.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from convoy.models.errors import DeadlineExceeded, Overloaded, RequestError, Unavailable

Answer = TypeVar("Answer")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0


class WireQuestion(NamedTuple, Generic[Answer]):
    """One question on one wire: what is sent, given the seconds that are left, and what its reply means.

    `read` raises RequestError for a reply that is no answer.
    """

    build: Callable[[float], Any]
    read: Callable[[Any], Answer]


class Send(NamedTuple):
    """Send the message, and go on with its reply, or with the error why there is none, within so many seconds."""

    message: Any
    within_s: float


class Pause(NamedTuple):
    """Go on after so many seconds."""

    seconds: float


Steps: TypeAlias = Generator[Send | Pause, Any, Answer]


def ask(
    question: WireQuestion[Answer],
    timeout_s: float,
    retries: int,
    now: Callable[[], float],
    draw: Callable[[], float] = random.random,
) -> Steps[Answer]:
    """Ask, and again after what passes by itself: 429, 503, and a connection that is refused or breaks off.

    The server's Retry-After is waited for, and what it does not name grows from 0.1 to 5 s; up to a quarter of it is
    added by chance, so that clients which were refused together do not come back together. All of it is within
    `timeout_s`: who is asked to come back later than that is told so at once. Inference changes nothing on a server,
    so asking twice does no harm. Raises the last try's RequestError, and DeadlineExceeded.
    """
    until, pause_s, tries = now() + timeout_s, _FIRST_PAUSE_S, 0
    while True:
        left_s = until - now()
        if left_s <= 0:
            raise DeadlineExceeded(f"there was no answer within {timeout_s:g} s; allow it more time, or ask for less")
        tries += 1
        try:
            return question.read((yield Send(question.build(left_s), left_s)))
        except (Overloaded, Unavailable) as error:
            least_s = error.retry_after_s or 0.0
            wait_s = max(least_s, pause_s) * (1 + draw() / 4)
            if tries > retries or now() + wait_s >= until:
                raise
        yield Pause(wait_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def run(steps: Steps[Answer], send: Callable[[Send], Any], sleep: Callable[[float], object]) -> Answer:
    """Go through the steps in this thread."""
    try:
        step = next(steps)
        while True:
            if isinstance(step, Pause):
                sleep(step.seconds)
                step = next(steps)
                continue
            try:
                reply = send(step)
            except RequestError as error:
                step = steps.throw(error)
            else:
                step = steps.send(reply)
    except StopIteration as end:
        answer: Answer = end.value
        return answer


async def arun(
    steps: Steps[Answer], send: Callable[[Send], Awaitable[Any]], sleep: Callable[[float], Awaitable[object]]
) -> Answer:
    """The same for who awaits."""
    try:
        step = next(steps)
        while True:
            if isinstance(step, Pause):
                await sleep(step.seconds)
                step = next(steps)
                continue
            try:
                reply = await send(step)
            except RequestError as error:
                step = steps.throw(error)
            else:
                step = steps.send(reply)
    except StopIteration as end:
        answer: Answer = end.value
        return answer
