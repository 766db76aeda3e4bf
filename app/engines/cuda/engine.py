"""What every engine on a GPU does the same way: the path of a batch through a slot.

    gather and copy in, on the slot's stream
    compute, when it is the slot's turn on the device
    copy out, on the slot's stream
    wait, without the GIL, and scatter

While one slot computes, the other copies. A library's engine derives from this and computes.
"""

from __future__ import annotations

import queue
import time
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack, suppress

import numpy as np

from convoy.app.engines.base import Engine, EngineInfo
from convoy.app.engines.batch import BatchResult, EngineFailure, FailureScope, StageTimes
from convoy.app.engines.cuda.device import Device
from convoy.app.engines.cuda.driver import Handle, undisturbed
from convoy.app.engines.cuda.gather import NEVER_BYTES, Gather, measure_threshold
from convoy.app.engines.cuda.slots import DeviceSlot, Layout
from convoy.app.engines.measure import batch_knots
from convoy.app.engines.parts import Part, scatter
from convoy.models.bundle import Precision
from convoy.models.spec import TensorSpec

# One batch computes while one is copied. A third would only wait and could not grow any more.
SLOTS = 2
# Retries of a batch that was disturbed by a capture.
_ATTEMPTS = 2


def bucket_sizes(max_batch_size: int) -> tuple[int, ...]:
    """The batch sizes that a GPU engine runs without padding: powers of two, and the largest."""
    return tuple(batch_knots(max(1, max_batch_size)))


