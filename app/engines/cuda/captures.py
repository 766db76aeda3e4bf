"""Who may do what while a stream's work is recorded as a graph.

A capture does not survive that another thread waits for the whole device, or allocates or frees its memory: it is
invalidated, whatever mode it was begun in, and the other call fails too. So a capture is alone, and everything
device-wide waits for its end; device-wide calls do not wait for each other. Knows threads; knows nothing of CUDA.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

# A capture lasts milliseconds, but what it waits for may be a library that opens a large model.
PATIENCE_S = 0.5


class _Thread(threading.local):
    depth = 0  # in how many gates' managers the thread is, of whatever device


_thread = _Thread()


class CaptureGate:
    """One device's. A capture waits until nothing device-wide is under way, and what comes later lets it go first.

    For `patience_s` at most, and never in a thread that is inside of any gate: the waiting capture may be waiting for
    that very thread. No thread waits for a circle of others, as long as none that is inside of a gate waits for
    another thread that wants one.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._changed = threading.Condition()
        self._patience_s = patience_s
        self._capturing: int | None = None  # the thread
        self._waiting = 0  # captures
        self._inside: Counter[int] = Counter()  # how deep, by thread

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A capture is made inside, by whatever thread. Raises RuntimeError inside of any gate."""
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
        """What a capture would not survive is done inside."""
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
