"""The CUDA calls that Convoy uses: cuda-python's runtime bindings, with errors checked.

Knows the calls, their error codes and how far an error reaches. The bindings import without a driver, so `open_cuda`
finds out by asking. They are untyped and passed as `Any`; tests replace them by a fake.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from convoy.app.engines.batch import EngineFailure, FailureScope
from convoy.app.engines.cuda.captures import CaptureGate
from convoy.models.checkout import pip_install

INSTALL = f"{pip_install('gpu')}, or [rtx] for TensorRT for RTX alone"

# cudaErrorMemoryAllocation
_OUT_OF_MEMORY = 2
# After these, every later call of the process fails as well; NVIDIA's reference says of each that "to continue using
# CUDA, the process must be terminated and relaunched".
_STICKY = frozenset(
    {
        *(214, 220, 226),  # uncorrectable ECC, NVLink, contained memory error
        *(700, 702, 709, 710),  # illegal address, launch time-out, context destroyed, assertion in a kernel
        *(714, 715, 716, 717),  # hardware stack, illegal instruction, misaligned address, invalid address space
        *(718, 719, 721),  # invalid program counter, launch failure, leak of tensor memory
        *(4, 46, 100, 101, 802, 999),  # unloading, devices unavailable, no device, invalid device, not ready, unknown
    }
)
# cudaErrorStreamCaptureUnsupported, cudaErrorStreamCaptureInvalidated: a capture was disturbed.
_DISTURBED = frozenset({900, 901})
# Captures of libraries that do not coordinate end within this time, or never.
_PAUSES_S = (0.001, 0.004, 0.016, 0.064, 0.256)
_CAPTURE_ATTEMPTS = 3
_ALREADY_PINNED = 712  # cudaErrorHostMemoryAlreadyRegistered
_NOT_PINNED = 713  # cudaErrorHostMemoryNotRegistered
_PORTABLE = 1  # cudaHostRegisterPortable, cudaHostAllocPortable: page-locked for every device's context
_NON_BLOCKING = 1  # cudaStreamNonBlocking: does not wait for the legacy default stream
_BLOCKING_SYNC = 1  # cudaEventBlockingSync: who waits for the event sleeps

Handle = Any  # a stream, event or graph of the bindings
Result = TypeVar("Result")


class CudaUnavailable(Exception):
    """CUDA is not available; the message says why, and what to do if something can be done."""


class CaptureDisturbed(EngineFailure):
    """A capture was disturbed by another call. Nothing is broken, and a retry may succeed."""


def undisturbed(attempts: int, work: Callable[[], Result]) -> Result:
    """Call `work`, and again if a capture disturbed it. Raises what the last call raises."""
    for _ in range(attempts - 1):
        with suppress(CaptureDisturbed):
            return work()
    return work()


@dataclass(frozen=True, slots=True)
class GpuProperties:
    """One device, or a MIG slice. `total_bytes` is all of its memory, used or not; `uuid` has 32 hexadecimal digits."""

    index: int
    name: str
    compute_capability: str
    pci_bus_id: str
    total_bytes: int
    uuid: str = ""

    @property
    def device(self) -> str:
        """The device's name in Convoy."""
        return f"cuda:{self.index}"


