"""A process that the supervisor has started, and the line to it."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from convoy.app.processes.control import DRAINED, SERVING
from convoy.app.processes.orders import command, environment

_Orders = Callable[[int], object]


class Child:
    """One process. `is_serving` once it said so; `left` is how many calls it could not answer in time."""

    def __init__(self, module: str, orders: _Orders, inherited: Iterable[int]) -> None:
        """`orders` makes the child's orders, given the descriptor of its end of the line."""
        self._line, its_end = socket.socketpair()
        self._line.setblocking(False)
        line, descriptor = command(module, orders(its_end.fileno()))
        try:
            fds = (*inherited, its_end.fileno(), descriptor)
            self._process = subprocess.Popen(line, pass_fds=fds, env=environment(), stdin=subprocess.DEVNULL)
        finally:
            os.close(descriptor)
            its_end.close()
        self._started_s = time.monotonic()
        self.is_serving = False
        self.left: int | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lived_s(self) -> float:
        return time.monotonic() - self._started_s

    def exit_code(self) -> int | None:
        """None while it lives; below 0 the signal that ended it."""
        return self._process.poll()

    def fileno(self) -> int:
        """Of the supervisor's end of the line."""
        return self._line.fileno()

    def tell(self, word: str) -> None:
        with suppress(OSError):  # it has just died, and will be seen to have
            self._line.send(word.encode() + b"\n")

    def listen(self) -> bool:
        """Take what it has said; False once it can say no more."""
        try:
            words = self._line.recv(4096).decode().split()
        except OSError:
            return False
        has_spoken = bool(words)
        while words:
            word = words.pop(0)
            if word == SERVING:
                self.is_serving = True
            elif word == DRAINED:
                self.left = int(words.pop(0))
        return has_spoken

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._line.close()
