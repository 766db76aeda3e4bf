"""An engine by itself, as fast as it goes: the figure that everything around it is held against."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median

import numpy as np

from convoy.app.batch import BatchResult
from convoy.app.engines.base import Engine
from convoy.app.engines.parts import Part
from tests.gpu.proof.records import BareRow, Setting

_FEWEST_BATCHES = 3
_HOST_BYTES = 48 << 20  # two batches of 128 pictures of 224 pixels


@dataclass(frozen=True, slots=True)
class Effort:
    """How long a row is measured, after how long a warm-up."""

    row_s: float = 0.8
    warm_up_s: float = 0.15

    @property
    def whole_s(self) -> float:
        return self.row_s + self.warm_up_s


class HostMemory:
    """Pictures in page-locked memory, as requests lie in the slab; one place per slot."""

    def __init__(self, nbytes: int = _HOST_BYTES) -> None:
        self._block = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)

    def lock(self, engine: Engine) -> None:
        """Harmless when repeated. The block lives as long as the process, because it stays locked."""
        engine.page_lock(self._block.data)

    def part(self, engine: Engine, samples: int, place: int) -> Part:
        """One request of so many samples; numbered places do not overlap while they fit."""
        (image,), (output,) = engine.inputs, engine.outputs
        assert image.sample_bytes is not None
        assert output.sample_bytes is not None
        nbytes = samples * image.sample_bytes
        start = place * nbytes % max(1, len(self._block) - nbytes + 1)
        return Part(
            samples=samples,
            shapes=((samples, *image.shape),),
            inputs=(self._block[start : start + nbytes].data,),
            wanted=(0,),
            destinations=(memoryview(bytearray(samples * output.sample_bytes)),),
        )


@dataclass(frozen=True, slots=True)
class _Lap:
    """What one thread ran, and when it began and ended."""

    results: Sequence[BatchResult]
    began_ns: int
    ended_ns: int


def measure_bare(engine: Engine, setting: Setting, memory: HostMemory, effort: Effort) -> BareRow:
    """Raises EngineFailure."""
    memory.lock(engine)
    together = threading.Barrier(engine.info.slots)

    def lap(place: int) -> _Lap:
        parts = [memory.part(engine, setting.batch_size, place)]
        try:
            _run_for(engine, parts, effort.warm_up_s)
            together.wait()
        except BaseException:
            together.abort()
            raise
        began_ns = time.monotonic_ns()
        return _Lap(_run_for(engine, parts, effort.row_s), began_ns, time.monotonic_ns())

    with ThreadPoolExecutor(engine.info.slots) as pool:
        laps = [future.result() for future in [pool.submit(lap, place) for place in range(engine.info.slots)]]
    return _row(setting, laps)


def _run_for(engine: Engine, parts: Sequence[Part], seconds: float) -> list[BatchResult]:
    results: list[BatchResult] = []
    end_s = time.monotonic() + seconds
    while len(results) < _FEWEST_BATCHES or time.monotonic() < end_s:
        results.append(engine.run(parts))
    return results


def _row(setting: Setting, laps: Sequence[_Lap]) -> BareRow:
    results = [result for lap in laps for result in lap.results]
    period_ns = (max(lap.ended_ns for lap in laps) - min(lap.began_ns for lap in laps)) / len(results)
    return BareRow(
        setting=setting,
        images_per_s=setting.batch_size * 1e9 / period_ns,
        period_ms=period_ns / 1e6,
        copy_in_ms=median(result.times.copy_in_ns for result in results) / 1e6,
        waited_ms=median(result.times.waited_ns for result in results) / 1e6,
        compute_ms=median(result.times.compute_ns for result in results) / 1e6,
        copy_out_ms=median(result.times.copy_out_ns for result in results) / 1e6,
    )