class Cuda:
    """The bindings, with errors checked. Every call may raise EngineFailure, whose scope says how far it reaches.

    Calls act on the calling thread's current device (`use`), as CUDA's do. Calls that would disturb a capture wait for
    its end: the calls here by themselves, those of libraries between `capturing` and `beside_captures`.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._to_device = runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._to_host = runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._pinned = _PinnedRanges()
        self._batch_attributes = _batch_attributes(runtime)
        self._capture_mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._thread = threading.local()
        self._gates: dict[int, CaptureGate] = {}

    # Devices

    def use(self, device: int) -> None:
        """Make `device` the calling thread's, and isolate the thread from other threads' captures.

        Libraries capture for the whole process: without this, another thread that waits or allocates would fail, and so
        would the capture.
        """
        self._call("cudaSetDevice", device)
        self._thread.device = device
        if not getattr(self._thread, "ignores_captures", False):
            self._ask("cudaThreadExchangeStreamCaptureMode", self._capture_mode)
            self._thread.ignores_captures = True

    def device_count(self) -> int:
        return int(self._ask("cudaGetDeviceCount"))

    def properties(self, device: int) -> GpuProperties:
        found = self._ask("cudaGetDeviceProperties", device)
        bus = self._ask("cudaDeviceGetPCIBusId", 32, device)
        return GpuProperties(
            index=device,
            name=_text(found.name),
            compute_capability=f"{found.major}.{found.minor}",
            pci_bus_id=_text(bus),
            total_bytes=int(found.totalGlobalMem),
            uuid=bytes(found.uuid.bytes).hex(),
        )

    def driver_version(self) -> str:
        """The newest CUDA version that the driver supports, such as "13.0"."""
        number = self._ask("cudaDriverGetVersion")
        return f"{number // 1000}.{number % 1000 // 10}"

    def free_bytes(self) -> int:
        """The free memory of the current device, whoever uses the rest."""
        free, _ = self._ask_all("cudaMemGetInfo")
        return int(free)

    def check_device(self) -> None:
        """Wait for everything on the current device. Raises EngineFailure if anything on it has failed."""
        self._beside_captures("cudaDeviceSynchronize")

    # Memory

    def allocate(self, nbytes: int) -> int:
        """Allocate device memory. Returns its address."""
        return int(self._beside_captures("cudaMalloc", nbytes)[0])

    def free(self, address: int) -> None:
        self._beside_captures("cudaFree", address)

    def clear(self, address: int, nbytes: int, stream: Handle) -> None:
        """Fill device memory with zeros."""
        self._call("cudaMemsetAsync", address, 0, nbytes, stream)

    def allocate_host(self, nbytes: int) -> int:
        """Allocate page-locked host memory. Returns its address."""
        with self._beside_every_capture():
            return int(self._again("cudaHostAlloc", nbytes, _PORTABLE)[0])

    def free_host(self, address: int) -> None:
        with self._beside_every_capture():
            self._again("cudaFreeHost", address)

    def pin(self, address: int, nbytes: int) -> None:
        """Page-lock memory for every device until `unpin`. Pinning the same block again does nothing."""
        if self._pinned.contains(address, nbytes):
            return
        with self._beside_every_capture():
            self._again("cudaHostRegister", address, nbytes, _PORTABLE, harmless=_ALREADY_PINNED)
        self._pinned.add(address, nbytes)

    def unpin(self, address: int) -> None:
        """Unlock a block that `pin` locked, before its memory is freed."""
        if self._pinned.remove(address):
            with self._beside_every_capture():
                self._again("cudaHostUnregister", address, harmless=_NOT_PINNED)

    def is_pinned(self, address: int, nbytes: int) -> bool:
        """Whether the copy engine can read this host memory asynchronously."""
        return self._pinned.contains(address, nbytes)

    def copy_to_device(self, target: int, source: int, nbytes: int, stream: Handle) -> None:
        self._call("cudaMemcpyAsync", target, source, nbytes, self._to_device, stream)

    def copy_to_host(self, target: int, source: int, nbytes: int, stream: Handle) -> None:
        self._call("cudaMemcpyAsync", target, source, nbytes, self._to_host, stream)

    def gather_to_device(
        self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: Handle
    ) -> None:
        """Copy several blocks to the device, in one call if the driver has it."""
        if self._batch_attributes is not None and len(targets) > 1:
            status = self._invoke(
                "cudaMemcpyBatchAsync",
                *(list(targets), list(sources), list(sizes), len(targets)),
                *([self._batch_attributes], [0], 1, stream),
            )[0]
            if int(status) == 0:
                return
            if self._scope_of(status) is FailureScope.DEVICE:
                raise self._failure("cudaMemcpyBatchAsync", status)
            # A driver older than the bindings says so once and is not asked again.
            self._batch_attributes = None
        for target, source, nbytes in zip(targets, sources, sizes, strict=True):
            self.copy_to_device(target, source, nbytes, stream)

    # Streams and events

    def make_stream(self) -> Handle:
        return self._ask("cudaStreamCreateWithFlags", _NON_BLOCKING)

    def destroy_stream(self, stream: Handle) -> None:
        self._call("cudaStreamDestroy", stream)

    def wait_for_stream(self, stream: Handle) -> None:
        """Block the calling thread, without the GIL, until the stream is idle."""
        self._call("cudaStreamSynchronize", stream)

    def make_event(self, *, sleeps: bool = False) -> Handle:
        """Create an event with a timer. Threads that wait for it busy-wait, or sleep if `sleeps`."""
        return self._ask("cudaEventCreateWithFlags", _BLOCKING_SYNC if sleeps else 0)

    def destroy_event(self, event: Handle) -> None:
        self._call("cudaEventDestroy", event)

    def record(self, event: Handle, stream: Handle) -> None:
        self._call("cudaEventRecord", event, stream)

    def make_stream_wait(self, stream: Handle, event: Handle) -> None:
        """Work given to the stream from now on begins after the event as last recorded."""
        self._call("cudaStreamWaitEvent", stream, event, 0)

    def wait_for_event(self, event: Handle) -> None:
        """Block the calling thread, without the GIL."""
        self._call("cudaEventSynchronize", event)

    def elapsed_ns(self, start: Handle, end: Handle) -> int:
        """The time between two events that have happened, with a resolution of about half a microsecond."""
        return int(float(self._ask("cudaEventElapsedTime", start, end)) * 1e6)

    # Graphs

    def capture(self, stream: Handle, work: Callable[[], None]) -> Handle:
        """Capture the work that `work` gives to the stream as a graph; none of it runs now.

        The capture is alone on the device, except for work that other threads give to their own streams. If it is
        disturbed, it is repeated with `work`. Raises what `work` raises, CaptureDisturbed, and EngineFailure if
        something cannot be captured; the stream stays usable.
        """
        return undisturbed(_CAPTURE_ATTEMPTS, lambda: self._captured(stream, work))

    def _captured(self, stream: Handle, work: Callable[[], None]) -> Handle:
        with self.capturing():
            self._call("cudaStreamBeginCapture", stream, self._capture_mode)
            try:
                work()
            except BaseException as error:
                status = self._abandon_capture(stream)
                if isinstance(error, EngineFailure) and int(status) in _DISTURBED:
                    raise CaptureDisturbed(str(error)) from error  # ignore its result: the work was not captured
                raise
            graph = self._ask("cudaStreamEndCapture", stream)
            try:
                return self._ask("cudaGraphInstantiate", graph, 0)
            finally:
                self._invoke("cudaGraphDestroy", graph)

    def _abandon_capture(self, stream: Handle) -> Any:
        status, graph = self._invoke("cudaStreamEndCapture", stream)
        if int(status) == 0:
            self._invoke("cudaGraphDestroy", graph)
        return status

    def capturing(self) -> AbstractContextManager[None]:
        """A library captures inside, on the current device. No device-wide calls may be made inside."""
        return self._gate(self._device).alone()

    def beside_captures(self) -> AbstractContextManager[None]:
        """A library may wait for the current device, allocate and free inside; no capture runs meanwhile."""
        return self._gate(self._device).beside_others()

    @contextmanager
    def _beside_every_capture(self) -> Iterator[None]:
        """For page-locked host memory, which belongs to every device."""
        with ExitStack() as gates:
            for index in sorted(self._gates):
                gates.enter_context(self._gates[index].beside_others())
            yield

    def _gate(self, device: int) -> CaptureGate:
        return self._gates.setdefault(device, CaptureGate())

    @property
    def _device(self) -> int:
        """The calling thread's device."""
        return getattr(self._thread, "device", 0)

    def launch_graph(self, graph: Handle, stream: Handle) -> None:
        self._call("cudaGraphLaunch", graph, stream)

    def destroy_graph(self, graph: Handle) -> None:
        self._beside_captures("cudaGraphExecDestroy", graph)

    # The calls themselves

    def _call(self, name: str, *args: Any) -> None:
        status = getattr(self._runtime, name)(*args)[0]
        if status:
            raise self._failure(name, status)

    def _ask(self, name: str, *args: Any) -> Any:
        answer = self._ask_all(name, *args)
        return answer[0]

    def _ask_all(self, name: str, *args: Any) -> tuple[Any, ...]:
        status, *values = self._invoke(name, *args)
        if int(status):
            raise self._failure(name, status)
        return tuple(values)

    def _beside_captures(self, name: str, *args: Any) -> tuple[Any, ...]:
        with self.beside_captures():
            return self._again(name, *args)

    def _again(self, name: str, *args: Any, harmless: int = 0) -> tuple[Any, ...]:
        """Repeat `_ask_all` while an uncoordinated capture disturbs it; the codes in `harmless` are not failures."""
        for pause_s in (*_PAUSES_S, None):
            status, *values = self._invoke(name, *args)
            if pause_s is None or int(status) not in _DISTURBED:
                break
            time.sleep(pause_s)
        if int(status) not in (0, harmless):
            raise self._failure(name, status)
        return tuple(values)

    def _invoke(self, name: str, *args: Any) -> tuple[Any, ...]:
        answer: tuple[Any, ...] = getattr(self._runtime, name)(*args)
        return answer

    def _failure(self, name: str, status: Any) -> EngineFailure:
        kind = CaptureDisturbed if int(status) in _DISTURBED else EngineFailure
        text = _text(self._runtime.cudaGetErrorString(status)[1])
        return kind(f"{name}: {text} (CUDA error {int(status)})", self._scope_of(status))

    @staticmethod
    def _scope_of(status: Any) -> FailureScope:
        if int(status) == _OUT_OF_MEMORY:
            return FailureScope.MEMORY
        return FailureScope.DEVICE if int(status) in _STICKY else FailureScope.BATCH


