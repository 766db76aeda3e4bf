"""What waiting costs the CPU, what page-locking costs whoever stands by, and how the device is called."""

from __future__ import annotations

import ctypes
import importlib
import mmap
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from tests.gpu.proof.experiment import Bench, Judgement, Ran
from tests.gpu.proof.experiments.cudart import NON_BLOCKING, Runtime, open_runtime

_WAYS = {"event, flags 0": 0, "event, blocking sync": 1, "event, no timing": 2, "event, blocking sync, no timing": 3}
_STREAM = "stream"
_MOST_PIECES = 500
_SHORT_ROUNDS = 50
_PORTABLE = 1


def cpu_while_waiting(bench: Bench, buffer_mib: int, long_s: float) -> None:
    """For each way to wait: the share of a core that it burns, and how long after a short piece of work it wakes."""
    runtime = open_runtime()
    stream = runtime.cudaStreamCreateWithFlags(NON_BLOCKING)
    nbytes = buffer_mib << 20
    memory = runtime.cudaMalloc(nbytes)

    def work(pieces: int, nbytes: int) -> None:
        for _ in range(pieces):
            runtime.cudaMemsetAsync(memory, 0, nbytes, stream)

    def whole_s() -> float:
        began_s = time.perf_counter()
        work(1, nbytes)
        runtime.cudaStreamSynchronize(stream)
        return time.perf_counter() - began_s

    pieces = max(1, min(_MOST_PIECES, int(long_s / min(whole_s() for _ in range(5)))))
    for name, wait in _waits(runtime, stream):
        bench.step(name)
        work(pieces, nbytes)
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        wait()
        wall_s, cpu_s = time.perf_counter() - began_s, time.thread_time() - began_cpu_s
        bench.figure(f"{name}: waited ms", wall_s * 1e3)
        bench.figure(f"{name}: share of a core", cpu_s / wall_s)
        taken_s = []
        for _ in range(_SHORT_ROUNDS):
            began_s = time.perf_counter()
            work(1, min(nbytes, 1 << 20))
            wait()
            taken_s.append(time.perf_counter() - began_s)
        bench.figure(f"{name}: short wait us", median(taken_s) * 1e6)


def _waits(runtime: Runtime, stream: Any) -> list[tuple[str, Callable[[], None]]]:
    def on_event(flags: int) -> Callable[[], None]:
        event = runtime.cudaEventCreateWithFlags(flags)

        def wait() -> None:
            runtime.cudaEventRecord(event, stream)
            runtime.cudaEventSynchronize(event)

        return wait

    return [
        *((name, on_event(flags)) for name, flags in _WAYS.items()),
        (_STREAM, lambda: runtime.cudaStreamSynchronize(stream)),
    ]


def judge_waiting(ran: Ran) -> Judgement:
    """Without the flag a core spins; with it, it sleeps, and wakes later."""
    spun, slept = (ran.figures[f"{name}: share of a core"] for name in ("event, flags 0", "event, blocking sync"))
    short, longer = (ran.figures[f"{name}: short wait us"] for name in ("event, flags 0", "event, blocking sync"))
    told = (
        f"{spun:.2f} of a core with flags 0, {slept:.2f} with blocking sync, which costs {longer - short:.0f} us a wait"
    )
    return Judgement.of(spun > 0.8 and slept < 0.3, told)


def page_locking(bench: Bench, sizes_mib: list[int]) -> None:
    """How long cudaHostRegister takes, and the longest that another Python thread stands still meanwhile."""
    runtime = open_runtime()
    for size in sizes_mib:
        bench.step(f"{size} MiB")
        pages = mmap.mmap(-1, size << 20)
        for page in range(0, len(pages), mmap.PAGESIZE):
            pages[page] = 1  # it is there, as a server's slab is
        anchor = ctypes.c_char.from_buffer(pages)
        ticker = _Ticker()
        began_s = time.perf_counter()
        runtime.cudaHostRegister(ctypes.addressof(anchor), size << 20, _PORTABLE)
        bench.figure(f"{size} MiB: ms", (time.perf_counter() - began_s) * 1e3)
        bench.figure(f"{size} MiB: another thread's longest pause, ms", ticker.stop() * 1e3)
        runtime.cudaHostUnregister(ctypes.addressof(anchor))
        del anchor
        pages.close()


class _Ticker:
    """A thread that looks at the clock again and again."""

    def __init__(self) -> None:
        self._longest_s, self._is_over = 0.0, threading.Event()
        self._is_running = threading.Event()
        self._thread = threading.Thread(target=self._tick)
        self._thread.start()
        self._is_running.wait()

    def _tick(self) -> None:
        last_s = time.perf_counter()
        while not self._is_over.wait(0.0005):
            now_s = time.perf_counter()
            self._longest_s, last_s = max(self._longest_s, now_s - last_s), now_s
            self._is_running.set()

    def stop(self) -> float:
        self._is_over.set()
        self._thread.join()
        return self._longest_s


def judge_page_locking(ran: Ran) -> Judgement:
    """It is too long for an event loop, and other threads go on meanwhile."""
    times = {int(name.split()[0]): ms for name, ms in ran.figures.items() if name.endswith("MiB: ms")}
    pauses = max(ms for name, ms in ran.figures.items() if "pause" in name)
    largest = max(times)
    told = f"{largest} MiB take {times[largest]:.0f} ms, another thread stands still for at most {pauses:.1f} ms"
    return Judgement.of(times[largest] > 20.0 and pauses < times[largest] / 2, told)


def bus_id(bench: Bench) -> None:
    """What the bindings give for the bus id and the name, byte by byte, and whether NVML knows the device by it."""
    runtime = open_runtime()
    raw = runtime.cudaDeviceGetPCIBusId(32, 0)
    name = runtime.cudaGetDeviceProperties(0).name
    bench.fact("bus id", repr(raw))
    bench.fact("name", repr(name))
    text = raw.decode(errors="replace") if isinstance(raw, bytes) else raw
    name = name.decode(errors="replace") if isinstance(name, bytes) else name
    bench.figure("NULs inside", ("\0" in text.rstrip("\0")) + ("\0" in name.rstrip("\0")))
    bench.figure("NULs at the end", ("\0" in text) + ("\0" in name))
    bench.fact("NVML by it", _nvml_name(text.partition("\0")[0]))


def _nvml_name(text: str) -> str:
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        return repr(nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByPciBusId(text.encode())))
    except Exception as error:  # no library, or NVMLError, by many names
        return f"{type(error).__name__}: {error}"


def judge_bus_id(ran: Ran) -> Judgement:
    """No NUL anywhere but perhaps at the end."""
    told = f"bus id {ran.facts['bus id']}, name {ran.facts['name']}, NVML: {ran.facts['NVML by it']}"
    return Judgement.of(not ran.figures["NULs inside"], told)
