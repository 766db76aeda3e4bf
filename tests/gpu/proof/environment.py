"""On what a proof was made: the device, its driver and clocks, the libraries, the CPU.

Knows how to ask. Whatever cannot be asked is "none" and stops nothing.
"""

from __future__ import annotations

import importlib
import platform
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from convoy.app.engines.cpu import cpu_budget, cpu_model
from convoy.app.engines.cuda.device import Device
from convoy.models.checkpoint import convoy_version
from tests.gpu.proof.records import Environment, GpuState

_NONE = "none"
_LIBRARIES = (
    *("torch", "torchvision", "timm", "triton", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu"),
    *(
        "tensorrt",
        "tensorrt-cu13",
        "tensorrt-rtx",
        "cuda-bindings",
        "nvidia-cudnn-cu13",
        "nvidia-ml-py",
        "numpy",
        "Pillow",
    ),
    *("fastapi", "uvicorn", "uvloop", "orjson", "pydantic", "pydantic-settings", "prometheus-client", "grpcio"),
    *("tritonclient", "typer", "rich", "httpx", "pytest", "hypothesis"),
)
# NVML's bits, without those that only say that nothing is to be done.
_THROTTLED = {
    0x2: "application clocks",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}


def describe(device: Device) -> Environment:
    """The machine as it is now."""
    gpu = device.properties
    return Environment(
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        gpu=gpu.name,
        compute_capability=gpu.compute_capability,
        memory_gib=round(gpu.total_bytes / (1 << 30), 1),
        driver=Nvml.of(gpu.pci_bus_id).driver(),
        cuda=device.cuda.driver_version(),
        cpu=cpu_model(),
        cores=cpu_budget(),
        python=platform.python_version(),
        libraries={"convoy": convoy_version()} | {name: _version(name) for name in _LIBRARIES},
    )


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        # It may lie on the path without having been installed.
        try:
            return str(getattr(importlib.import_module(distribution.replace("-", "_")), "__version__", "unknown"))
        except Exception:  # whatever a library that is half there raises
            return _NONE


class Nvml:
    """One device as NVML sees it; silent where NVML is not there."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle

    @staticmethod
    def of(pci_bus_id: str) -> Nvml:
        try:
            library: Any = importlib.import_module("pynvml")
            library.nvmlInit()
            return Nvml(library, library.nvmlDeviceGetHandleByPciBusId(pci_bus_id.encode()))
        except Exception:  # no library, no driver, or a device that NVML knows by another name
            return Nvml(None, None)

    def driver(self) -> str:
        if self._library is None:
            return _NONE
        version = self._ask(lambda nvml, handle: nvml.nvmlSystemGetDriverVersion())
        return version.decode() if isinstance(version, bytes) else str(version or _NONE)

    def state(self, at_s: float) -> GpuState | None:
        """None where NVML is not there; zeros for what it does not tell."""
        if self._library is None:
            return None
        bits = self._ask(lambda nvml, handle: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        if bits is None:  # its newer name
            bits = self._ask(lambda nvml, handle: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)) or 0
        milliwatts = self._ask(lambda nvml, handle: nvml.nvmlDeviceGetPowerUsage(handle)) or 0
        return GpuState(
            at_s=round(at_s, 1),
            sm_mhz=self._clock("NVML_CLOCK_SM"),
            memory_mhz=self._clock("NVML_CLOCK_MEM"),
            power_w=milliwatts / 1e3,
            temperature_c=int(self._ask(lambda nvml, handle: nvml.nvmlDeviceGetTemperature(handle, 0)) or 0),
            throttled=tuple(name for bit, name in _THROTTLED.items() if bits & bit),
        )

    def _clock(self, name: str) -> int:
        return int(self._ask(lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, getattr(nvml, name))) or 0)

    def _ask(self, question: Callable[[Any, Any], Any]) -> Any:
        try:
            return question(self._library, self._handle)
        except Exception:  # NVMLError, by many names
            return None
