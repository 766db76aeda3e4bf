"""A CUDA runtime without a GPU: the bindings' calls over host memory, streams that run late, and virtual time.

Three things make it a hard partner. Nothing on a stream happens before somebody waits for it, and then other
streams' work goes first wherever no event forbids it: a missing event gives wrong bytes and not luck. Every
address is checked against what is allocated, page-locked and still alive. And time is counted, not spent: each
piece of work occupies one of the device's engines (copy in, compute, copy out) for as long as it says.

Threads count as in CUDA: each has its current device and its capture mode, and while somebody captures for the
whole process, a thread that did not say otherwise may neither wait nor allocate. What concerns a whole device (to
wait for it, to allocate, to free, to lock pages) fails while any stream of it is captured, in whatever mode, and
the capture with it.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

GIB = 1 << 30
OUT_OF_MEMORY, ILLEGAL_ADDRESS, INVALID_VALUE, NO_DEVICE, INSUFFICIENT_DRIVER = 2, 700, 1, 100, 35
STREAM_CAPTURE_UNSUPPORTED, STREAM_CAPTURE_INVALIDATED = 900, 901
DEVICES_UNAVAILABLE, UNKNOWN_ERROR = 46, 999
GLOBAL, THREAD_LOCAL = 0, 1  # cudaStreamCaptureMode
CONTEXT_IS_DESTROYED = 709
BLOCKING_SYNC = 1  # cudaEventBlockingSync
_DEVICE_WIDE = frozenset(["cudaMalloc", "cudaFree", "cudaDeviceSynchronize"])
# Page-locked memory is every device's.
_PROCESS_WIDE = frozenset(["cudaHostAlloc", "cudaFreeHost", "cudaHostRegister", "cudaHostUnregister"])
# What CUDA calls potentially unsafe while a capture is under way.
_UNSAFE = _DEVICE_WIDE | _PROCESS_WIDE | {"cudaEventSynchronize", "cudaStreamSynchronize"}
_NAMES_ITS_DEVICE = ("cudaSetDevice", "cudaGetDeviceProperties", "cudaDeviceGetPCIBusId")
_TELLS_OF_NO_OTHER_CALL = ("cudaGetErrorString", "cudaGetDeviceCount")
_TEXTS = {
    0: "no error",
    INVALID_VALUE: "invalid argument",
    OUT_OF_MEMORY: "out of memory",
    INSUFFICIENT_DRIVER: "CUDA driver version is insufficient for CUDA runtime version",
    NO_DEVICE: "no CUDA-capable device is detected",
    ILLEGAL_ADDRESS: "an illegal memory access was encountered",
    CONTEXT_IS_DESTROYED: "context is destroyed",
    STREAM_CAPTURE_UNSUPPORTED: "operation not permitted when stream is capturing",
    STREAM_CAPTURE_INVALIDATED: "operation failed due to a previous error during capture",
}


@dataclass
class FakeGpu:
    """One device. A copy takes `copy_ns` and `copy_ns_per_byte`; what computes says itself how long it takes.

    `broken` maps names of calls to the errors that they end with on this device alone.
    """

    name: str = "Fake GPU"
    capability: tuple[int, int] = (9, 0)
    total_bytes: int = 4 * GIB
    copy_ns: float = 0.0
    copy_ns_per_byte: float = 0.0
    used_bytes: int = 0
    free_at_ns: Counter[str] = field(default_factory=Counter)  # by engine: "in", "compute", "out"
    broken: dict[str, int] = field(default_factory=dict)


@dataclass(eq=False)
class Mark:
    """One recording of an event: what waiting for the event meant at that moment."""

    stream: Stream
    happened_ns: int | None = None


@dataclass(eq=False)
class Event:
    gpu: FakeGpu
    last: Mark | None = None
    sleeps: bool = False


@dataclass(eq=False)
class Graph:
    """What was recorded, or what was made of it to be launched."""

    gpu: FakeGpu
    works: list[Work]


@dataclass(eq=False)
class Work:
    """Something on a stream: a deed on an engine of the device, a mark to set, or a mark to wait for."""

    given_ns: int
    deed: Callable[[], None] | None = None
    engine: str = ""
    takes_ns: float = 0.0
    mark: Mark | None = None
    wait_for: Mark | None = None


@dataclass
class Recording:
    """A capture under way."""

    mode: int
    thread: int = field(default_factory=threading.get_ident)
    works: list[Work] = field(default_factory=list)
    is_broken: bool = False


class Stream:
    """What the bindings' stream object is: something with a number."""

    numbers = 1

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.todo: deque[Work] = deque()
        self.ready_ns = 0
        self.recording: Recording | None = None
        Stream.numbers += 1
        self.number = Stream.numbers

    def __int__(self) -> int:
        return self.number


