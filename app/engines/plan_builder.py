"""Builds each plan in a child process, which is watched, bounded and killed with its parent, during serving or ahead of
it.

Knows how to start the builder, how to read its messages and when to kill it. A build never raises, because serving does
not depend on it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from asyncio import StreamReader
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from convoy.app.engines.memory import resident_bytes
from convoy.models.errors import FileRefused
from convoy.models.gpus import PORTABLE
from convoy.models.plans import BuildEvent, BuildOptions, BuildState, LibraryName, PlanBuild
from convoy.models.records import from_jsonable

_log = logging.getLogger("convoy")
_LONGEST_LINE_BYTES = 1 << 20
_KEPT_COMPLAINT_BYTES = 4096


@dataclass(frozen=True, slots=True)
class BuildOrder:
    """A plan to build into a cache. `capabilities` is as in `convoy.models.plans.PlanTarget`.

    `gpu` is CUDA's number in this process, for a library that builds on the GPU itself. If a server uses that GPU,
    `beside_mb` MiB of its memory may be used to try kernels; None means that none does.
    """

    onnx: Path
    plan_cache: Path
    options: BuildOptions
    gpu: int = 0
    library: LibraryName = "tensorrt"
    capabilities: tuple[str, ...] = ()
    beside_mb: int | None = None


@dataclass(frozen=True, slots=True)
class BuildLimits:
    """The limits of a build. The builder is told `time_limit_s` and killed `grace_s` after that."""

    time_limit_s: float = 1800.0
    grace_s: float = 30.0
    memory_bytes: int = 16 << 30
    niceness: int = 10


class _BuildFailed(Exception):
    """The build ended without a plan; the message says why and what to do. `refused` is as in `PlanBuild`."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class PlanBuilder:
    """Builds one plan at a time per GPU; others wait. Tests replace `command`, the clock and the pause."""

    def __init__(
        self,
        limits: BuildLimits | None = None,
        *,
        command: tuple[str, ...] = (sys.executable, "-m", "convoy.export.to_tensorrt"),
        now_s: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        memory_of: Callable[[int], int] = resident_bytes,
    ) -> None:
        self._limits = limits or BuildLimits()
        self._command = command
        self._now_s, self._pause, self._memory_of = now_s, pause, memory_of
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def build(self, order: BuildOrder, report: Callable[[PlanBuild], None]) -> PlanBuild:
        """Build a plan and return how it ended; `report` is called at every step. Cancelling kills the child."""
        report(PlanBuild("waiting"))
        build = _Build(report)
        try:
            visible = visible_device(order.gpu, os.environ.get("CUDA_VISIBLE_DEVICES"))
            async with self._turns[visible]:
                await self._run(order, visible, build)
        except _BuildFailed as failure:
            build.now(state="failed", reason=str(failure), refused=failure.refused)
        except OSError as error:
            build.now(state="failed", reason=f"cannot start the builder: {error}")
        except Exception as error:  # a bug, which must not cost more than the plan
            _log.exception("building a plan failed; this is a bug")
            build.now(state="failed", reason=f"{type(error).__name__}: {error}")
        return build.progress

    async def _run(self, order: BuildOrder, visible: str, build: _Build) -> None:
        started_s = self._now_s()
        build.elapsed_s = lambda: round(self._now_s() - started_s, 1)
        build.now(state="building")
        process = await asyncio.create_subprocess_exec(
            *self._command,
            *_arguments(order, self._limits),
            env=os.environ | {"CUDA_VISIBLE_DEVICES": visible},
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            limit=_LONGEST_LINE_BYTES,
            start_new_session=True,  # its own process group, so that its children die with it
        )
        with suppress(ProcessLookupError):
            # Never less nice than this process: only root can do that.
            own = os.getpriority(os.PRIO_PROCESS, process.pid)
            os.setpriority(os.PRIO_PROCESS, process.pid, max(own, self._limits.niceness))
        ending = asyncio.ensure_future(_attend(process, build))
        guard = asyncio.ensure_future(self._guard(process, started_s))
        try:
            await asyncio.wait({ending, guard}, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                guard.result()  # it took too long
            how = ending.result()
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            for task in (ending, guard):
                task.cancel()
            await asyncio.gather(ending, guard, process.wait(), return_exceptions=True)
        if build.progress.state != "built":
            raise _BuildFailed(build.refusal or how, refused=process.returncode == FileRefused.exit_code)

    async def _guard(self, process: Process, started_s: float) -> None:
        """Raise _BuildFailed if the child exceeds its limits. Otherwise runs until cancelled.

        Memory is watched and not limited with RLIMIT_AS or RLIMIT_DATA, because CUDA reserves hundreds of gigabytes of
        addresses that it never uses and would not start.
        """
        limits = self._limits
        while True:
            await self._pause(1.0)
            if self._now_s() - started_s > limits.time_limit_s + limits.grace_s:
                raise _BuildFailed(f"it did not finish within {limits.time_limit_s:g} s and was killed")
            used_bytes = self._memory_of(process.pid)
            if used_bytes > limits.memory_bytes:
                raise _BuildFailed(
                    f"it used {used_bytes >> 20} MiB of memory, more than the {limits.memory_bytes >> 20} MiB allowed, "
                    "and was killed; build the plan where there is more memory, TensorRT's on the same kind of GPU"
                )


class _Build:
    """The progress of one build, reported with every change."""

    def __init__(self, report: Callable[[PlanBuild], None]) -> None:
        self._report = report
        self.progress = PlanBuild("waiting")
        self.refusal: str | None = None  # the builder's own message, after it has failed
        self.elapsed_s: Callable[[], float] = lambda: 0.0

    def now(
        self, *, state: BuildState, reason: str | None = None, plan: Path | None = None, refused: bool = False
    ) -> None:
        """Change the state, in whatever phase it is."""
        elapsed_s = self.elapsed_s()
        self._tell(replace(self.progress, state=state, reason=reason, plan=plan, refused=refused, elapsed_s=elapsed_s))

    def hear(self, event: BuildEvent) -> None:
        """Handle a message of the builder."""
        match event.kind:
            case "progress" if event.parent is None:
                position = replace(self.progress, phase=event.text, step=event.step, total=event.total)
                self._tell(replace(position, elapsed_s=self.elapsed_s()))
            case "progress":
                pass  # there are hundreds of nested phases
            case "note":
                _log.info("building a plan: %s", event.text)
            case "done":
                self.now(state="built", plan=Path(event.text))
            case "failed":
                self.refusal = event.text

    def _tell(self, progress: PlanBuild) -> None:
        self.progress = progress
        self._report(progress)


def visible_device(gpu: int, current: str | None) -> str:
    """The value of CUDA_VISIBLE_DEVICES that shows only GPU number `gpu` of the current value."""
    if current is None:
        return str(gpu)
    names = [name.strip() for name in current.split(",")]
    if not (0 <= gpu < len(names) and names[gpu]):
        raise _BuildFailed(f"there is no GPU {gpu} in CUDA_VISIBLE_DEVICES={current}")
    return names[gpu]


def _arguments(order: BuildOrder, limits: BuildLimits) -> list[str]:
    options = order.options
    arguments = [
        str(order.onnx),
        *("--plan-cache", str(order.plan_cache)),
        *("--library", order.library),
        *("--for", ",".join(order.capabilities) or PORTABLE),
        *("--precision", options.precision),
        *("--batch-sizes", ",".join(map(str, options.batch_sizes))),
        *("--hardware-compatibility", options.hardware_compatibility),
        *("--time-limit-s", f"{limits.time_limit_s:g}"),
        "--json-progress",
    ]
    if options.workspace_mb is not None:
        arguments += ["--workspace-mb", str(options.workspace_mb)]
    if order.beside_mb is not None:
        arguments += ["--beside-mb", str(order.beside_mb)]
    return arguments


async def _attend(process: Process, build: _Build) -> str:
    """Listen until the child has ended, and return its result. Raises _BuildFailed for an end without a message."""
    assert process.stdout is not None
    assert process.stderr is not None
    _, complaint = await asyncio.gather(_listen(process.stdout, build), _final_error(process.stderr))
    code = await process.wait()
    how = f"the builder was killed by signal {-code}" if code < 0 else f"the builder exited with code {code}"
    return f"{how}: {complaint}" if complaint else how


async def _listen(stdout: StreamReader, build: _Build) -> None:
    while True:
        try:
            line = await stdout.readline()
        except ValueError as error:
            raise _BuildFailed(f"the builder wrote a line of more than {_LONGEST_LINE_BYTES} bytes") from error
        if not line:
            return
        try:
            event = from_jsonable(BuildEvent, json.loads(line), "the builder's event")
        except ValueError:  # libraries may write anything to stdout
            continue
        build.hear(event)


async def _final_error(stderr: StreamReader) -> str:
    """The last line of the child's stderr, which is read throughout so that the child never blocks."""
    kept = b""
    while chunk := await stderr.read(_KEPT_COMPLAINT_BYTES):
        kept = (kept + chunk)[-_KEPT_COMPLAINT_BYTES:]
    lines = [line.strip() for line in kept.decode(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")
