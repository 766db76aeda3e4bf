"""Runs one generator process, from its job to its last message.

It stops when the pipe from the parent closes, which happens however the parent ends, so no generator outlives its
parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator

import msgspec

from convoy.loadtest.generator.job import READY, Finished, GeneratorJob, line_of
from convoy.loadtest.generator.loops import ClosedLoop, Loop, OpenLoop, Sender, until_over
from convoy.loadtest.problems import Fault, Problem
from convoy.loadtest.rows import Recorder, Rows
from convoy.loadtest.units import NS_PER_S

STDIN, STDOUT = 0, 1
LAST_WORD_S = 5.0  # after the timeout, for the check that finds it; a busy machine may be late by a second

NEVER_SENT = Problem(Fault.GENERATOR, "the load generator had no time to send it")
NO_ANSWER = Problem(Fault.TIMEOUT, "no answer by the end of the run")


def main() -> None:
    """Read the job from the standard input, report readiness, run, and write the last message."""
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=GeneratorJob)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_generate(job))


async def _generate(job: GeneratorJob) -> None:
    recorder = Recorder(Rows.over(memoryview(mmap.mmap(job.rows_descriptor, 0)), job.capacity))
    parent = _Parent()
    sender = _make_sender(job, recorder)
    loop = _make_loop(job, sender)
    try:
        await sender.warm(job.first_connections)
        os.write(STDOUT, READY + b"\n")
        start_ns = await parent.start()
        if start_ns is not None:
            with _no_garbage_collection():
                finished = await _run(job, loop, sender, recorder, start_ns, parent.stopped)
            os.write(STDOUT, line_of(finished))
    finally:
        loop.stop()
        await sender.close()


async def _run(
    job: GeneratorJob, loop: Loop, sender: Sender, recorder: Recorder, start_ns: int, stopped: asyncio.Event
) -> Finished:
    cpu_s = time.process_time()
    if job.clients:
        await sleep_until(start_ns)
    loop.start(start_ns)
    deadline_s = (start_ns - time.monotonic_ns()) / NS_PER_S + job.duration_s + job.timeout_s + LAST_WORD_S
    await until_over(loop, sender, stopped, deadline_s, recorder.publish)
    unsent_ns = loop.stop()
    if not stopped.is_set():
        _close_the_books(recorder, unsent_ns, time.monotonic_ns())
    recorder.publish()
    return Finished(
        problems=tuple(recorder.problems),
        waited=sender.waited,
        cpu_s=time.process_time() - cpu_s,
        event_loop=type(asyncio.get_running_loop()).__module__.split(".")[0],
        timer=loop.timer,
        stopped=stopped.is_set(),
    )


async def sleep_until(start_ns: int) -> None:
    """Sleep until the start, not less: a timer may fire a millisecond early, and early requests do not count."""
    while (left_ns := start_ns - time.monotonic_ns()) > 0:  # noqa: ASYNC110 - waits for a time
        await asyncio.sleep(left_ns / NS_PER_S)


def _close_the_books(recorder: Recorder, unsent_ns: list[int], now_ns: int) -> None:
    """End every request that was due, because a missing request would be a missing failure."""
    recorder.fail_pending(now_ns, NO_ANSWER)
    for intended_ns in unsent_ns:
        recorder.finish(recorder.begin(intended_ns, now_ns), now_ns, NEVER_SENT)


def _make_sender(job: GeneratorJob, recorder: Recorder) -> Sender:
    """The sender of the protocol. The library of the other one is not imported."""
    endpoint, request_pool = job.endpoint, job.request_pool()
    connections, timeout_s = job.connections, job.timeout_s
    if job.protocol == "grpc":
        from convoy.loadtest.generator.grpc_sender import GrpcSender

        return GrpcSender(endpoint, request_pool, recorder, connections=connections, timeout_s=timeout_s)
    from convoy.loadtest.generator.http_sender import HttpSender

    return HttpSender(endpoint, request_pool, recorder, connections=connections, timeout_s=timeout_s)


def _make_loop(job: GeneratorJob, sender: Sender) -> Loop:
    if job.clients is None:
        return OpenLoop(sender, job.offsets_ns())
    return ClosedLoop(sender, job.clients, job.duration_s, job.capacity)


class _Parent:
    """Messages of the parent: a line with the start time, then the end of the pipe, which means stop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._said = b""
        self._spoke = asyncio.Event()
        self.stopped = asyncio.Event()
        os.set_blocking(STDIN, False)
        self._loop.add_reader(STDIN, self._read)

    async def start(self) -> int | None:
        """The start time; None if the parent has ended or cancelled the run."""
        await self._spoke.wait()
        return int(self._said) if b"\n" in self._said else None

    def _read(self) -> None:
        try:
            said = os.read(STDIN, 4096)
        except BlockingIOError:
            return
        self._said += said
        if not said:
            self._loop.remove_reader(STDIN)
            self.stopped.set()
        if not said or b"\n" in said:
            self._spoke.set()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop if it is installed, which needs a third of the CPU per request; None means asyncio's own loop."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """No collections, whose milliseconds would count as latency of the server."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()
