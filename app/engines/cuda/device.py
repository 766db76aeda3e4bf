"""One GPU that several engines share: whose turn it is to compute, and how much memory is left.

Batches compute one after the other on a device, whatever model they are of: two at once would share the
same multiprocessors, make each other's time unpredictable, and need scratch memory twice. Copies are free to
overlap. Knows nothing of models.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from app.engines.base import Blast, EngineFailure
from app.engines.cuda.driver import Cuda, GpuProperties, Handle, open_cuda

# Stays free when an engine is loaded: the driver, other processes and a library's late allocations live here.
RESERVED_BYTES = 256 << 20


class Device:
    """One GPU of this process. Raises EngineFailure wherever CUDA does."""

    def __init__(self, cuda: Cuda, index: int) -> None:
        self.cuda = cuda
        self.properties: GpuProperties = cuda.properties(index)
        self.life = 1  # grows with every reset
        self._turn = threading.Lock()
        self._healing = threading.Lock()
        self._last_computed: Handle | None = None
        self._engines: set[object] = set()

    @property
    def name(self) -> str:
        """What metrics and lanes call it: cuda:0."""
        return self.properties.device

    def use(self) -> None:
        """Make it the calling thread's current device."""
        self.cuda.use(self.properties.index)

    @contextmanager
    def turn(self, stream: Handle, computing: Handle, computed: Handle) -> Iterator[None]:
        """What `stream` is given inside computes after every earlier turn; both events are recorded around it."""
        with self._turn:
            if self._last_computed is not None:
                self.cuda.make_stream_wait(stream, self._last_computed)
            self.cuda.record(computing, stream)
            try:
                yield
            finally:
                # What failed may have left a part of its work on the stream, and nobody may compute beside that.
                self.cuda.record(computed, stream)
                self._last_computed = computed

    def forget(self, computed: Handle) -> None:
        """The event is about to be destroyed; its turn must be over."""
        with self._turn:
            if self._last_computed is computed:
                self._last_computed = None

    def check_room(self, nbytes: int, what: str) -> None:
        """Raises EngineFailure when `nbytes` do not fit beside what is loaded already."""
        self.use()
        free = self.cuda.free_bytes()
        if nbytes + RESERVED_BYTES > free:
            raise EngineFailure(
                f"{what} needs {_mib(nbytes)} MiB on {self.name} and {_mib(RESERVED_BYTES)} MiB must stay free, "
                f"but {_mib(free)} MiB are; unload a model, or lower --max-batch",
                Blast.MEMORY,
            )

    def settle(self, failure: EngineFailure) -> None:
        """Wait until the device has done all that it was given before the failure.

        Raises EngineFailure if the device itself turns out to be lost: a library may not have noticed.
        """
        if failure.blast is Blast.DEVICE:
            return  # it does nothing any more
        try:
            self.use()
            self.cuda.check_device()
        except EngineFailure as broken:
            if broken.blast is Blast.DEVICE:
                raise EngineFailure(f"{failure}; the device is lost: {broken}", Blast.DEVICE) from failure

    def ensure_works(self) -> None:
        """Before an engine is loaded: after a sticky error, throw the context away and see whether a new one works.

        Every engine that was open on the device is void then, and knows it by its `life`. Raises EngineFailure when
        only a new process can help.
        """
        with self._healing:
            try:
                self.use()
                self.cuda.check_device()
            except EngineFailure as failure:
                if failure.blast is not Blast.DEVICE:
                    raise
                self._start_over()

    def _start_over(self) -> None:
        self.life += 1
        with self._turn:
            self._last_computed = None
        self.cuda.reset_device(self.properties.index)
        self.cuda.check_device()

    def hold(self, engine: object) -> None:
        """Keep an engine alive until `let_go`.

        One that is lost is never let go: its destructor would free addresses that are another engine's by then.
        """
        self._engines.add(engine)

    def let_go(self, engine: object) -> None:
        """The engine has given everything back."""
        self._engines.discard(engine)


@cache
def open_devices() -> tuple[Device, ...]:
    """The GPUs of this process, in CUDA's order. Raises CudaUnavailable."""
    cuda = open_cuda()
    return tuple(Device(cuda, index) for index in range(cuda.device_count()))


def _mib(nbytes: int) -> int:
    return nbytes >> 20
