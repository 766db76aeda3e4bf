"""`convoy doctor`: what this machine has, which engines can run here, and why the others cannot."""

from __future__ import annotations

import platform
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from convoy.app.engines import cpu
from convoy.app.engines.machine import Machine, find_machine
from convoy.app.engines.table import Availability, availabilities
from convoy.app.engines.tensorrt_library import LIBRARIES, BuilderFound, find_builder, library_named
from convoy.app.version import VERSION
from convoy.models.bundle import Precision
from convoy.models.checkpoint import installed_versions
from convoy.models.plan_cache import find_plan, records_in
from convoy.models.plans import Gpu, NoPlan, PlanKey, PlanRecord

_LIBRARIES = (
    *("fastapi", "uvicorn", "numpy", "Pillow", "safetensors", "onnxruntime", "onnxruntime-gpu", "openvino"),
    *("simplejpeg", "tensorrt", "tensorrt-cu13", "tensorrt-rtx", "cuda-python", "cuda-bindings"),
    *("nvidia-ml-py", "onnx", "onnxscript", "torch", "torchvision", "tritonclient"),
)


@dataclass(frozen=True, slots=True)
class PlanFound:
    """One plan in the cache; `why_not` says why it cannot serve here, empty if it can."""

    model: str
    precision: Precision
    batch_sizes: tuple[int, ...]
    target: str
    plan_bytes: int
    why_not: str


