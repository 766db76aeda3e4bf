"""The progress of a build, and the time that it has left.

`progress_monitor` is the thin link to TensorRT. The bindings would swallow an exception raised in a callback, so errors
are kept and raised after the build.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from convoy.models.errors import JobError
from convoy.models.plans import BuildEvent

# TensorRT reports every kernel that it times; a reader needs a few lines per second.
_SHORTEST_INTERVAL_S = 0.2
_POLL_S = 0.2


class BuildWatch:
    """One build's progress and its limit in seconds; None means no limit.

    `tell` is called with every important event. If it raises OSError, no one is listening any more, and the build is
    stopped.
    """

    def __init__(
        self,
        tell: Callable[[BuildEvent], None],
        limit_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.notes: list[str] = []
        self._tell = tell
        self._limit_s = limit_s
        self._clock = clock
        self._sleep = sleep
        self._start_s = clock()
        self._told_s = self._start_s
        self._totals: dict[str, int] = {}
        self._stopped: str | None = None

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._start_s

    def note(self, text: str) -> None:
        """Report something worth logging; it is also kept in the plan's record."""
        self.notes.append(text)
        self._emit(BuildEvent("note", text, self.elapsed_s))

    def start(self, phase: str, parent: str | None, total: int) -> None:
        """A phase of `total` steps begins."""
        self._totals[phase] = total
        self._emit(BuildEvent("progress", phase, self.elapsed_s, parent, 0, total))

    def advance(self, phase: str, done: int) -> bool:
        """Count finished steps of the phase. Returns False if the build must stop."""
        if self._clock() - self._told_s >= _SHORTEST_INTERVAL_S:
            self._emit(BuildEvent("progress", phase, self.elapsed_s, None, done, self._totals.get(phase, 0)))
        return self._may_go_on()

    def finish(self, phase: str) -> None:
        """The phase has ended."""
        total = self._totals.pop(phase, 0)
        self._emit(BuildEvent("progress", phase, self.elapsed_s, None, total, total))

    def pause(self) -> None:
        """Wait a moment for another build. Raises JobError when the time is up."""
        self._sleep(_POLL_S)
        self.check()

    def check(self) -> None:
        """Raise JobError if the build was or must be stopped."""
        if not self._may_go_on():
            raise JobError(self._stopped)

    def _may_go_on(self) -> bool:
        if self._stopped is None and self._limit_s is not None and self.elapsed_s > self._limit_s:
            self._stopped = (
                f"the build exceeded {self._limit_s:g} s; raise --time-limit-s, or ask for fewer batch sizes"
            )
        return self._stopped is None

    def _emit(self, event: BuildEvent) -> None:
        self._told_s = self._clock()
        try:
            self._tell(event)
        except OSError as error:
            self._stopped = f"the progress is not read any more ({error.strerror}), so the build was stopped"


def progress_monitor(trt: Any, watch: BuildWatch) -> Any:
    """TensorRT's progress monitor for `watch`; it is also the only way to stop a build."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            watch.start(phase_name, parent_phase or None, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            return watch.advance(phase_name, step + 1)

        def phase_finish(self, phase_name: str) -> None:
            watch.finish(phase_name)

    return Monitor()
