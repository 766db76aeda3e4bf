"""How far a run is: a bar in a terminal, a line every ten seconds where the output goes into a file."""

from __future__ import annotations

import time
from collections import deque

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn


class BatchProgress:
    """Of `total` images, `done` before this began. Use it as a context; `tick` now and then."""

    def __init__(self, console: Console, total: int, done: int, errors: int) -> None:
        self._console, self._total, self._before = console, total, done
        self.images, self.errors = done, errors
        self._began_s, self._has_begun = time.monotonic(), False
        self._lately: deque[tuple[float, int]] = deque([(self._began_s, done)])
        self._next_line_s = self._began_s + 10.0
        self._bar = (
            Progress(TextColumn("{task.description}"), BarColumn(bar_width=30), console=console, transient=True)
            if console.is_terminal
            else None
        )
        self._task = self._bar.add_task(self._words(), total=total, completed=done) if self._bar else None

    def __enter__(self) -> BatchProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self) -> None:
        """The clock runs from here: an engine is ready."""
        if not self._has_begun:
            self._has_begun, self._began_s = True, time.monotonic()

    def add(self, images: int, errors: int) -> None:
        """More images are done; negative where some have to be done again."""
        self.images += images
        self.errors += errors

    def tick(self) -> None:
        now_s = time.monotonic()
        self._lately.append((now_s, self.images))
        # The rate of the last 30 s: the first images wait for an engine and the disk's cache.
        while now_s - self._lately[0][0] > 30.0 and len(self._lately) > 2:
            self._lately.popleft()
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=self._words(), completed=self.images)
        elif now_s >= self._next_line_s:
            self._next_line_s = now_s + 10.0
            self._console.print(self._words(), highlight=False, soft_wrap=True)

    def summary(self) -> str:
        """What this run has done, and how fast."""
        seconds = time.monotonic() - self._began_s
        labelled = self.images - self._before
        rate = labelled / max(seconds, 1e-9)
        return f"{labelled:,} images in {duration(seconds)} ({rate:,.{0 if rate >= 100 else 1}f}/s)"

    def _words(self) -> str:
        errors = f", {self.errors:,} unreadable" if self.errors else ""
        return f"{self.images:,} of {self._total:,} images{errors}, {self._pace()}"

    def _pace(self) -> str:
        (then_s, then), (now_s, now) = self._lately[0], self._lately[-1]
        if now <= then or now_s <= then_s:
            return "loading"
        rate = (now - then) / (now_s - then_s)
        return f"{rate:,.0f}/s, {duration((self._total - now) / rate)} left"


def duration(seconds: float) -> str:
    """Two units of it."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
