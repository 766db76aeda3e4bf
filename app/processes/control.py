"""The line between the supervisor and a process that it started: one word a line, each way.

    down    leave    say that the server is not ready any more
            drain    take no new call, answer those that have begun, then say `drained`
            reload   to the core alone: read the options again
            exit     end, now that nobody needs you
    up      serving           a core that is ready, an edge that accepts
            drained N         N calls were not answered in time

A process that is started here dies with the supervisor, and leaves the signals of a terminal or of a container
to it.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the supervisor imports this, and next to nothing else
    from convoy.app.submission.open_calls import OpenCalls

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
LEAVE, DRAIN, EXIT, RELOAD = "leave", "drain", "exit", "reload"
SERVING, DRAINED = "serving", "drained"


def belong_to(parent_pid: int) -> None:
    """Die when the supervisor does, however it does, and heed nobody else's signals."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)  # it died before we could ask to be told


class ControlLine:
    """The child's end, and what it does at each word: `drain` says how many calls were left."""

    def __init__(
        self,
        descriptor: int,
        calls: OpenCalls,
        drain: Callable[[], Awaitable[int]],
        exit_now: Callable[[], None],
        read_again: Callable[[], None] = lambda: None,
    ) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(False)
        self._calls, self._drain, self._exit, self._read_again = calls, drain, exit_now, read_again
        self._draining: asyncio.Task[None] | None = None

    def listen(self) -> None:
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._read)

    def say(self, *words: object) -> None:
        """A line of so few bytes always fits."""
        self._socket.send(" ".join(map(str, words)).encode() + b"\n")

    def _read(self) -> None:
        for word in self._socket.recv(4096).decode().split():
            if word == LEAVE:
                self._calls.leaving = True
            elif word == DRAIN:
                self._draining = asyncio.get_running_loop().create_task(self._drain_and_say())
            elif word == EXIT:
                self._exit()
            elif word == RELOAD:
                self._read_again()

    async def _drain_and_say(self) -> None:
        self.say(DRAINED, await self._drain())