@dataclass(frozen=True, slots=True)
class PlanInventory:
    """A cache's plans, and files in it that are not plans."""

    folder: str
    plans: tuple[PlanFound, ...]
    unreadable: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GpuFound:
    """One GPU as CUDA sees it. `driver_cuda` is the newest CUDA that its driver supports."""

    device: str
    name: str
    compute_capability: str
    total_bytes: int
    pci_bus_id: str
    driver_cuda: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that `doctor` knows. `libraries` maps a distribution to its version, None if it is missing.

    `gpus` are `gpu_devices` and those that do not work, as text, or what only the driver sees; `gpu_note` says why none
    can be used.
    """

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
    builders: tuple[BuilderFound, ...]
    gpu_devices: tuple[GpuFound, ...]
    plan_cache: PlanInventory


def run(as_json: bool, plan_cache: Path, console: Console) -> None:
    """Print the diagnosis as tables, or as JSON."""
    diagnosis = diagnose(find_machine(), plan_cache)
    if as_json:
        console.print_json(data=asdict(diagnosis))
        return
    console.print(_machine(diagnosis))
    console.print(_engines(diagnosis))
    console.print(_builders(diagnosis))
    if diagnosis.plan_cache.plans:
        console.print(_plans(diagnosis.plan_cache))
    for reason in diagnosis.plan_cache.unreadable:
        console.print(Text(f"not a plan: {reason}"), soft_wrap=True)
    console.print(_libraries(diagnosis))


def diagnose(machine: Machine, plan_cache: Path) -> Diagnosis:
    machine = machine.tried()
    gpus = tuple(
        GpuFound(
            gpu.properties.device,
            gpu.properties.name,
            gpu.properties.compute_capability,
            gpu.properties.total_bytes,
            gpu.properties.pci_bus_id,
            gpu.cuda.driver_version(),
        )
        for gpu in machine.gpus
    )
    installed = installed_versions(*_LIBRARIES)
    unusable = tuple(f"{gpu.device} cannot be used: {gpu.reason}" for gpu in machine.unusable)
    return Diagnosis(
        convoy=VERSION,
        python=platform.python_version(),
        system=platform.platform(),
        cpu=cpu.cpu_model(),
        cpu_cores=cpu.cpu_budget(),
        int8_dot_product=cpu.has_int8_dot_product(),
        gpus=(*(_in_words(gpu) for gpu in gpus), *unusable) or _seen_by_driver(),
        gpu_note=machine.no_gpu,
        libraries={name: installed.get(name) for name in _LIBRARIES},
        engines=availabilities(machine),
        builders=tuple(find_builder(library, tuple(gpu.compute_capability for gpu in gpus)) for library in LIBRARIES),
        gpu_devices=gpus,
        plan_cache=take_inventory(plan_cache, machine),
    )


def take_inventory(cache: Path, machine: Machine) -> PlanInventory:
    """Look through the cache and read every plan for this machine. A missing cache is empty."""
    records = list(records_in(cache))
    plans = tuple(
        PlanFound(
            model=record.onnx_name,
            precision=record.options.precision,
            batch_sizes=record.options.batch_sizes,
            target=str(record.key.target),
            plan_bytes=record.plan.bytes,
            why_not=_why_not(cache, record.key, machine),
        )
        for record in records
        if isinstance(record, PlanRecord)
    )
    unreadable = tuple(record.reason for record in records if isinstance(record, NoPlan))
    return PlanInventory(str(cache), plans, unreadable)


def _why_not(cache: Path, key: PlanKey, machine: Machine) -> str:
    """Why a plan cannot serve here; empty if it can."""
    if machine.gpus:
        library = library_named(key.target.library)
        found = machine.runs(library)
        if found.module is None:
            return found.reason
        if key.target.version != (installed := found.module.__version__):
            return f"{library.title} {installed} is installed"
        gpus = [Gpu(gpu.properties.name, gpu.properties.compute_capability) for gpu in machine.gpus]
        if not any(key.target.covers(gpu) for gpu in gpus):
            return "no GPU of this kind"
    plan = find_plan(cache, key)
    if isinstance(plan, NoPlan):  # a plan that was built ahead may be damaged, also without a GPU
        return plan.reason
    return "" if machine.gpus else "no GPU"


def _in_words(gpu: GpuFound) -> str:
    memory = f"{gpu.total_bytes / (1 << 30):.1f} GiB"
    capability = f"compute capability {gpu.compute_capability}"
    return f"{gpu.device}: {gpu.name}, {capability}, {memory}, driver for CUDA {gpu.driver_cuda}"


def _seen_by_driver() -> tuple[str, ...]:
    """The GPUs that exist although CUDA cannot be used: then a library is missing, and not the driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    query = [tool, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(f"nvidia-smi shows {line.strip()}" for line in answer.stdout.splitlines() if line.strip())


def _machine(diagnosis: Diagnosis) -> Table:
    table = Table("machine", "", show_header=False)
    table.add_row("Convoy", f"{diagnosis.convoy} on Python {diagnosis.python}, {diagnosis.system}")
    int8 = "8-bit dot products" if diagnosis.int8_dot_product else "no 8-bit dot products (INT8 gains little)"
    table.add_row("CPU", f"{diagnosis.cpu}, {diagnosis.cpu_cores} cores, {int8}")
    # As text: the brackets of an extra are not markup.
    table.add_row("GPU", Text("\n".join((*diagnosis.gpus, diagnosis.gpu_note)).strip()))
    return table


def _engines(diagnosis: Diagnosis) -> Table:
    table = Table(Column("engine", no_wrap=True), "runs here", "why")
    for engine in diagnosis.engines:
        # The first table has the reason why there is no GPU.
        reason = "no usable GPU" if engine.reason == diagnosis.gpu_note else engine.reason
        table.add_row(engine.engine, "yes" if engine.usable else "no", Text(reason))
    return table


def _builders(diagnosis: Diagnosis) -> Table:
    table = Table("plan builder", "builds here", "compute capabilities")
    for found in diagnosis.builders:
        told = f"{', '.join(found.targets)} ({found.reason})" if found.builds else found.reason
        table.add_row(f"{found.library} {found.version}".strip(), "yes" if found.builds else "no", Text(told))
    return table


def _plans(inventory: PlanInventory) -> Table:
    table = Table("plan", "batches", "for", "MB", "serves here", title=f"plans in {inventory.folder}")
    for plan in inventory.plans:
        table.add_row(
            Text(f"{plan.model} as {plan.precision}"),
            ", ".join(map(str, plan.batch_sizes)),
            Text(plan.target),
            f"{plan.plan_bytes / 1e6:.1f}",
            Text(f"no: {plan.why_not}" if plan.why_not else "yes"),
        )
    return table


def _libraries(diagnosis: Diagnosis) -> Table:
    table = Table(Column("library", no_wrap=True), "version")
    for name, version in diagnosis.libraries.items():
        table.add_row(name, version or "-")
    return table