class CudaEngine(Engine):
    """The part of a GPU engine that does not depend on the library.

    Without batches, `batch_sizes` is (1,). A subclass calls `_open_slots` at the end of its construction, and `close`
    if anything after this class's part fails. Raises BundleError for tensors of dynamic size, and EngineFailure if the
    device lacks memory.
    """

    def __init__(
        self,
        device: Device,
        *,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        batch_sizes: tuple[int, ...],
        batched: bool,
        engine: str,
        library: str,
        precision: Precision,
        slots: int = SLOTS,
    ) -> None:
        self.inputs, self.outputs = inputs, outputs
        self.batched = batched
        gpu = device.properties
        self.info = EngineInfo(
            engine=engine,
            precision=precision,
            device=device.name,
            device_fingerprint=f"{gpu.name} / {gpu.compute_capability} / {library}",
            library=library,
            batch_sizes=batch_sizes,
            slots=slots,
        )
        self._device = device
        self._cuda = device.cuda
        largest = self.info.batch_sizes[-1]
        self._layout_in, self._layout_out = Layout.of(inputs, largest), Layout.of(outputs, largest)
        self._gather = Gather(self._cuda)
        self._closed = False
        device.hold(self)
        self._prepared: set[tuple[DeviceSlot, int]] = set()
        self._slots: list[DeviceSlot] = []
        self._free_slots: queue.SimpleQueue[DeviceSlot] = queue.SimpleQueue()

    # Implemented by a library's engine

    @abstractmethod
    def _prepare(self, slot: DeviceSlot, size: int) -> None:
        """Bind the slot's memory for one batch size, and compute until nothing is new."""

    @abstractmethod
    def _compute(self, slot: DeviceSlot, size: int) -> None:
        """Give the stream of `_stream` one batch of a prepared size, in the device's turn."""

    def _stream(self, slot: DeviceSlot) -> Handle:
        """The stream that computes the slot's batch."""
        return slot.stream

    @abstractmethod
    def _release(self) -> None:
        """Free what the library holds, as far as it was opened; the slots still exist."""

    # The contract

    def warm_up(self) -> None:
        self._device.use()
        try:
            # Size by size, because what a library caches for the last size serves every slot.
            for size in self.info.batch_sizes:
                for slot in self._slots:
                    if (slot, size) not in self._prepared:
                        self._prepare(slot, size)
                        self._prepared.add((slot, size))
                    self._compute_and_copy_out(slot, size, size)
                    self._cuda.wait_for_event(slot.copied_out)
            self._gather.threshold_bytes = self._measured_threshold()
        except EngineFailure as failure:
            self._device.settle(failure, *self._streams())
            raise

    def run(self, parts: Sequence[Part]) -> BatchResult:
        if self._device.lost:
            raise EngineFailure(self._device.lost, FailureScope.DEVICE)
        slot = self._free_slots.get()
        try:
            # A capture that disturbs a batch is soon over and says nothing about the engine.
            return undisturbed(_ATTEMPTS, lambda: self._run_on(slot, parts))
        finally:
            self._free_slots.put(slot)

    def _run_on(self, slot: DeviceSlot, parts: Sequence[Part]) -> BatchResult:
        try:
            self._device.use()
            self._begin(slot, parts)
            return self._finish(slot, parts)
        except EngineFailure as failure:
            # Nothing may read the requests' memory or this slot's any more when others get them.
            self._device.settle(failure, *self._streams())
            raise

    def page_lock(self, memory: memoryview) -> bool:
        try:
            self._device.use()
            self._cuda.pin(_address(memory), memory.nbytes)
        except EngineFailure:
            return False  # the host gathers then; on a lost device nothing does
        return True

    def page_unlock(self, memory: memoryview) -> None:
        # Also forgotten if the device does not answer any more.
        with suppress(EngineFailure):
            self._device.use()
        with suppress(EngineFailure):
            self._cuda.unpin(_address(memory))

    def enter_service(self) -> None:
        self._device.has_served = True

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            # Checked, because closing a library on a lost device may end the process.
            self._device.ensure_works()
        except EngineFailure as failure:
            if failure.scope is FailureScope.DEVICE:
                return  # the device has taken everything with it
        with suppress(EngineFailure), ExitStack() as owned:
            for slot in self._slots:
                owned.callback(slot.close)
            owned.callback(self._release)
        self._slots = []
        self._device.let_go(self)

    # Internal

    def _streams(self) -> list[Handle]:
        """Every stream on which a batch of this engine may have left work."""
        return [stream for slot in self._slots for stream in (slot.stream, self._stream(slot))]

    def _open_slots(self, library_bytes: int) -> None:
        """Allocate everything, if it fits beside the `library_bytes` that the library will need."""
        self._device.use()
        per_slot = self._layout_in.nbytes + self._layout_out.nbytes
        self._device.check_room(self.info.slots * per_slot + library_bytes, f"the {self.info.engine} engine")
        for _ in range(self.info.slots):
            self._slots.append(DeviceSlot(self._device, self._layout_in, self._layout_out))
            self._free_slots.put(self._slots[-1])

    def _begin(self, slot: DeviceSlot, parts: Sequence[Part]) -> None:
        """Give the device all steps of a batch, without waiting."""
        samples = sum(part.samples for part in parts)
        self._cuda.record(slot.begun, slot.stream)
        self._gather.copy_in(slot, parts)
        size = next(one for one in self.info.batch_sizes if one >= samples)
        if size > samples:
            slot.clear_padding(samples, size)
        self._compute_and_copy_out(slot, size, samples)

    def _finish(self, slot: DeviceSlot, parts: Sequence[Part]) -> BatchResult:
        cuda = self._cuda
        cuda.wait_for_event(slot.copied_out)
        arrived_ns = time.monotonic_ns()
        samples = sum(part.samples for part in parts)
        landed = slot.answers(samples, batched=self.batched)
        outputs = scatter(parts, landed, self.outputs, batched=self.batched)
        times = StageTimes(
            copy_in_ns=cuda.elapsed_ns(slot.begun, slot.copied_in),
            waited_ns=cuda.elapsed_ns(slot.copied_in, slot.computing),
            compute_ns=cuda.elapsed_ns(slot.computing, slot.computed),
            copy_out_ns=cuda.elapsed_ns(slot.computed, slot.copied_out) + time.monotonic_ns() - arrived_ns,
        )
        return BatchResult(outputs, times)

    def _compute_and_copy_out(self, slot: DeviceSlot, size: int, samples: int) -> None:
        """Compute what is in the slot, after its stream's work, and copy the answers to the host."""
        cuda, stream = self._cuda, self._stream(slot)
        cuda.record(slot.copied_in, slot.stream)
        behind = slot.copied_in if stream is not slot.stream else None
        with self._device.turn(stream, slot.computing, slot.computed, behind=behind):
            self._compute(slot, size)
        if stream is not slot.stream:
            cuda.make_stream_wait(slot.stream, slot.computed)
        slot.copy_out(samples)
        cuda.record(slot.copied_out, slot.stream)

    def _measured_threshold(self) -> int:
        """Measured with the largest input, where copies cost most."""
        places = self._layout_in.places
        if not self.batched:
            return NEVER_BYTES
        index = max(range(len(places)), key=lambda i: places[i].sample_bytes)
        slot, largest = self._slots[0], self.info.batch_sizes[-1]
        return measure_threshold(self._cuda, slot, index, places[index].sample_bytes, largest)


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])
