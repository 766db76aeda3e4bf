"""A server's whole process tree: its CPU time, and its end.

Knows processes. A framework's work is spread over workers, proxies and daemons; what counts is what they all cost,
and none of them may outlive the measurement.
"""

from __future__ import annotations

import contextlib
import time

import psutil

_POLL_S = 0.05


class Family:
    """The process `pid` and everything that it started, as seen at each look.

    A member that was seen once stays one, even where its parent has died and it hangs from init.
    """

    def __init__(self, pid: int) -> None:
        self._cpu_s: dict[psutil.Process, float] = {psutil.Process(pid): 0.0}

    def cpu_s(self) -> float:
        """User and system time of all members so far; those that have ended count with their last value."""
        self.look()
        for member in self._cpu_s:
            with contextlib.suppress(psutil.Error):
                times = member.cpu_times()
                self._cpu_s[member] = times.user + times.system
        return sum(self._cpu_s.values())

    def wait(self, seconds: float) -> bool:
        """Whether all members ended within that time."""
        deadline_s = time.monotonic() + seconds
        while self._alive():
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_POLL_S)
        return True

    def kill(self) -> None:
        """Ends every member that is left, at once."""
        for member in self._alive():
            with contextlib.suppress(psutil.Error):
                member.kill()

    def look(self) -> None:
        """Notes who is there; to be called before a member is ended, because orphans cannot be found afterwards."""
        for member in list(self._cpu_s):
            with contextlib.suppress(psutil.Error):
                for child in member.children(recursive=True):
                    self._cpu_s.setdefault(child, 0.0)

    def _alive(self) -> list[psutil.Process]:
        self.look()
        return [member for member in self._cpu_s if _is_alive(member)]


def _is_alive(process: psutil.Process) -> bool:
    """A zombie is dead: where init does not collect its orphans, it would be waited for in vain."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
