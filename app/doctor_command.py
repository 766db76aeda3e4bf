"""`convoy doctor`: what this machine has, and which engines can run here and why the others cannot."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from app.engines import cpu
from app.engines.select import Availability, availabilities
from app.version import VERSION

_LIBRARIES = (
    *("fastapi", "uvicorn", "numpy", "Pillow", "safetensors", "onnxruntime", "onnxruntime-gpu", "tensorrt"),
    *("cuda-python", "onnx", "onnxscript", "torch", "torchvision", "tritonclient"),
)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything `doctor` knows. `libraries` maps a distribution to its version, None where it is missing."""

    convoy: str
    python: str
    system: str
    cpu: str
    cpu_cores: int
    int8_dot_product: bool
    gpus: tuple[str, ...]
    gpu_note: str
    libraries: dict[str, str | None]
    engines: tuple[Availability, ...]


def run(as_json: bool, console: Console) -> None:
    """Print the diagnosis as tables, or as JSON."""
    diagnosis = diagnose()
    if as_json:
        console.print_json(data=asdict(diagnosis))
        return
    console.print(_machine(diagnosis))
    console.print(_engines(diagnosis))
    console.print(_libraries(diagnosis))


def diagnose() -> Diagnosis:
    gpus, note = _gpus()
    return Diagnosis(
        convoy=VERSION,
        python=platform.python_version(),
        system=platform.platform(),
        cpu=cpu.cpu_model(),
        cpu_cores=cpu.cpu_budget(),
        int8_dot_product=cpu.has_int8_dot_product(),
        gpus=gpus,
        gpu_note=note,
        libraries={name: _version(name) for name in _LIBRARIES},
        engines=availabilities(),
    )


def _gpus() -> tuple[tuple[str, ...], str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return (), "none found: nvidia-smi is not installed, so there is no NVIDIA driver"
    query = [tool, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return (), f"nvidia-smi fails: {error}"
    return tuple(line.strip() for line in answer.stdout.splitlines() if line.strip()), ""


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _machine(diagnosis: Diagnosis) -> Table:
    table = Table("machine", "", show_header=False)
    table.add_row("Convoy", f"{diagnosis.convoy} on Python {diagnosis.python}, {diagnosis.system}")
    int8 = "8-bit dot products" if diagnosis.int8_dot_product else "no 8-bit dot products, so INT8 gains little"
    table.add_row("CPU", f"{diagnosis.cpu}, {diagnosis.cpu_cores} cores to use, {int8}")
    table.add_row("GPU", "; ".join(diagnosis.gpus) or diagnosis.gpu_note)
    return table


def _engines(diagnosis: Diagnosis) -> Table:
    table = Table("engine", "runs here", "why")
    for engine in diagnosis.engines:
        table.add_row(engine.engine, "yes" if engine.usable else "no", engine.reason)
    return table


def _libraries(diagnosis: Diagnosis) -> Table:
    table = Table("library", "version")
    for name, version in diagnosis.libraries.items():
        table.add_row(name, version or "-")
    return table
