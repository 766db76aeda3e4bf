"""What `/metrics` and `/stats` show of GPUs, from a management library that plays its part."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from convoy.app.engines.cuda.device import Device
from convoy.app.telemetry.gpu_metrics import GpuWatch
from convoy.app.telemetry.nvml import NvmlUnavailable, open_nvml
from tests.support.fake_nvml import (
    FakeDevice,
    FakeNvml,
    NVMLError_GpuIsLost,
    busy_device,
)
from tests.support.gpu_machine import FakeGpu, GpuBench
from tests.support.servers import wait_until


def gpus(count: int = 1) -> tuple[Device, ...]:
    return GpuBench.of(*(FakeGpu(name=f"GPU {number}") for number in range(count))).machine.gpus


def busy(gpu: Device) -> FakeDevice:
    return busy_device(gpu.properties.pci_bus_id, f"GPU-{gpu.properties.index}")


def watched(nvml: FakeNvml, devices: tuple[Device, ...], now_s: Callable[[], float] = lambda: 0.0) -> GpuWatch:
    """A watch that has looked once."""
    watch = GpuWatch(devices, opened=lambda: open_nvml(nvml), now_s=now_s)
    watch.find()
    watch.read()
    return watch


def samples(watch: GpuWatch) -> dict[tuple[str, ...], float]:
    """Every series of a scrape: its name and labels' values, and its value."""
    registry = CollectorRegistry()
    registry.register(watch)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_every_figure_has_its_unit_under_our_name_and_tritons() -> None:
    (gpu,) = gpus()
    seen = samples(watched(FakeNvml(busy(gpu)), (gpu,)))
    expected = {
        "convoy_gpu_utilization_ratio": 0.75,
        "convoy_gpu_memory_utilization_ratio": 0.4,
        "convoy_gpu_memory_total_bytes": float(1 << 34),
        "convoy_gpu_memory_used_bytes": float(1 << 33),
        "convoy_gpu_power_watts": 412.5,
        "convoy_gpu_power_limit_watts": 700.0,
        "convoy_gpu_energy_joules_total": 9000.0,
        "convoy_gpu_temperature_celsius": 61.0,
        "convoy_gpu_sm_clock_hertz": 1.98e9,
        "convoy_gpu_memory_clock_hertz": 3.201e9,
        "convoy_gpu_ecc_uncorrected_errors_total": 0.0,
        "convoy_gpu_query_failures_total": 0.0,
    }
    assert {name: seen[name, "cuda:0"] for name in expected} == expected
    assert seen["convoy_gpu_info", "cuda:0", "GPU 0", "GPU-0"] == 1
    assert {key[0]: value for key, value in seen.items() if key[0].startswith("nv_") and key[1:] == ("GPU-0",)} == {
        "nv_gpu_utilization": 0.75,
        "nv_gpu_memory_total_bytes": float(1 << 34),
        "nv_gpu_memory_used_bytes": float(1 << 33),
        "nv_gpu_power_usage": 412.5,
        "nv_gpu_power_limit": 700.0,
        "nv_energy_consumption": 9000.0,
    }
    throttled = {key[2]: value for key, value in seen.items() if key[0] == "convoy_gpu_throttled"}
    assert len(throttled) == 9
    assert {reason for reason, holds in throttled.items() if holds} == {"sw_power_cap", "sw_thermal_slowdown"}


def test_devices_are_found_by_their_place_on_the_bus_and_not_by_their_number() -> None:
    first, second = gpus(2)
    nvml = FakeNvml(busy(second), busy(first))
    readings = watched(nvml, (first, second)).readings
    assert [(reading.device, reading.uuid) for reading in readings] == [("cuda:0", "GPU-0"), ("cuda:1", "GPU-1")]


def test_what_a_device_does_not_tell_has_no_series(caplog: pytest.LogCaptureFixture) -> None:
    (gpu,) = gpus()
    silent = FakeDevice(gpu.properties.pci_bus_id, "GPU-0")
    watch = watched(FakeNvml(silent), (gpu,))
    assert {name for name, *_ in samples(watch)} == {"convoy_gpu_info", "convoy_gpu_query_failures_total"}
    assert not caplog.records


def test_a_lost_gpu_is_counted_at_every_question_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    lost, well = gpus(2)
    broken = FakeDevice(lost.properties.pci_bus_id, "GPU-0", {"nvmlDeviceGetPowerUsage": NVMLError_GpuIsLost("lost")})
    watch = watched(FakeNvml(broken, busy(well)), (lost, well))
    watch.read()
    seen = samples(watch)
    assert seen["convoy_gpu_query_failures_total", "cuda:0"] == 2
    assert ("convoy_gpu_power_watts", "cuda:0") not in seen
    assert seen["convoy_gpu_power_watts", "cuda:1"] == 412.5
    assert [record.message for record in caplog.records] == [
        "cuda:0: nvmlDeviceGetPowerUsage failed: lost; further failures are not logged"
    ]


def sliced(gpu: Device, *slices: FakeDevice | None) -> FakeNvml:
    """Of a GPU that says what all its processes do together."""
    whole = busy(gpu)
    whole.slices = slices
    return FakeNvml(whole)


def slice_of_gpu(number: int, used: int) -> FakeDevice:
    """It tells its memory and nothing else."""
    memory = SimpleNamespace(total=1 << 33, free=(1 << 33) - used, used=used)
    digits = f"{number:02x}" * 16
    uuid = "-".join(("MIG", digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
    return FakeDevice("", uuid, {"nvmlDeviceGetMemoryInfo": memory})


def test_of_a_divided_gpu_the_figures_are_those_of_the_slice_that_serves() -> None:
    first, second = gpus(2)
    nvml = sliced(second, slice_of_gpu(7, 1000), None, slice_of_gpu(1, 2000))
    (reading,) = watched(nvml, (second,)).readings
    assert (reading.uuid[:12], reading.memory_used_bytes, reading.memory_total_bytes) == ("MIG-01010101", 2000, 1 << 33)
    assert reading.busy_ratio is None
    # Whatever CUDA calls it: there is only one that it can be.
    (reading,) = watched(sliced(first, None, slice_of_gpu(9, 3000)), (first,)).readings
    assert reading.memory_used_bytes == 3000


def test_readings_end_when_they_are_too_old_to_be_true() -> None:
    (gpu,) = gpus()
    now_s = 0.0
    watch = watched(FakeNvml(busy(gpu)), (gpu,), lambda: now_s)
    now_s = 10.0
    assert watch.readings
    now_s = 10.1
    assert watch.readings == ()
    assert samples(watch) == {}


def test_without_nvml_the_reason_is_said_and_a_scrape_is_empty(caplog: pytest.LogCaptureFixture) -> None:
    (gpu,) = gpus()
    watch = GpuWatch((gpu,), opened=lambda: open_nvml(FakeNvml(does_start=False)))
    watch.start()
    wait_until(lambda: caplog.records, "the reason was logged")
    assert "no GPU metrics: NVML does not start: Driver Not Loaded" in caplog.text
    assert samples(watch) == {}


def test_without_the_library_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NvmlUnavailable, match=r"pip install .*\[gpu\]"):
        open_nvml()
