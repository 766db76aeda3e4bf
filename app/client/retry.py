"""The retry policy: how often a request is sent, and for how long.

The policy is `Tries`, without sockets and sleeps; `ask` applies it in a thread, `ask_async` on an event loop.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, Generic, NamedTuple, TypeVar

from convoy.models.errors import DeadlineExceeded, Overloaded, Unavailable

Answer = TypeVar("Answer")


class WireQuestion(NamedTuple, Generic[Answer]):
    """One request over one protocol: what to send, given the remaining seconds, and how to read the reply.

    `read` raises RequestError for an error reply.
    """

    build: Callable[[float], Any]
    read: Callable[[Any], Answer]


class Tries:
    """The tries of one request: repeated after temporary failures, which are 429, 503 and failed connections.

    Waits as long as the server's Retry-After says, otherwise from 0.1 to 5 s, with up to a quarter of random jitter, so
    that clients that were refused together do not return together. If the wait would exceed `timeout_s`, the error is
    raised at once. Inference changes nothing on a server, so repeating it is safe.
    """

    def __init__(
        self,
        timeout_s: float,
        retries: int,
        now_s: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._timeout_s, self._retries, self._now_s, self._draw = timeout_s, retries, now_s, draw
        self._until_s, self._pause_s = now_s() + timeout_s, 0.1

    def left_s(self) -> float:
        """Seconds that a try may take. Raises DeadlineExceeded."""
        left_s = self._until_s - self._now_s()
        if left_s <= 0:
            raise DeadlineExceeded(f"no response within {self._timeout_s:g} s; raise the timeout, or send less")
        return left_s

    def pause_s(self, refusal: Overloaded | Unavailable) -> float:
        """Seconds until the next try. Raises the error if there is none."""
        wait_s = max(refusal.retry_after_s or 0.0, self._pause_s) * (1 + self._draw() / 4)
        if not self._retries or self._now_s() + wait_s >= self._until_s:
            raise refusal
        self._retries -= 1
        self._pause_s = min(2 * self._pause_s, 5.0)
        return wait_s


def ask(
    question: WireQuestion[Answer],
    tries: Tries,
    send: Callable[[Any, float], Any],
    sleep: Callable[[float], object] = time.sleep,
) -> Answer:
    """Send in this thread. `send` takes a message and the seconds for it. Raises the last try's RequestError."""
    while True:
        left_s = tries.left_s()
        try:
            return question.read(send(question.build(left_s), left_s))
        except (Overloaded, Unavailable) as refusal:
            wait_s = tries.pause_s(refusal)
        sleep(wait_s)


async def ask_async(
    question: WireQuestion[Answer], tries: Tries, send: Callable[[Any, float], Awaitable[Any]]
) -> Answer:
    """The same on an event loop."""
    while True:
        left_s = tries.left_s()
        try:
            return question.read(await send(question.build(left_s), left_s))
        except (Overloaded, Unavailable) as refusal:
            wait_s = tries.pause_s(refusal)
        await asyncio.sleep(wait_s)
