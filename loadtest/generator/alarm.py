"""Wakes an event loop at a given nanosecond, instead of at the next millisecond.

asyncio's and uvloop's own timers round to milliseconds (epoll_wait counts in them), which would make every
request of an open loop up to a millisecond late. Linux has a timer that is a file descriptor; the loop
watches it like a socket and wakes within tens of microseconds. Elsewhere the loop's own timer has to do, and
the audit of lateness says what that cost.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from collections.abc import Callable
from typing import Protocol

from convoy.loadtest.units import NS_PER_S

CLOCK_MONOTONIC = 1
TFD_NONBLOCK = os.O_NONBLOCK if sys.platform != "win32" else 0
TFD_TIMER_ABSTIME = 1


class Alarm(Protocol):
    """Calls back once per `set`."""

    name: str

    def set(self, due_ns: int) -> None:
        """Call back when time.monotonic_ns() reaches `due_ns`; at once if that has passed."""

    def close(self) -> None:
        """Calls back no more. May be called again."""


class _TimerSpec(ctypes.Structure):
    """struct itimerspec on a 64-bit Linux."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class TimerFdAlarm:
    """Linux. Raises OSError or AttributeError where the system has no timerfd."""

    name = "timerfd"

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = self._libc.timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._loop = loop
        self._callback = callback
        self._spec = _TimerSpec()
        loop.add_reader(self._fd, self._ring)

    def set(self, due_ns: int) -> None:
        # A zero value would disarm the timer; the monotonic clock never stands at zero in practice.
        self._spec.value_s, self._spec.value_ns = divmod(max(due_ns, 1), NS_PER_S)
        self._libc.timerfd_settime(self._fd, TFD_TIMER_ABSTIME, ctypes.byref(self._spec), None)

    def _ring(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # set anew between the wake-up and this call: it will ring again
        self._callback()

    def close(self) -> None:
        if self._fd >= 0:  # a second close must not hit a descriptor that someone else has got since
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1


class LoopAlarm:
    """Any system: the event loop's own timer, and its precision."""

    name = "event loop"

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None

    def set(self, due_ns: int) -> None:
        self.close()
        self._handle = self._loop.call_at(due_ns / NS_PER_S, self._callback)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()


def make_alarm(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> Alarm:
    """The most precise alarm that this system has."""
    if not sys.platform.startswith("linux"):
        return LoopAlarm(loop, callback)
    try:
        return TimerFdAlarm(loop, callback)
    except (OSError, AttributeError):
        return LoopAlarm(loop, callback)