@dataclass
class _Block:
    memory: np.ndarray | None
    nbytes: int
    gpu: FakeGpu | None  # None: on the host


class FakeCuda:
    """The module. `calls` counts every call by name; `fail` makes coming calls of a name answer an error.

    `interleaves`: streams take turns at every piece of work, instead of each running as late as it may. The call
    with the number `fails_at`, counted from 1 over all names, answers `fails_with`; `failed_call` is its name.
    `spun` counts waits for an event that kept a core busy, `broken_captures` captures that something came into.
    """

    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)
    cudaStreamCaptureMode = SimpleNamespace(
        cudaStreamCaptureModeGlobal=GLOBAL, cudaStreamCaptureModeThreadLocal=THREAD_LOCAL
    )
    cudaMemcpySrcAccessOrder = SimpleNamespace(cudaMemcpySrcAccessOrderStream=1)
    cudaMemcpyAttributes = SimpleNamespace

    def __init__(self, *gpus: FakeGpu, batched_copies: bool = True, interleaves: bool = False) -> None:
        self.gpus = gpus or (FakeGpu(),)
        self.calls: Counter[str] = Counter()
        self.now_ns = 0
        self.sticky = 0  # what every call answers since a kernel broke the context
        self.driver_status = 0
        self.batch_status = 0 if batched_copies else 801
        self.interleaves = interleaves
        self.is_library = False  # a library may capture for the whole process; Convoy does not
        self.without_deeds = False  # time passes, and bytes stay what they are
        self.fails_at: int | None = None
        self.fails_with = 1
        self.failed_call = ""
        self.spun = self.broken_captures = 0
        self._failures: dict[str, deque[int]] = {}
        self._lock = threading.RLock()
        self._local = threading.local()
        self._blocks: dict[int, _Block] = {}
        self._registered: dict[int, int] = {}
        self._streams: dict[int, Stream] = {}
        self._events: set[Event] = set()
        self._graphs: set[Graph] = set()

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if name.startswith("cuda") and callable(found) and not isinstance(found, type):
            return lambda *args: self._called(name, found, args)
        return found

    def _called(self, name: str, method: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        with self._lock:
            self.calls[name] += 1
            status = 0 if name in _TELLS_OF_NO_OTHER_CALL else self._status_of_call(name, args)
            if status and name == "cudaStreamEndCapture":
                args[0].recording = None  # it ends all the same
            return (status, None) if status else method(*args)

    def _status_of_call(self, name: str, args: tuple[Any, ...]) -> int:
        if self.calls.total() - self.calls["cudaGetErrorString"] == self.fails_at:
            self.failed_call = name
            return self.fails_with
        planned = self._failures.get(name)
        if planned and (status := planned.popleft()):
            return status
        index = args[-1] if name in _NAMES_ITS_DEVICE and args[-1] < len(self.gpus) else None
        gpu = self._gpu if index is None else self.gpus[index]
        if name in gpu.broken:
            return gpu.broken[name]
        if self.sticky and name != "cudaSetDevice":  # which does not look
            return self.sticky
        return STREAM_CAPTURE_UNSUPPORTED if name in _UNSAFE and self._breaks_a_capture(name) else 0

    def _breaks_a_capture(self, name: str) -> bool:
        """Whether a capture forbids this thread what may be unsafe; to try it all the same breaks the capture."""
        own, mode = threading.get_ident(), getattr(self._local, "capture_mode", GLOBAL)
        recorded = [(one.gpu, one.recording) for one in self._streams.values() if one.recording is not None]
        broken = [
            one
            for gpu, one in recorded
            if one.thread == own
            or mode == one.mode == GLOBAL
            or name in _PROCESS_WIDE
            or (name in _DEVICE_WIDE and gpu is self._gpu)
        ]
        for recording in broken:
            recording.is_broken = True
        self.broken_captures += len(broken)
        return bool(broken)

    # What tests say and ask

    def fail(self, name: str, *statuses: int) -> None:
        """The next calls of `name` answer these statuses, 0 for a call that works."""
        self._failures.setdefault(name, deque()).extend(statuses)

    def enqueue(self, stream: int, deed: Callable[[], None], takes_ns: float = 0.0) -> None:
        """What a library does with a stream that it was given: computing."""
        with self._lock:
            self._give(self._streams[stream], Work(self.now_ns, deed, "compute", takes_ns))

    def finish(self, stream: int) -> None:
        """Run everything that the stream has, as if somebody had waited for it."""
        with self._lock:
            self._run_all(self._streams[stream])

    def capturing(self, stream: int) -> bool:
        return self._streams[stream].recording is not None

    def capture_for_all(self, stream: int) -> None:
        """What a library does that captures without regard for other threads."""
        with self._lock:
            self._streams[stream].recording = Recording(GLOBAL)

    def captured(self, stream: int) -> Graph | None:
        """The end of a library's capture; None if it broke."""
        with self._lock:
            status, graph = self.cudaStreamEndCapture(self._streams[stream])
            return None if status else graph

    def launch(self, graph: Graph, stream: int) -> None:
        """A library's launch; raises RuntimeError."""
        with self._lock:
            status = self.cudaGraphLaunch(graph, self._streams[stream])[0]
            if status:
                raise RuntimeError(f"cudaGraphLaunch failed: {_TEXTS[status]}")

    def drop_graphs(self, graphs: Mapping[Any, Graph | None]) -> None:
        """What becomes of a library's graphs when their owner goes."""
        with self._lock:
            self._graphs.difference_update(graph for graph in graphs.values() if graph is not None)

    def spoil_capture(self, stream: int) -> None:
        """What a library does that cannot be captured."""
        recording = self._streams[stream].recording
        assert recording is not None
        recording.is_broken = True

    def allocate_for(self, owner: object, nbytes: int) -> int | None:
        """Device memory that a library takes on the thread's device, and gives back when `owner` goes."""
        with self._lock:
            if self._breaks_a_capture("cudaMalloc"):
                raise RuntimeError(f"CUDA failure 900: {_TEXTS[STREAM_CAPTURE_UNSUPPORTED]} ; expr=cudaMalloc")
            status, address = object.__getattribute__(self, "cudaMalloc")(nbytes)
            if status:
                return None
            weakref.finalize(owner, self._forget_if_live, address).atexit = False
            return address

    def read(self, address: int, nbytes: int) -> np.ndarray:
        """uint8 [bytes] of device memory, as a kernel sees it."""
        return self._view(address, nbytes, "device")

    @property
    def allocations(self) -> int:
        return self.calls["cudaMalloc"] + self.calls["cudaHostAlloc"] + self.calls["cudaHostRegister"]

    @property
    def live_device_blocks(self) -> int:
        return self.live["device memory"]

    def forget_everything(self) -> None:
        """As if all that is live had been given back."""
        with self._lock:
            for address in list(self._blocks):
                self._forget(address)
            self._streams, self._events, self._graphs = {}, set(), set()

    @property
    def live(self) -> Counter[str]:
        """How many of each kind of thing were made and not given back."""
        blocks = ("device memory" if block.gpu else "host memory" for block in self._blocks.values())
        others = {"stream": self._streams, "event": self._events, "graph": self._graphs}
        return Counter(blocks) + Counter({kind: len(things) for kind, things in others.items()})

    # Devices

    @property
    def _gpu(self) -> FakeGpu:
        return self.gpus[getattr(self._local, "device", 0)]

    def cudaGetDeviceCount(self) -> tuple[int, int | None]:
        return (self.driver_status, None) if self.driver_status else (0, len(self.gpus))

    def cudaSetDevice(self, device: int) -> tuple[int]:
        if device >= len(self.gpus):
            return (101,)
        self._local.device = device
        return (0,)

    def cudaGetDeviceProperties(self, device: int) -> tuple[int, Any]:
        gpu = self.gpus[device]
        major, minor = gpu.capability
        return 0, SimpleNamespace(
            name=gpu.name.encode(),
            major=major,
            minor=minor,
            totalGlobalMem=gpu.total_bytes,
            uuid=SimpleNamespace(bytes=bytes([device]) * 16),
        )

    def cudaDeviceGetPCIBusId(self, length: int, device: int) -> tuple[int, bytes]:
        # The whole buffer, and rubbish where nothing was written.
        return 0, (f"0000:{device:02x}:00.0".encode() + b"\0").ljust(length, b"\xa5")

    def cudaDriverGetVersion(self) -> tuple[int, int]:
        return 0, 13000

    def cudaMemGetInfo(self) -> tuple[int, int, int]:
        return 0, self._gpu.total_bytes - self._gpu.used_bytes, self._gpu.total_bytes

    def cudaDeviceSynchronize(self) -> tuple[int]:
        self._finish_all()
        return (self.sticky,)

    def cudaThreadExchangeStreamCaptureMode(self, mode: int) -> tuple[int, int]:
        before = getattr(self._local, "capture_mode", GLOBAL)
        self._local.capture_mode = mode
        return 0, before

    def cudaGetErrorString(self, status: int) -> tuple[int, bytes]:
        return 0, _TEXTS.get(int(status), f"error {status}").encode()

    # Memory

    def cudaMalloc(self, nbytes: int) -> tuple[int, int | None]:
        gpu = self._gpu
        if gpu.used_bytes + nbytes > gpu.total_bytes:
            return OUT_OF_MEMORY, None
        gpu.used_bytes += nbytes
        return 0, self._new_block(nbytes, gpu)

    def cudaFree(self, address: int) -> tuple[int]:
        if address not in self._blocks or self._blocks[address].gpu is None:
            return (INVALID_VALUE,)
        self._finish_all()
        self._forget(address)
        return (0,)

    def cudaHostAlloc(self, nbytes: int, flags: int) -> tuple[int, int]:
        return 0, self._new_block(nbytes, None)

    def cudaFreeHost(self, address: int) -> tuple[int]:
        if address not in self._blocks or self._blocks[address].gpu is not None:
            return (INVALID_VALUE,)
        self._finish_all()
        self._forget(address)
        return (0,)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> tuple[int]:
        if address in self._registered:
            return (712,)
        self._registered[address] = nbytes
        return (0,)

    def cudaHostUnregister(self, address: int) -> tuple[int]:
        return (0,) if self._registered.pop(address, None) is not None else (713,)

    def cudaMemsetAsync(self, address: int, value: int, nbytes: int, stream: Stream) -> tuple[int]:
        view = self._view(address, nbytes, "device")
        self._give(stream, Work(self.now_ns, lambda: view.fill(value), "compute"))
        return (0,)

    def cudaMemcpyAsync(self, target: int, source: int, nbytes: int, kind: int, stream: Stream) -> tuple[int]:
        self._copy(target, source, nbytes, kind, stream)
        return (0,)

    def cudaMemcpyBatchAsync(
        self,
        targets: list[int],
        sources: list[int],
        sizes: list[int],
        count: int,
        attributes: list[Any],
        first: list[int],
        attribute_count: int,
        stream: Stream,
    ) -> tuple[int]:
        assert len(targets) == len(sources) == len(sizes) == count
        assert len(attributes) == attribute_count == len(first) == 1
        assert attributes[0].srcAccessOrder == 1
        if self.batch_status:
            return (self.batch_status,)
        for target, source, nbytes in zip(targets, sources, sizes, strict=True):
            self._copy(target, source, nbytes, 1, stream)
        return (0,)

    # Streams, events, graphs

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[int, Stream]:
        assert flags == 1, "a stream that waits for the default stream would serialise everything"
        stream = Stream(self._gpu)
        self._streams[stream.number] = stream
        return 0, stream

    def cudaStreamDestroy(self, stream: Stream) -> tuple[int]:
        self._run_all(stream)
        del self._streams[stream.number]
        return (0,)

    def cudaStreamSynchronize(self, stream: Stream) -> tuple[int]:
        self._run_all(stream)
        self.now_ns = max(self.now_ns, stream.ready_ns)
        return (self.sticky,)

    def cudaStreamWaitEvent(self, stream: Stream, event: Event, flags: int) -> tuple[int]:
        assert event in self._events
        if event.last is not None:
            self._give(stream, Work(self.now_ns, wait_for=event.last))
        return (0,)

    def cudaEventCreateWithFlags(self, flags: int) -> tuple[int, Event]:
        assert flags in (0, BLOCKING_SYNC), "the events' times are used"
        event = Event(self._gpu, sleeps=flags == BLOCKING_SYNC)
        self._events.add(event)
        return 0, event

    def cudaEventDestroy(self, event: Event) -> tuple[int]:
        self._events.remove(event)
        return (0,)

    def cudaEventRecord(self, event: Event, stream: Stream) -> tuple[int]:
        assert event in self._events
        event.last = Mark(stream)
        self._give(stream, Work(self.now_ns, mark=event.last))
        return (0,)

    def cudaEventSynchronize(self, event: Event) -> tuple[int]:
        self.spun += not event.sleeps
        if event.last is not None:
            self._reach(event.last)
            self.now_ns = max(self.now_ns, event.last.happened_ns or 0)
        return (self.sticky,)

    def cudaEventElapsedTime(self, start: Event, end: Event) -> tuple[int, float | None]:
        marks = (start.last, end.last)
        if any(mark is None or mark.happened_ns is None for mark in marks):
            return 600, None  # not ready
        return 0, (marks[1].happened_ns - marks[0].happened_ns) / 1e6  # type: ignore[union-attr, operator]

    def cudaStreamBeginCapture(self, stream: Stream, mode: int) -> tuple[int]:
        assert self.is_library or mode == THREAD_LOCAL, "only the capturing thread's own work may be recorded"
        stream.recording = Recording(mode)
        return (0,)

    def cudaStreamEndCapture(self, stream: Stream) -> tuple[int, Any]:
        recording, stream.recording = stream.recording, None
        assert recording is not None
        if recording.is_broken:
            return STREAM_CAPTURE_INVALIDATED, None
        return 0, self._new_graph(stream.gpu, recording.works)

    def cudaGraphInstantiate(self, graph: Graph, flags: int) -> tuple[int, Graph]:
        assert graph in self._graphs
        return 0, self._new_graph(graph.gpu, list(graph.works))

    def cudaGraphDestroy(self, graph: Graph) -> tuple[int]:
        self._graphs.remove(graph)
        return (0,)

    def cudaGraphExecDestroy(self, graphExec: Graph) -> tuple[int]:
        self._graphs.remove(graphExec)
        return (0,)

    def cudaGraphLaunch(self, graphExec: Graph, stream: Stream) -> tuple[int]:
        assert graphExec in self._graphs
        for work in graphExec.works:
            self._give(stream, Work(self.now_ns, work.deed, work.engine, work.takes_ns))
        return (0,)

    # Inside

    def _copy(self, target: int, source: int, nbytes: int, kind: int, stream: Stream) -> None:
        assert stream.gpu is self._gpu, "the calling thread's device is another one"
        there, here = ("device", "pinned") if kind == 1 else ("pinned", "device")
        to, of = self._view(target, nbytes, there), self._view(source, nbytes, here)
        takes_ns = stream.gpu.copy_ns + nbytes * stream.gpu.copy_ns_per_byte
        deed = lambda: np.copyto(to, of)  # noqa: E731
        self._give(stream, Work(self.now_ns, deed, "in" if kind == 1 else "out", takes_ns))

    def _give(self, stream: Stream, work: Work) -> None:
        if stream.recording is not None:
            stream.recording.works.append(work)
        else:
            stream.todo.append(work)

    def _finish_all(self) -> None:
        """What is freed is not used any more: CUDA waits for the device."""
        for stream in self._streams.values():
            if stream.gpu is self._gpu:
                self._run_all(stream)

    def _run_all(self, stream: Stream) -> None:
        while stream.todo:
            self._run_next(stream)

    def _reach(self, mark: Mark) -> None:
        while mark.happened_ns is None and mark.stream.todo:
            self._run_next(mark.stream)

    def _run_next(self, stream: Stream) -> None:
        # As late as possible: what the stream will wait for anyway goes before its own work.
        for later in list(stream.todo):
            if later.wait_for is not None:
                self._rush(later.wait_for, {stream.number})
        if self.interleaves:
            self._let_others_go_on(stream)
        if stream.todo:
            wait = stream.todo[0].wait_for
            if wait is not None:
                self._reach(wait)
            self._do_next(stream)

    def _let_others_go_on(self, stream: Stream) -> None:
        """One piece of work of each other stream that has nothing to wait for."""
        for other in self._streams.values():
            if other is not stream and other.todo:
                wait = other.todo[0].wait_for
                if wait is None or wait.happened_ns is not None:
                    self._do_next(other)

    def _rush(self, mark: Mark, behind: set[int]) -> None:
        """Run another stream up to a mark, as far as it does not itself wait for a stream that is behind."""
        stream = mark.stream
        while mark.happened_ns is None and stream.todo and stream.number not in behind:
            wait = stream.todo[0].wait_for
            if wait is not None:
                self._rush(wait, behind | {stream.number})
                if wait.happened_ns is None:
                    return
            self._do_next(stream)

    def _do_next(self, stream: Stream) -> None:
        work = stream.todo.popleft()
        if work.wait_for is not None:
            stream.ready_ns = max(stream.ready_ns, work.wait_for.happened_ns or 0)
            return
        start_ns = max(stream.ready_ns, work.given_ns)
        if work.engine:
            start_ns = max(start_ns, stream.gpu.free_at_ns[work.engine])
        stream.ready_ns = int(start_ns + work.takes_ns)
        if work.engine:
            stream.gpu.free_at_ns[work.engine] = stream.ready_ns
        if work.mark is not None:
            work.mark.happened_ns = stream.ready_ns
        if work.deed is not None and not self.sticky and not self.without_deeds:
            work.deed()

    def _new_block(self, nbytes: int, gpu: FakeGpu | None) -> int:
        # Rubbish and not zeros: nobody may count on what new memory holds.
        memory = np.full(nbytes + 256, 0xA5, np.uint8)
        address = -(-memory.ctypes.data // 256) * 256
        self._blocks[address] = _Block(memory, nbytes, gpu)
        return address

    def _new_graph(self, gpu: FakeGpu, works: list[Work]) -> Graph:
        graph = Graph(gpu, works)
        self._graphs.add(graph)
        return graph

    def _forget_if_live(self, address: int) -> None:
        with self._lock:
            if address in self._blocks:
                self._breaks_a_capture("cudaFree")
                self._forget(address)

    def _forget(self, address: int) -> None:
        block = self._blocks.pop(address)
        if block.gpu is not None:
            block.gpu.used_bytes -= block.nbytes

    def _view(self, address: int, nbytes: int, kind: str) -> np.ndarray:
        """The bytes, if they lie wholly inside one live block of that kind."""
        for start, block in self._blocks.items():
            if start <= address and address + nbytes <= start + block.nbytes:
                assert (block.gpu is None) == (kind == "pinned"), f"{address:#x} is not {kind} memory"
                assert block.gpu in (None, self._gpu), "memory of another device"
                return _bytes_at(address, nbytes)
        registered = any(s <= address and address + nbytes <= s + size for s, size in self._registered.items())
        assert registered and kind == "pinned", f"{nbytes} bytes at {address:#x} are not {kind} memory"  # noqa: PT018
        return _bytes_at(address, nbytes)


def _bytes_at(address: int, nbytes: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
