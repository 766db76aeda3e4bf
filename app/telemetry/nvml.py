"""What NVML reports about a GPU: utilisation, memory, temperature and throttling.

Knows NVML's calls, which of them a device may lack, and that its order of devices differs from CUDA's: a GPU is found
by its place on the PCI bus. The library is untyped, may be missing, and may be a fake. Raises only NvmlUnavailable:
what a device does not report is None.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from convoy.app.engines.cuda.driver import GpuProperties
from convoy.models.checkout import pip_install

_log = logging.getLogger("convoy")
_Value = TypeVar("_Value")

# From nvml.h, where each is a bit: why the clocks are lower than possible.
THROTTLE_REASONS = {
    "gpu_idle": 0x1,
    "applications_clocks": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
    "display_clocks": 0x100,
}


class NvmlUnavailable(Exception):
    """NVML is not available; the message says why, and what to do if something can be done."""


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU at one moment. Ratios are of 1; `throttled_by` names reasons; None is what the device does not report."""

    device: str
    name: str
    uuid: str
    busy_ratio: float | None = None
    memory_busy_ratio: float | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None
    temperature_c: int | None = None
    sm_clock_hz: int | None = None
    memory_clock_hz: int | None = None
    throttled_by: tuple[str, ...] | None = None
    ecc_errors: int | None = None


# By NVML's own names, which a test compares with the library.
_TEMPERATURE_OF_GPU = 0  # NVML_TEMPERATURE_GPU
_CLOCK_SM, _CLOCK_MEMORY = 1, 2  # NVML_CLOCK_SM, NVML_CLOCK_MEM
_UNCORRECTED, _SINCE_DRIVER_LOAD = 1, 0  # NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC


class GpuProbe:
    """Queries one GPU repeatedly, named as by CUDA. Raises NvmlUnavailable if NVML does not find it.

    `library` is pynvml, started, or a fake of it. `failures` counts failed queries, without unsupported ones.
    """

    def __init__(self, library: Any, gpu: GpuProperties) -> None:
        self._library, self._gpu = library, gpu
        self.device = gpu.device
        self.failures = 0
        self._complained_of: set[str] = set()
        try:
            self._handle = self._slice_of(library.nvmlDeviceGetHandleByPciBusId(gpu.pci_bus_id.encode()))
            self._uuid = _text(library.nvmlDeviceGetUUID(self._handle))
        except library.NVMLError as error:
            raise NvmlUnavailable(f"NVML does not find {gpu.device} at {gpu.pci_bus_id}: {error}") from error

    def read(self) -> GpuReading:
        """Takes some milliseconds, and longer if the GPU is in trouble; not for an event loop."""
        rates = self._ask("nvmlDeviceGetUtilizationRates")
        memory = self._ask("nvmlDeviceGetMemoryInfo")
        return GpuReading(
            device=self._gpu.device,
            name=self._gpu.name,
            uuid=self._uuid,
            busy_ratio=_if_told(rates, lambda told: told.gpu / 100),
            memory_busy_ratio=_if_told(rates, lambda told: told.memory / 100),
            memory_total_bytes=_if_told(memory, lambda told: int(told.total)),
            memory_used_bytes=_if_told(memory, lambda told: int(told.used)),
            power_w=_if_told(self._ask("nvmlDeviceGetPowerUsage"), lambda milli: milli / 1000),
            power_limit_w=_if_told(self._ask("nvmlDeviceGetEnforcedPowerLimit"), lambda milli: milli / 1000),
            energy_j=_if_told(self._ask("nvmlDeviceGetTotalEnergyConsumption"), lambda milli: milli / 1000),
            temperature_c=self._ask("nvmlDeviceGetTemperature", _TEMPERATURE_OF_GPU),
            sm_clock_hz=_if_told(self._ask("nvmlDeviceGetClockInfo", _CLOCK_SM), lambda mega: mega * 1_000_000),
            memory_clock_hz=_if_told(self._ask("nvmlDeviceGetClockInfo", _CLOCK_MEMORY), lambda mega: mega * 1_000_000),
            throttled_by=_if_told(self._throttle_bits(), _names_of),
            ecc_errors=self._ask("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _SINCE_DRIVER_LOAD),
        )

    def _slice_of(self, whole: Any) -> Any:
        """On a divided GPU, the MIG slice that CUDA sees, which has its own memory. Raises NvmlUnavailable.

        No figures are better than those of the whole GPU, which other processes share.
        """
        library, gpu = self._library, self._gpu
        try:
            is_divided = library.nvmlDeviceGetMigMode(whole)[0] == library.NVML_DEVICE_MIG_ENABLE
        except (library.NVMLError_NotSupported, library.NVMLError_FunctionNotFound):
            is_divided = False
        if not is_divided:
            return whole
        slices = []
        for index in range(library.nvmlDeviceGetMaxMigDeviceCount(whole)):
            with suppress(library.NVMLError_NotFound, library.NVMLError_InvalidArgument):
                slices.append(library.nvmlDeviceGetMigDeviceHandleByIndex(whole, index))
        for one in slices:
            uuid = _text(library.nvmlDeviceGetUUID(one)).removeprefix("MIG-").replace("-", "")
            if uuid.lower() == gpu.uuid.lower() or len(slices) == 1:
                return one
        raise NvmlUnavailable(f"{gpu.device} is a slice of {gpu.name}, but NVML does not say which of {len(slices)}")

    def _throttle_bits(self) -> Any:
        """Newer libraries call them events, because idling is one; older drivers know only the older name."""
        bits = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        return bits if bits is not None else self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")

    def _ask(self, name: str, *arguments: Any) -> Any:
        library = self._library
        question = getattr(library, name, None)
        if question is None:
            return None
        try:
            return question(self._handle, *arguments)
        except (library.NVMLError_NotSupported, library.NVMLError_FunctionNotFound):
            return None
        except library.NVMLError as error:
            self.failures += 1
            if name not in self._complained_of:
                self._complained_of.add(name)
                _log.warning("%s: %s failed: %s; further failures are not logged", self._gpu.device, name, error)
            return None


def open_nvml(library: Any = None) -> Any:
    """NVML, started: pynvml, or a fake of it. Raises NvmlUnavailable."""
    try:
        library = library or importlib.import_module("pynvml")
    except ImportError as error:
        raise NvmlUnavailable(f"nvidia-ml-py is not installed; run {pip_install('gpu')} or [rtx]") from error
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        raise NvmlUnavailable(f"NVML does not start: {error}") from error
    return library


def _if_told(told: Any, convert: Callable[[Any], _Value]) -> _Value | None:
    return None if told is None else convert(told)


def _names_of(bits: int) -> tuple[str, ...]:
    return tuple(name for name, bit in THROTTLE_REASONS.items() if bits & bit)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