class _PinnedRanges:
    """The page-locked blocks of host memory: the slab, and few others in tests."""

    def __init__(self) -> None:
        # Replaced and never changed: batches read it while a block may be added.
        self._ends: dict[int, int] = {}
        self._lock = threading.Lock()

    def add(self, address: int, nbytes: int) -> None:
        with self._lock:
            self._ends = self._ends | {address: address + nbytes}

    def remove(self, address: int) -> bool:
        """Remove a block. Returns whether one began there."""
        with self._lock:
            was_known = address in self._ends
            self._ends = {start: end for start, end in self._ends.items() if start != address}
        return was_known

    def contains(self, address: int, nbytes: int) -> bool:
        return any(start <= address and address + nbytes <= end for start, end in self._ends.items())


def load_runtime() -> Any:
    """Import cuda-python's runtime bindings. Raises CudaUnavailable."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        raise CudaUnavailable(f"cuda-python is not installed; run {INSTALL}")
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except (ImportError, OSError, RuntimeError) as error:  # it looks for its libraries at import, in several ways
        raise CudaUnavailable(f"cuda-python does not load ({error}); run {INSTALL}") from error


@cache
def open_cuda() -> Cuda:
    """The process's CUDA, if there is a driver and at least one device. Raises CudaUnavailable."""
    return probe_cuda(load_runtime())


def probe_cuda(runtime: Any) -> Cuda:
    """Check that these bindings find a driver and a device. Raises CudaUnavailable."""
    cuda = Cuda(runtime)
    try:
        count = cuda.device_count()
    except EngineFailure as failure:
        raise CudaUnavailable(f"no usable NVIDIA driver: {failure}") from failure
    if not count:
        raise CudaUnavailable("the driver finds no GPU; start a container with --gpus all")
    return cuda


def _batch_attributes(runtime: Any) -> Any:
    """The attributes of batched copies; None if the bindings are too old for them."""
    if not hasattr(runtime, "cudaMemcpyBatchAsync"):
        return None
    attributes = runtime.cudaMemcpyAttributes()
    attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
    return attributes


def _text(raw: bytes | str) -> str:
    """The text up to the first NUL: some bindings return the whole buffer."""
    text = raw.decode(errors="replace") if isinstance(raw, bytes) else raw
    return text.partition("\0")[0]
