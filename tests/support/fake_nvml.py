"""NVML without a GPU: pynvml's calls, by scripted devices.

As the real one, it counts devices in its own order, gives bytes or text as its version likes, and raises a class of
its own for each error.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


class NVMLError_FunctionNotFound(NVMLError):
    pass


class NVMLError_GpuIsLost(NVMLError):
    pass


class NVMLError_NotFound(NVMLError):
    pass


class NVMLError_InvalidArgument(NVMLError):
    pass


@dataclass
class FakeDevice:
    """One GPU. `answers` are by call; what is not there is not supported, and an exception is raised.

    Where there are `slices`, MIG divides it into these; None is a place where there could be one.
    """

    pci_bus_id: str
    uuid: str
    answers: dict[str, Any] = field(default_factory=dict)
    slices: tuple[FakeDevice | None, ...] = ()


def busy_device(pci_bus_id: str, uuid: str) -> FakeDevice:
    """A device that tells everything."""
    answers = {
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=75, memory=40),
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=1 << 34, free=1 << 33, used=1 << 33),
        "nvmlDeviceGetPowerUsage": 412_500,
        "nvmlDeviceGetEnforcedPowerLimit": 700_000,
        "nvmlDeviceGetTotalEnergyConsumption": 9_000_000,
        "nvmlDeviceGetTemperature": 61,
        "nvmlDeviceGetClockInfo": {1: 1980, 2: 3201},
        "nvmlDeviceGetCurrentClocksEventReasons": 0x4 | 0x20,
        "nvmlDeviceGetTotalEccErrors": 0,
    }
    return FakeDevice(pci_bus_id, uuid, answers)


class FakeNvml:
    """The module."""

    NVMLError = NVMLError
    NVMLError_NotSupported = NVMLError_NotSupported
    NVMLError_FunctionNotFound = NVMLError_FunctionNotFound
    NVMLError_NotFound = NVMLError_NotFound
    NVMLError_InvalidArgument = NVMLError_InvalidArgument
    NVML_DEVICE_MIG_ENABLE = 1

    def __init__(self, *devices: FakeDevice, does_start: bool = True) -> None:
        self.devices = devices
        self.calls: Counter[str] = Counter()
        self._does_start = does_start

    def nvmlInit(self) -> None:
        if not self._does_start:
            raise NVMLError("Driver Not Loaded")

    def nvmlDeviceGetHandleByPciBusId(self, pci_bus_id: bytes) -> FakeDevice:
        for device in self.devices:
            if device.pci_bus_id.encode() == pci_bus_id:
                return device
        raise NVMLError("Not Found")

    def nvmlDeviceGetMigMode(self, device: FakeDevice) -> list[int]:
        if not device.slices:
            raise NVMLError_NotSupported("Not Supported")
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, device: FakeDevice) -> int:
        return len(device.slices)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: FakeDevice, index: int) -> FakeDevice:
        found = device.slices[index]
        if found is None:
            raise NVMLError_NotFound("Not Found")
        return found

    def nvmlDeviceGetUUID(self, device: FakeDevice) -> str:
        return device.uuid

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvmlDeviceGet"):
            raise AttributeError(name)

        def call(device: FakeDevice, *arguments: int) -> Any:
            self.calls[name] += 1
            answer = device.answers.get(name, NVMLError_NotSupported("Not Supported"))
            if isinstance(answer, Exception):
                raise answer
            return answer[arguments[0]] if isinstance(answer, dict) else answer

        return call
