"""While one thread captures a graph, another one does what loading a model does: who fails, and with what?

Every pair of the capture's mode and the other thread's is tried with every call. The documents say which calls are
"potentially unsafe" and that a thread's own mode decides; libraries' issues say that a wait for the whole device
spoils every capture all the same. The lock that the server holds while it captures rests on this table.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from tests.gpu.proof.experiment import Bench, Judgement, Ran
from tests.gpu.proof.experiments.cudart import NON_BLOCKING, TO_HOST, Runtime, open_runtime

MODES = {
    "global": "cudaStreamCaptureModeGlobal",
    "thread-local": "cudaStreamCaptureModeThreadLocal",
    "relaxed": "cudaStreamCaptureModeRelaxed",
}
_NBYTES = 1 << 20
_MARK = 7
_WAIT_S = 10.0
_PORTABLE = 1
# What the cells made lives as long as the process: pages that are locked must not go away.
_kept: list[_Other] = []


@dataclass(slots=True)
class _Other:
    """What the other thread has at hand, all of it made before the capture began."""

    runtime: Runtime
    stream: Any
    event: Any
    device_memory: int
    host_memory: int
    pages: mmap.mmap

    @property
    def pages_address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.pages))


# Each gives the status of the call that it is named after.
CALLS: Mapping[str, Callable[[_Other], int]] = {
    "cudaDeviceSynchronize": lambda other: other.runtime.status("cudaDeviceSynchronize"),
    "cudaStreamSynchronize": lambda other: other.runtime.status("cudaStreamSynchronize", other.stream),
    "cudaEventSynchronize": lambda other: other.runtime.status("cudaEventSynchronize", other.event),
    "cudaEventQuery": lambda other: other.runtime.status("cudaEventQuery", other.event),
    "cudaMalloc": lambda other: other.runtime.status("cudaMalloc", _NBYTES),
    "cudaFree": lambda other: other.runtime.status("cudaFree", other.device_memory),
    "cudaHostAlloc": lambda other: other.runtime.status("cudaHostAlloc", _NBYTES, _PORTABLE),
    "cudaFreeHost": lambda other: other.runtime.status("cudaFreeHost", other.host_memory),
    "cudaHostRegister": lambda other: other.runtime.status("cudaHostRegister", other.pages_address, _NBYTES, _PORTABLE),
    "cudaMemGetInfo": lambda other: other.runtime.status("cudaMemGetInfo"),
    "cudaStreamCreateWithFlags": lambda other: other.runtime.status("cudaStreamCreateWithFlags", NON_BLOCKING),
}


def collide(bench: Bench, calls: list[str]) -> None:
    """The table for these calls: two figures a cell, the status of the call and that of the capture's end."""
    runtime = open_runtime()
    for call, captured, threads in product(calls, ("thread-local", "global", "relaxed"), ("thread-local", "global")):
        where = f"{call}, capture {captured}, thread {threads}"
        bench.step(where)
        said, ended = _collide(runtime, CALLS[call], captured, threads)
        bench.figure(f"{where}: call", said)
        bench.figure(f"{where}: capture", ended)
    bench.step("a capture that nobody disturbs, after all of these")
    bench.figure("afterwards", _collide(runtime, lambda other: 0, "thread-local", "thread-local")[1])


def _collide(runtime: Runtime, call: Callable[[_Other], int], captured: str, threads: str) -> tuple[int, int]:
    """(the call's status, the capture's): 0 is well, -1 is a thread that did not come back or a replay gone wrong."""
    stream = runtime.cudaStreamCreateWithFlags(NON_BLOCKING)
    memory, host = runtime.cudaMalloc(_NBYTES), runtime.cudaHostAlloc(_NBYTES, _PORTABLE)
    other = _Other(
        runtime,
        runtime.cudaStreamCreateWithFlags(NON_BLOCKING),
        runtime.cudaEventCreateWithFlags(0),
        runtime.cudaMalloc(_NBYTES),
        runtime.cudaHostAlloc(_NBYTES, _PORTABLE),
        mmap.mmap(-1, _NBYTES),
    )
    _kept.append(other)
    runtime.cudaEventRecord(other.event, other.stream)
    runtime.cudaStreamSynchronize(other.stream)
    said = [-1]

    def disturb() -> None:
        runtime.cudaSetDevice(0)
        runtime.cudaThreadExchangeStreamCaptureMode(_mode(runtime, threads))
        said[0] = call(other)

    runtime.cudaStreamBeginCapture(stream, _mode(runtime, captured))
    runtime.status("cudaMemsetAsync", memory, _MARK, _NBYTES, stream)
    thread = threading.Thread(target=disturb, daemon=True)
    thread.start()
    thread.join(_WAIT_S)
    runtime.status("cudaMemsetAsync", memory, _MARK, _NBYTES, stream)
    status, graph = runtime.module.cudaStreamEndCapture(stream)
    ended = int(status)
    if not ended:
        ended = 0 if _replays(runtime, graph, stream, memory, host) else -1
    # Whatever a failed call left as the runtime's last error.
    runtime.status("cudaGetLastError")
    runtime.status("cudaStreamDestroy", stream)
    return said[0], ended


def _replays(runtime: Runtime, graph: Any, stream: Any, memory: int, host: int) -> bool:
    whole = runtime.cudaGraphInstantiate(graph, 0)
    runtime.cudaGraphLaunch(whole, stream)
    runtime.copy(host, memory, _NBYTES, TO_HOST, stream)
    runtime.cudaStreamSynchronize(stream)
    seen = ctypes.string_at(host, _NBYTES)
    runtime.cudaGraphExecDestroy(whole)
    runtime.cudaGraphDestroy(graph)
    return seen == bytes([_MARK]) * _NBYTES


def _mode(runtime: Runtime, name: str) -> Any:
    return getattr(runtime.module.cudaStreamCaptureMode, MODES[name])


def judge_harmless(ran: Ran) -> Judgement:
    """Nothing fails where the other thread's mode is thread-local, and no error outlasts its capture."""
    wrong = _failures(ran, "thread thread-local")
    told = "nothing failed in a thread of the mode thread-local" if not wrong else "; ".join(wrong)
    return Judgement.of(not wrong and _is_over(ran), f"{told}; {_elsewhere(ran)}; afterwards {_afterwards(ran)}")


def judge_device_wide(ran: Ran) -> Judgement:
    """A wait for the device spoils the capture, or is refused, whatever the modes."""
    cells = {name.rpartition(":")[0] for name in ran.figures if ", " in name}
    unharmed = sorted(c for c in cells if not ran.figures[f"{c}: call"] and not ran.figures[f"{c}: capture"])
    told = f"goes unnoticed in: {'; '.join(unharmed)}" if unharmed else "fails or spoils the capture in every mode"
    return Judgement.of(bool(cells) and not unharmed and _is_over(ran), f"{told}; afterwards {_afterwards(ran)}")


def _failures(ran: Ran, where: str) -> list[str]:
    return [f"{name} {code:.0f}" for name, code in ran.figures.items() if where in name and code]


def _elsewhere(ran: Ran) -> str:
    failed = _failures(ran, "thread global")
    return f"in a thread of the mode global: {'; '.join(failed) or 'nothing failed either'}"


def _is_over(ran: Ran) -> bool:
    return ran.figures["afterwards"] == 0


def _afterwards(ran: Ran) -> str:
    return "captures work" if _is_over(ran) else f"they end with {ran.figures['afterwards']:.0f}"
