"""Gather a batch on the device, by the copy engine or by the host.

The copy engine can read each request's tensor directly if its memory is page-locked. The host can gather the tensors
into one page-locked block, which is copied in one go. The first saves a pass over the bytes, the second saves a command
per request. The size from which the first is faster is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np

from convoy.app.engines.cuda.driver import Cuda
from convoy.app.engines.cuda.slots import DeviceSlot
from convoy.app.engines.parts import Part

NEVER_BYTES = 1 << 62
_ROUNDS = 5


class Gather:
    """Copies the inputs of a batch into a slot. Tensors of at least `threshold_bytes` use the copy engine."""

    def __init__(self, cuda: Cuda, threshold_bytes: int = NEVER_BYTES) -> None:
        self._cuda = cuda
        self.threshold_bytes = threshold_bytes

    def copy_in(self, slot: DeviceSlot, parts: Sequence[Part]) -> None:
        """Give the slot's stream all copies that bring the parts' inputs to the device, in order."""
        for index in range(len(parts[0].inputs)):
            views = [part.inputs[index] for part in parts]
            addresses = self._pinned_addresses(views)
            if addresses is None:
                slot.copy_staged_in(index, _join(views, slot.staging(index)))
            else:
                _send_each(self._cuda, slot, index, addresses, [view.nbytes for view in views])

    def _pinned_addresses(self, views: Sequence[memoryview]) -> list[int] | None:
        """The tensors' addresses, if every one is large enough and page-locked."""
        if min(view.nbytes for view in views) < self.threshold_bytes:
            return None
        addresses = [_address(view) for view in views]
        pinned = all(self._cuda.is_pinned(a, view.nbytes) for a, view in zip(addresses, views, strict=True))
        return addresses if pinned else None


def measure_threshold(cuda: Cuda, slot: DeviceSlot, index: int, sample_bytes: int, largest: int) -> int:
    """Measure from how many bytes per request the copy engine is faster, for batches of about `largest` samples.

    Tried with requests of 1, 2, 4... samples in the slot's own staging memory, which is page-locked; so the host
    gathers into other memory. NEVER_BYTES if the host is always faster. Raises EngineFailure.
    """
    staging, aside = slot.staging(index), np.empty(largest * sample_bytes, np.uint8)
    for samples in (1 << bit for bit in range(largest.bit_length())):
        nbytes, requests = samples * sample_bytes, largest // samples
        views = [staging[i * nbytes : (i + 1) * nbytes].data for i in range(requests)]
        addresses, sizes = [_address(view) for view in views], [nbytes] * requests

        def by_host(views: Sequence[memoryview] = views) -> None:
            slot.copy_staged_in(index, _join(views, aside))

        def by_copy_engine(addresses: Sequence[int] = addresses, sizes: Sequence[int] = sizes) -> None:
            _send_each(cuda, slot, index, addresses, sizes)

        if _median_ns(cuda, slot, by_copy_engine) < _median_ns(cuda, slot, by_host):
            return nbytes
    return NEVER_BYTES


def _join(views: Sequence[memoryview], target: np.ndarray) -> int:
    """Copy the views back to back. Returns the number of bytes."""
    offset = 0
    for view in views:
        # numpy copies without the GIL; a memoryview would hold it.
        np.copyto(target[offset : offset + view.nbytes], np.frombuffer(view, np.uint8))
        offset += view.nbytes
    return offset


def _send_each(cuda: Cuda, slot: DeviceSlot, index: int, addresses: Sequence[int], sizes: Sequence[int]) -> None:
    target, targets = slot.device_input(index), []
    for nbytes in sizes:
        targets.append(target)
        target += nbytes
    cuda.gather_to_device(targets, addresses, sizes, slot.stream)


def _median_ns(cuda: Cuda, slot: DeviceSlot, work: Callable[[], None]) -> float:
    taken = []
    for _ in range(_ROUNDS):
        started_ns = time.perf_counter_ns()
        work()
        cuda.wait_for_stream(slot.stream)
        taken.append(time.perf_counter_ns() - started_ns)
    return median(taken)


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
