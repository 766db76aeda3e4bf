"""The latest readings of this process's GPUs, for `/metrics` and `/stats`.

Querying a GPU takes milliseconds, so a thread does it and the event loop only reads the results. Knows the names of
metrics, ours and Triton's. Nothing that goes wrong here affects a request or a scrape.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from convoy.app.engines.cuda.device import Device
from convoy.app.telemetry.nvml import THROTTLE_REASONS, GpuProbe, GpuReading, NvmlUnavailable, open_nvml

_log = logging.getLogger("convoy")


@dataclass(frozen=True, slots=True)
class _Row:
    """One figure: our name for it, and Triton's if it has one."""

    kind: Literal["gauge", "counter"]
    name: str
    triton: str | None
    help_text: str
    value: Callable[[GpuReading], float | None]


_ROWS = (
    _Row(
        "gauge",
        "utilization_ratio",
        "nv_gpu_utilization",
        "Share of time with a kernel running",
        lambda r: r.busy_ratio,
    ),
    _Row(
        "gauge",
        "memory_utilization_ratio",
        None,
        "Share of time with memory being read or written",
        lambda r: r.memory_busy_ratio,
    ),
    _Row("gauge", "memory_total_bytes", "nv_gpu_memory_total_bytes", "All memory", lambda r: r.memory_total_bytes),
    _Row("gauge", "memory_used_bytes", "nv_gpu_memory_used_bytes", "Memory in use", lambda r: r.memory_used_bytes),
    _Row("gauge", "power_watts", "nv_gpu_power_usage", "Power drawn", lambda r: r.power_w),
    _Row("gauge", "power_limit_watts", "nv_gpu_power_limit", "Power allowed", lambda r: r.power_limit_w),
    _Row("counter", "energy_joules", "nv_energy_consumption", "Energy since the driver loaded", lambda r: r.energy_j),
    _Row("gauge", "temperature_celsius", None, "Temperature", lambda r: r.temperature_c),
    _Row("gauge", "sm_clock_hertz", None, "Clock of the multiprocessors", lambda r: r.sm_clock_hz),
    _Row("gauge", "memory_clock_hertz", None, "Clock of the memory", lambda r: r.memory_clock_hz),
    _Row("counter", "ecc_uncorrected_errors", None, "Since the driver loaded", lambda r: r.ecc_errors),
)


class GpuWatch(Collector):
    """Readings of some GPUs, renewed every second by a thread; as a collector, their metrics.

    A GPU in trouble may never answer. Then its last reading expires, and the process can still end, because the thread
    keeps nothing alive. Tests replace `opened` and the clock.
    """

    def __init__(
        self,
        gpus: Sequence[Device],
        *,
        opened: Callable[[], Any] = open_nvml,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gpus, self._opened, self._now_s = gpus, opened, now_s
        self._probes: list[GpuProbe] = []
        self._last: tuple[GpuReading, ...] = ()
        self._read_at_s = 0.0
        self._stopped = threading.Event()

    def start(self) -> None:
        """Start the thread, if there is a GPU."""
        if self._gpus:
            threading.Thread(target=self._watch, name="gpu-metrics", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    @property
    def readings(self) -> tuple[GpuReading, ...]:
        """One for each GPU that NVML finds; empty if they are too old."""
        return self._last if self._now_s() - self._read_at_s <= 10.0 else ()

    def _watch(self) -> None:
        try:
            self.find()
            while self._probes and not self._stopped.wait(1.0 if self._last else 0):
                self.read()
        except Exception:  # a bug or a library's; requests do not depend on it
            _log.exception("reading the GPU metrics failed; they stop")

    def read(self) -> None:
        """Query every GPU once."""
        self._last = tuple(probe.read() for probe in self._probes)
        self._read_at_s = self._now_s()

    def find(self) -> None:
        """Look for the GPUs in NVML; missing ones have no metrics, and the log says why."""
        try:
            library = self._opened()
        except NvmlUnavailable as reason:
            _log.warning("no GPU metrics: %s", reason)
            return
        for gpu in self._gpus:
            try:
                self._probes.append(GpuProbe(library, gpu.properties))
            except NvmlUnavailable as reason:
                _log.warning("no metrics for one GPU: %s", reason)

    def collect(self) -> Iterable[Metric]:
        """The last readings, for Prometheus. What a device does not report has no series."""
        readings = self.readings
        if not readings:
            return
        for row in _ROWS:
            yield from _figures(row, readings)
        names = InfoMetricFamily("convoy_gpu", "Name and UUID of each GPU", labels=("device",))
        held_back = "1 while the clocks are throttled"
        throttled = GaugeMetricFamily("convoy_gpu_throttled", held_back, labels=("device", "reason"))
        for reading in readings:
            names.add_metric((reading.device,), {"name": reading.name, "uuid": reading.uuid})
            if reading.throttled_by is not None:
                for reason in THROTTLE_REASONS:
                    throttled.add_metric((reading.device, reason), float(reason in reading.throttled_by))
        wrong = "Failed NVML queries"
        failures = CounterMetricFamily("convoy_gpu_query_failures", wrong, labels=("device",))
        for probe in self._probes:
            failures.add_metric((probe.device,), probe.failures)
        yield from (names, throttled, failures)


def _figures(row: _Row, readings: Sequence[GpuReading]) -> Iterable[Metric]:
    """Under our name, and under Triton's exact name and label: untyped there, as its counters have no `_total`."""
    told = [(reading, value) for reading in readings if (value := row.value(reading)) is not None]
    kind = GaugeMetricFamily if row.kind == "gauge" else CounterMetricFamily
    ours = kind(f"convoy_gpu_{row.name}", row.help_text, labels=("device",))
    for reading, value in told:
        ours.add_metric((reading.device,), value)
    yield ours
    if row.triton is not None:
        tritons = Metric(row.triton, row.help_text, "gauge" if row.kind == "gauge" else "unknown")
        for reading, value in told:
            tritons.add_sample(row.triton, {"gpu_uuid": reading.uuid}, value)
        yield tritons
