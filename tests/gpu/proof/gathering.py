"""From the requests' own slots or through the host's staging: which way to the device is shorter, by request size."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median

from convoy.app.engines.base import Engine
from convoy.app.engines.cuda.device import Device
from convoy.app.engines.cuda.gather import NEVER_BYTES, Gather, measure_threshold
from convoy.app.engines.cuda.slots import DeviceSlot, Layout
from convoy.app.engines.parts import Part
from tests.gpu.proof.bare import HostMemory
from tests.gpu.proof.records import Gathering, GatherRow

_ROUNDS = 15


def measure_gathering(device: Device, engine: Engine, network: str, memory: HostMemory) -> Gathering:
    """The engine's largest batch in requests of 1, 2, 4... images, without the engine.

    Raises EngineFailure where there is no room.
    """
    memory.lock(engine)
    device.use()
    largest, image = engine.info.batch_sizes[-1], engine.inputs[0]
    assert image.sample_bytes is not None
    slot = DeviceSlot(device, Layout.of(engine.inputs, largest), Layout.of(engine.outputs, largest))
    try:
        threshold = measure_threshold(device.cuda, slot, 0, image.sample_bytes, largest)
        rows = tuple(_rows(device, slot, engine, memory))
    finally:
        device.cuda.wait_for_stream(slot.stream)
        slot.close()
    # The driver layer stops asking for batched copies once one was refused.
    is_batched = device.cuda._batch_attributes is not None
    return Gathering(network, None if threshold == NEVER_BYTES else threshold, "yes" if is_batched else "no", rows)


def _rows(device: Device, slot: DeviceSlot, engine: Engine, memory: HostMemory) -> Iterator[GatherRow]:
    largest, nbytes = engine.info.batch_sizes[-1], engine.inputs[0].sample_bytes
    assert nbytes is not None
    for samples in (1 << bit for bit in range(largest.bit_length())):
        parts = [memory.part(engine, samples, place) for place in range(largest // samples)]
        by_host, by_copy_engine = (
            _median_ms(device, slot, Gather(device.cuda, threshold), parts) for threshold in (NEVER_BYTES, 0)
        )
        yield GatherRow(samples, len(parts), samples * nbytes, by_host, by_copy_engine)


def _median_ms(device: Device, slot: DeviceSlot, gather: Gather, parts: list[Part]) -> float:
    taken_ns = []
    for _ in range(_ROUNDS):
        started_ns = time.perf_counter_ns()
        gather.copy_in(slot, parts)
        device.cuda.wait_for_stream(slot.stream)
        taken_ns.append(time.perf_counter_ns() - started_ns)
    return median(taken_ns) / 1e6
