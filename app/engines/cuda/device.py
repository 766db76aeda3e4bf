"""One GPU that several engines share: whose turn it is to compute, and how much memory is left.

Batches compute one after the other on a device, whatever their model: two at once would compete for the
multiprocessors, make each other's time unpredictable, and need scratch memory twice. Copies may overlap.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

from convoy.app.engines import cpu
from convoy.app.engines.batch import EngineFailure, FailureScope
from convoy.app.engines.cuda.driver import CaptureDisturbed, Cuda, CudaUnavailable, GpuProperties, Handle, open_cuda

# Kept free when an engine is loaded, for the driver, other processes and a library's late allocations.
RESERVED_BYTES = 256 << 20
# Two threads per GPU may busy-wait for batches if at least as many cores are left for the rest.
_CORES_FOR_SPINNING = 8


class Device:
    """One GPU of this process. Raises EngineFailure if a CUDA call fails.

    `sleeps` means that waiting threads sleep instead of keeping a core busy, and notice the end some microseconds
    later.
    """

    def __init__(self, cuda: Cuda, index: int, *, sleeps: bool = False) -> None:
        self.cuda = cuda
        self.properties: GpuProperties = cuda.properties(index)
        self.sleeps = sleeps
        self.lost = ""  # the error after which nothing works any more on this device in this process
        # Whether an engine on it has served: then a new process is needed when it is lost, else it is left out.
        self.has_served = False
        self._has_worked = False
        self._turn = threading.Lock()
        self._last_computed: Handle | None = None
        self._engines: set[object] = set()

    @property
    def name(self) -> str:
        """Its name in metrics and lanes: cuda:0."""
        return self.properties.device

    def use(self) -> None:
        """Make it the calling thread's current device."""
        self.cuda.use(self.properties.index)

    @contextmanager
    def turn(
        self, stream: Handle, computing: Handle, computed: Handle, *, behind: Handle | None = None
    ) -> Iterator[None]:
        """Work given to `stream` inside computes after every earlier turn and after the event `behind`.

        The other two events are recorded around it.
        """
        with self._turn:
            if self._last_computed is not None:
                self.cuda.make_stream_wait(stream, self._last_computed)
            if behind is not None:
                # Not before the turn: an earlier turn may still give this stream a batch, which need not wait.
                self.cuda.make_stream_wait(stream, behind)
            self.cuda.record(computing, stream)
            try:
                yield
            finally:
                # A failure may have left work on the stream, and nothing may compute beside that.
                self.cuda.record(computed, stream)
                self._last_computed = computed

    def forget(self, computed: Handle) -> None:
        """Forget an event before it is destroyed; its turn must be over."""
        with self._turn:
            if self._last_computed is computed:
                self._last_computed = None

    def check_room(self, nbytes: int, what: str) -> None:
        """Raise EngineFailure if `nbytes` do not fit beside what is loaded already."""
        self.use()
        free = self.cuda.free_bytes()
        if nbytes + RESERVED_BYTES > free:
            raise EngineFailure(
                f"{what} needs {nbytes >> 20} MiB on {self.name} and {RESERVED_BYTES >> 20} MiB must stay free, "
                f"but {free >> 20} MiB are; unload a model, or lower --max-batch",
                FailureScope.MEMORY,
            )

    def settle(self, failure: EngineFailure, *streams: Handle) -> None:
        """Wait until the device, or at least `streams`, have finished everything given before the failure.

        Raises EngineFailure if the device turns out to be lost: a library may not have noticed.
        """
        if failure.scope is FailureScope.DEVICE:
            self.lost = self.lost or str(failure)
            return  # it does nothing any more
        try:
            self.use()
            try:
                self.cuda.check_device()
            except CaptureDisturbed:  # captures go on and on, so the device works
                for stream in streams:
                    self.cuda.wait_for_stream(stream)
        except EngineFailure as broken:
            if broken.scope is FailureScope.DEVICE:
                self.lost = self.lost or str(broken)
                raise EngineFailure(f"{failure}; the device is lost: {broken}", FailureScope.DEVICE) from failure

    def ensure_works(self) -> None:
        """Check that the device works before an engine is loaded or closed. Raises EngineFailure.

        A lost device stays lost. A reset would make a new context for this process's own calls, but libraries still use
        the old one, without any guarantee from CUDA. A device that has never worked is asked again each time: no
        library uses it, and another process may hold it only for a while.
        """
        if self.lost:
            raise EngineFailure(self.lost, FailureScope.DEVICE)
        try:
            self.use()
            self.cuda.check_device()
        except EngineFailure as failure:
            if failure.scope is FailureScope.DEVICE and self._has_worked:
                self.lost = str(failure)
            raise
        self._has_worked = True

    def hold(self, engine: object) -> None:
        """Keep an engine alive until `let_go`.

        An engine on a lost device is never let go, because a library may end the process if it fails to free something.
        """
        self._engines.add(engine)
        self._has_worked = True

    def let_go(self, engine: object) -> None:
        """Release an engine that has freed everything."""
        self._engines.discard(engine)


@dataclass(frozen=True, slots=True)
class UnusableGpu:
    """A GPU that does not work in this process. `device` is as in `Device.name`."""

    device: str
    reason: str


def open_devices() -> tuple[Device, ...]:
    """The GPUs of this process, in CUDA's order. Raises CudaUnavailable."""
    return open_all_devices()[0]


@cache
def open_all_devices() -> tuple[tuple[Device, ...], tuple[UnusableGpu, ...]]:
    """The same, with those that cannot be queried. Raises CudaUnavailable."""
    return find_devices(open_cuda())


def find_devices(cuda: Cuda) -> tuple[tuple[Device, ...], tuple[UnusableGpu, ...]]:
    """The same for given bindings. Raises CudaUnavailable if no GPU can be used."""
    found: list[Device] = []
    unusable: list[UnusableGpu] = []
    count = cuda.device_count()
    for index in range(count):
        try:
            found.append(Device(cuda, index, sleeps=are_cores_few(cpu.cpu_budget(), count)))
        except EngineFailure as failure:
            unusable.append(UnusableGpu(f"cuda:{index}", str(failure)))
    if not found:
        raise CudaUnavailable("; ".join(f"{gpu.device} cannot be used: {gpu.reason}" for gpu in unusable))
    return tuple(found), tuple(unusable)


def are_cores_few(cores: int, gpus: int) -> bool:
    """Whether a busy-waiting core would be missing elsewhere."""
    return cores < _CORES_FOR_SPINNING * gpus
