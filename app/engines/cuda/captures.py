"""Coordinates threads while a stream's work is captured as a graph.

If another thread waits for the whole device, or allocates or frees its memory, a capture is invalidated, in whatever
mode, and the other call fails too. So a capture runs alone, and device-wide calls wait for its end; they do not wait
for each other.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

# A capture takes milliseconds, but it may have to wait for a library that opens a large model.
PATIENCE_S = 0.5


class _Thread(threading.local):
    depth = 0  # how many gates the thread is inside of, on any device


_thread = _Thread()


class CaptureGate:
    """The gate of one device. A capture waits until no device-wide call is running, and later ones let it go first.

    It waits `patience_s` at most, and never in a thread that is inside a gate, because the capture may wait for that
    very thread. There are no deadlocks as long as no thread inside a gate waits for another thread that wants one.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._changed = threading.Condition()
        self._patience_s = patience_s
        self._capturing: int | None = None  # the capturing thread
        self._waiting = 0  # captures
        self._inside: Counter[int] = Counter()  # how deep, by thread

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Make a capture inside, from any thread. Raises RuntimeError inside any gate."""
        if _thread.depth:
            raise RuntimeError("a CUDA graph capture would wait for itself; this is a bug")
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: self._capturing is None and not self._inside)
                self._capturing = threading.get_ident()
            finally:
                self._waiting -= 1
                self._changed.notify_all()
        _thread.depth += 1
        try:
            yield
        finally:
            _thread.depth -= 1
            with self._changed:
                self._capturing = None
                self._changed.notify_all()

    @contextmanager
    def beside_others(self) -> Iterator[None]:
        """Do inside what a capture would not survive."""
        own = threading.get_ident()
        with self._changed:
            if not _thread.depth:
                self._changed.wait_for(lambda: self._capturing is None and not self._waiting, self._patience_s)
            self._changed.wait_for(lambda: self._capturing in (None, own))
            self._inside[own] += 1
        _thread.depth += 1
        try:
            yield
        finally:
            _thread.depth -= 1
            with self._changed:
                self._inside[own] -= 1
                if not self._inside[own]:
                    del self._inside[own]
                self._changed.notify_all()
