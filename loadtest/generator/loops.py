"""The open loop and the closed loop. They decide when requests are sent; a sender sends and records them.

There is no task, future or timer per request, only callbacks.

The open loop sends on schedule, whatever happens to the responses, as independent users do. The closed loop has a fixed
number of clients that wait for their responses, as a batch job does. It slows down with the server, so its latencies
say nothing about users who do not wait.

An alarm wakes the event loop at a given nanosecond. The timers of asyncio and uvloop round to milliseconds, because
epoll_wait does, which would make requests up to a millisecond late. On Linux the alarm is a timerfd, which wakes the
loop within tens of microseconds. On other systems it is the timer of the loop, and the measured delay shows its effect.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from convoy.loadtest.units import NS_PER_S

CLOCK_MONOTONIC = 1
TFD_NONBLOCK = os.O_NONBLOCK if sys.platform != "win32" else 0
TFD_TIMER_ABSTIME = 1


class Alarm(Protocol):
    """Calls a function once per `set`."""

    name: str

    def set(self, due_ns: int) -> None:
        """Call the function when time.monotonic_ns() reaches `due_ns`, at once if that has passed."""

    def close(self) -> None:
        """Make no more calls. May be called again."""


class _TimerSpec(ctypes.Structure):
    """struct itimerspec on a 64-bit Linux."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class TimerFdAlarm:
    """A timerfd of Linux. Raises OSError or AttributeError on other systems."""

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
        # Zero would disarm the timer.
        self._spec.value_s, self._spec.value_ns = divmod(max(due_ns, 1), NS_PER_S)
        self._libc.timerfd_settime(self._fd, TFD_TIMER_ABSTIME, ctypes.byref(self._spec), None)

    def _ring(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # set again between the wake-up and this call, so it will ring again
        self._callback()

    def close(self) -> None:
        if self._fd >= 0:  # a second close must not close a reused descriptor
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1


class LoopAlarm:
    """The timer of the event loop, for any system."""

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
    """The most precise alarm of this system."""
    if not sys.platform.startswith("linux"):
        return LoopAlarm(loop, callback)
    try:
        return TimerFdAlarm(loop, callback)
    except (OSError, AttributeError):
        return LoopAlarm(loop, callback)


POLL_S = 0.02
# After a failed connection in a closed loop. Without it, refused connections to a dead server would use a whole core.
PAUSE_S = 0.1
BURST = 1024  # requests sent before responses are read again, when many are due at once


class Sender(Protocol):
    """Sends requests over HTTP or gRPC."""

    on_done: Callable[[bool], None]
    """Called at the end of each request; False if there was no response."""
    in_flight: int
    waited: int
    """The number of requests that waited for a free connection."""

    async def warm(self, count: int) -> None:
        """Open `count` connections. The run reports those that fail."""

    def fire(self, intended_ns: int, now_ns: int) -> None:
        """Send the next request now, or as soon as a connection is free."""

    async def close(self) -> None:
        """End open requests without recording them. Must be called."""


class OpenLoop:
    """Sends one request at each of `start_ns + offsets_ns`."""

    def __init__(self, sender: Sender, offsets_ns: Sequence[int]) -> None:
        self._sender = sender
        self._offsets_ns = offsets_ns
        self._next = 0
        self._start_ns = 0
        self._alarm = make_alarm(asyncio.get_running_loop(), self._fire_due)
        self.timer = self._alarm.name

    def start(self, start_ns: int) -> None:
        self._start_ns = start_ns
        self._set_alarm()

    @property
    def done(self) -> bool:
        """Whether all requests were sent; responses may be missing."""
        return self._next >= len(self._offsets_ns)

    def stop(self) -> list[int]:
        """Stop sending, and return the due times (ns) of the requests that were not sent."""
        unsent_ns = [self._start_ns + offset_ns for offset_ns in self._offsets_ns[self._next :]]
        self._next = len(self._offsets_ns)
        self._alarm.close()
        return unsent_ns

    def _fire_due(self) -> None:
        for _ in range(BURST):
            if self.done:
                return
            intended_ns = self._start_ns + self._offsets_ns[self._next]
            now_ns = time.monotonic_ns()
            if intended_ns > now_ns:
                break
            self._next += 1
            self._sender.fire(intended_ns, now_ns)
        self._set_alarm()

    def _set_alarm(self) -> None:
        if not self.done:
            self._alarm.set(self._start_ns + self._offsets_ns[self._next])


class ClosedLoop:
    """Keeps `clients` requests in flight, for `duration_s` or until `most` have been sent."""

    timer = "none"

    def __init__(self, sender: Sender, clients: int, duration_s: float, most: int) -> None:
        self._sender = sender
        self._most = most
        self._clients = clients
        self._duration_ns = int(duration_s * NS_PER_S)
        self._end_ns = 0
        self._fired = 0
        self._loop = asyncio.get_running_loop()
        sender.on_done = self._done

    def start(self, start_ns: int) -> None:
        self._end_ns = start_ns + self._duration_ns
        for _ in range(self._clients):
            self._fire()

    @property
    def done(self) -> bool:
        return time.monotonic_ns() >= self._end_ns or self._fired >= self._most

    def stop(self) -> list[int]:
        """Stop sending. A closed loop has no unsent requests."""
        self._end_ns = 0
        return []

    def _done(self, arrived: bool) -> None:
        if arrived:
            self._fire()
        else:
            self._loop.call_later(PAUSE_S, self._fire)

    def _fire(self) -> None:
        now_ns = time.monotonic_ns()
        if now_ns < self._end_ns and self._fired < self._most:
            self._fired += 1
            self._sender.fire(now_ns, now_ns)


Loop = OpenLoop | ClosedLoop


async def until_over(
    loop: Loop, sender: Sender, stopped: asyncio.Event, deadline_s: float, tick: Callable[[], None]
) -> None:
    """Wait until all requests have ended, the deadline (seconds from now) has passed, or `stopped` is set.

    `tick` is called about every 20 ms. It must be quick, because it runs between sending and receiving.
    """
    deadline_ns = time.monotonic_ns() + int(deadline_s * NS_PER_S)
    while not (loop.done and sender.in_flight == 0) and time.monotonic_ns() < deadline_ns:
        tick()
        try:
            await asyncio.wait_for(stopped.wait(), POLL_S)
        except TimeoutError:
            continue
        return
