"""The line between the supervisor and a process that it started: one word a line, each way.

    down    leave    say that the server is not ready any more
            drain    take no new call, answer those that have begun, then say `drained`
            exit     end, now that nobody needs you
    up      serving           a core that is ready, an edge that accepts
            drained N         N calls were not answered in time

A process that is started here dies with the supervisor, and leaves the signals of a terminal or of a container
to it.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable

_log = logging.getLogger("convoy")
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
LEAVE, DRAIN, EXIT = "leave", "drain", "exit"
SERVING, DRAINED = "serving", "drained"


def belong_to(parent_pid: int) -> None:
    """Die when the supervisor does, however it does, and heed nobody else's signals."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)  # it died before we could ask to be told


class ControlLine:
    """The child's end. `on_word` is called with each word of the supervisor's."""

    def __init__(self, descriptor: int, on_word: Callable[[str], None]) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(False)
        self._on_word = on_word

    def listen(self) -> None:
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._read)

    def say(self, *words: object) -> None:
        """A line of so few bytes always fits."""
        self._socket.send(" ".join(map(str, words)).encode() + b"\n")

    def _read(self) -> None:
        for word in self._socket.recv(4096).decode().split():
            self._on_word(word)


class Orderly:
    """What a child does at each word: `leave` at once, `drain` and then say how many were left, `exit`."""

    def __init__(
        self,
        line: int,
        *,
        leave: Callable[[], None],
        drain: Callable[[], Awaitable[int]],
        exit_now: Callable[[], None],
    ) -> None:
        self._leave, self._drain, self._exit = leave, drain, exit_now
        self._draining: asyncio.Task[None] | None = None
        self.line = ControlLine(line, self._obey)

    def _obey(self, word: str) -> None:
        if word == LEAVE:
            self._leave()
        elif word == DRAIN:
            self._draining = asyncio.get_running_loop().create_task(self._drain_and_say())
        elif word == EXIT:
            self._exit()

    async def _drain_and_say(self) -> None:
        self.line.say(DRAINED, await self._drain())
