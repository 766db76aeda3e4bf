"""The memory and energy of an epoch, if the machine tells.

Energy comes from counters: a GPU's through NVML, a processor's packages through Linux's powercap (RAPL), which since
2020 only root may read. It includes what other processes used.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

POWERCAP = Path("/sys/class/powercap")
_MICRO, _MILLI = 1e-6, 1e-3


class EnergyMeter:
    """Joules since the last reading, or None if there is no counter."""

    def __init__(self, device: torch.device, powercap: Path = POWERCAP) -> None:
        self._read_j = _gpu_counter(device) if device.type == "cuda" else _package_counters(powercap)
        self._last_j: float | None = None

    def start(self) -> None:
        """Start to count."""
        self._last_j = self._read_j()

    def used_j(self) -> float | None:
        """Joules since `start`."""
        now_j = self._read_j()
        return None if now_j is None or self._last_j is None else now_j - self._last_j


def start_peak(device: torch.device) -> None:
    """Reset a GPU's peak; that of a process cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int:
    """On a GPU, torch's peak allocation since `start_peak`; otherwise the peak of this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def _gpu_counter(device: torch.device) -> Callable[[], float | None]:
    try:
        import pynvml

        pynvml.nvmlInit()
        # By id, because NVML also counts GPUs that CUDA_VISIBLE_DEVICES hides.
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle: Any = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception:  # no library, no driver, no such counter: each has its own errors
        return lambda: None

    def read_j() -> float | None:
        with suppress(pynvml.NVMLError):
            return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) * _MILLI
        return None

    return read_j


def _package_counters(powercap: Path) -> Callable[[], float | None]:
    """The sum over processors. Counters wrap around within hours at full load; that is corrected."""
    folders = [folder for folder in sorted(powercap.glob("intel-rapl:*")) if folder.name.count(":") == 1]
    last_uj: dict[Path, int] = {}
    turns_uj: dict[Path, int] = dict.fromkeys(folders, 0)

    def read_j() -> float | None:
        try:
            for folder in folders:
                now_uj = int((folder / "energy_uj").read_text())
                if now_uj < last_uj.get(folder, 0):
                    turns_uj[folder] += int((folder / "max_energy_range_uj").read_text())
                last_uj[folder] = now_uj
        except (OSError, ValueError):
            return None
        return sum(last_uj[folder] + turns_uj[folder] for folder in folders) * _MICRO if folders else None

    return read_j
