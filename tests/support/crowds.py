"""Many requests at once, and what became of each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx

from tests.support.servers import Server


@dataclass(frozen=True, slots=True)
class Attempt:
    """One request: when it was sent, and its status, or None where the connection gave no answer."""

    sent_s: float
    status: int | None


def at_once(calls: Sequence[Callable[[], httpx.Response]]) -> list[httpx.Response]:
    """All calls at the same time, each in a thread of its own; the answers in their order."""
    start = threading.Barrier(len(calls))

    def one(call: Callable[[], httpx.Response]) -> httpx.Response:
        start.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(one, calls))


class Crowd:
    """Clients that ask again and again over kept connections until they are told to stop."""

    def __init__(self, server: Server, clients: int, ask: Callable[[httpx.Client], httpx.Response]) -> None:
        self.attempts: list[Attempt] = []
        self._server, self._ask = server, ask
        self._enough = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]

    def __enter__(self) -> Crowd:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        for thread in self._threads:
            thread.join()

    @property
    def answered(self) -> int:
        return sum(attempt.status == 200 for attempt in self.attempts)

    def _run(self) -> None:
        with self._server.client() as client:
            while not self._enough.is_set():
                sent_s = time.monotonic()
                try:
                    status = self._ask(client).status_code
                except httpx.ConnectError:
                    return  # nobody listens any more
                except httpx.TransportError:
                    status = None
                self.attempts.append(Attempt(sent_s, status))
