"""One run, from the first connection to the last answer: the shell around the pure parts.

Knows the event loop, signals and the garbage collector. Gives back rows and leaves their meaning to
statistics and verdict.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from loadtest.loops import ClosedLoop, Loop, OpenLoop, until_over
from loadtest.options import LoadOptions
from loadtest.records import Fault, Problem, Recorder, Records
from loadtest.schedule import arrival_offsets_ns
from loadtest.sender import Sender
from loadtest.statistics import NS_PER_S, Window
from loadtest.target import Target

OPEN_LOOP_FIRST_CONNECTIONS = 64
LAST_WORD_S = 1.0  # beyond the time-out, for the sweep that declares it
TICK_S = 0.5  # the display costs a quarter of a millisecond, during which no answer is read

NEVER_SENT = Problem(Fault.TIMEOUT, "the load generator never came to send it")
NO_ANSWER = Problem(Fault.TIMEOUT, "no answer by the end of the run")


@dataclass(frozen=True, slots=True)
class Progress:
    elapsed_s: float
    good: int
    failed: int
    in_flight: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """`generator_cpu_s` is this process's CPU time over `wall_s`; `waited` requests found no free connection."""

    records: Records
    window: Window
    interrupted: bool
    waited: int
    generator_cpu_s: float
    wall_s: float
    event_loop: str
    timer: str


def measure(target: Target, options: LoadOptions, show: Callable[[Progress], None]) -> Measurement:
    """Runs the load. Ctrl-C ends it early and is not an error: the measurement says `interrupted`."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_measure(target, options, show))


async def _measure(target: Target, options: LoadOptions, show: Callable[[Progress], None]) -> Measurement:
    recorder = Recorder()
    sender = Sender(
        target.endpoint,
        target.ammunition,
        recorder,
        connections=options.clients or options.connections,
        timeout_s=options.timeout_s,
    )
    loop = _make_loop(sender, options)
    try:
        await sender.warm(options.clients or min(options.connections, OPEN_LOOP_FIRST_CONNECTIONS))
        with _stop_on_interrupt() as stopped, _no_garbage_collection():
            return await _run(loop, sender, recorder, options, stopped, show)
    finally:
        loop.stop()
        await sender.close()


async def _run(
    loop: Loop,
    sender: Sender,
    recorder: Recorder,
    options: LoadOptions,
    stopped: asyncio.Event,
    show: Callable[[Progress], None],
) -> Measurement:
    cpu_s, start_ns = time.process_time(), time.monotonic_ns()
    loop.start(start_ns)
    ticker = _Ticker(start_ns, recorder, sender, show)
    await until_over(loop, sender, stopped, options.duration_s + options.timeout_s + LAST_WORD_S, ticker)
    now_ns = time.monotonic_ns()
    unsent_ns = loop.stop()
    interrupted = stopped.is_set()
    if not interrupted:
        _close_the_books(recorder, unsent_ns, now_ns)
    end_ns = start_ns + int(options.duration_s * NS_PER_S)
    return Measurement(
        records=recorder.freeze(),
        window=Window(
            run_start_ns=start_ns,
            start_ns=start_ns + int(options.warm_up_cut_s * NS_PER_S),
            end_ns=min(end_ns, now_ns) if interrupted else end_ns,
        ),
        interrupted=interrupted,
        waited=sender.waited,
        generator_cpu_s=time.process_time() - cpu_s,
        wall_s=(now_ns - start_ns) / NS_PER_S,
        event_loop=type(asyncio.get_running_loop()).__module__.split(".")[0],
        timer=loop.timer,
    )


def _close_the_books(recorder: Recorder, unsent_ns: list[int], now_ns: int) -> None:
    """Every request that was due has an end: a request left out would be a failure left out."""
    recorder.fail_pending(now_ns, NO_ANSWER)
    for intended_ns in unsent_ns:
        recorder.fail(recorder.begin(intended_ns, now_ns), now_ns, NEVER_SENT)


def _make_loop(sender: Sender, options: LoadOptions) -> Loop:
    if options.rate is None:
        assert options.clients is not None
        return ClosedLoop(sender, options.clients, options.duration_s)
    return OpenLoop(sender, arrival_offsets_ns(options.arrivals, options.rate, options.duration_s, options.seed))


class _Ticker:
    """Shows the progress now and then."""

    def __init__(self, start_ns: int, recorder: Recorder, sender: Sender, show: Callable[[Progress], None]) -> None:
        self._start_ns = start_ns
        self._recorder = recorder
        self._sender = sender
        self._show = show
        self._due_ns = 0

    def __call__(self) -> None:
        now_ns = time.monotonic_ns()
        if now_ns < self._due_ns:
            return
        self._due_ns = now_ns + int(TICK_S * NS_PER_S)
        elapsed_s = (now_ns - self._start_ns) / NS_PER_S
        self._show(Progress(elapsed_s, self._recorder.good, self._recorder.failed, self._sender.in_flight))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed: a third of the CPU per request. None: asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


@contextlib.contextmanager
def _stop_on_interrupt() -> Iterator[asyncio.Event]:
    """Ctrl-C sets the event, once; a second one ends the program as usual."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        stopped.set()
        loop.remove_signal_handler(signal.SIGINT)

    try:
        loop.add_signal_handler(signal.SIGINT, stop)
    except (ValueError, RuntimeError, NotImplementedError):  # not in the main thread, or not on this system
        yield stopped
        return
    try:
        yield stopped
    finally:
        loop.remove_signal_handler(signal.SIGINT)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection of a heap of a million rows takes tens of milliseconds, and all would look like the server's."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
