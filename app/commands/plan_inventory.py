"""What is in a plan cache, and which of it can serve on this machine.

Knows records, GPUs and the installed TensorRT. Opens no engine: that every byte of a plan is right is all it finds out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from convoy.app.engines.machine import Machine
from convoy.app.engines.tensorrt_library import library_named
from convoy.models.bundle import Precision
from convoy.models.plan_cache import find_plan, records_in
from convoy.models.plans import Gpu, NoPlan, PlanKey, PlanRecord


@dataclass(frozen=True, slots=True)
class PlanFound:
    """One plan in the cache; `why_not` says why it cannot serve here, and is empty where it can."""

    model: str
    precision: Precision
    batch_sizes: tuple[int, ...]
    target: str
    plan_bytes: int
    why_not: str


@dataclass(frozen=True, slots=True)
class PlanInventory:
    """A cache's plans, and what in it is no plan at all."""

    folder: str
    plans: tuple[PlanFound, ...]
    unreadable: tuple[str, ...]


def take_inventory(cache: Path, machine: Machine) -> PlanInventory:
    """Look through the cache; reads every plan that is for this machine. A cache that is not there is empty."""
    records = list(records_in(cache))
    plans = tuple(_found(cache, record, machine) for record in records if isinstance(record, PlanRecord))
    unreadable = tuple(record.reason for record in records if isinstance(record, NoPlan))
    return PlanInventory(str(cache), plans, unreadable)


def _found(cache: Path, record: PlanRecord, machine: Machine) -> PlanFound:
    return PlanFound(
        model=record.onnx_name,
        precision=record.options.precision,
        batch_sizes=record.options.batch_sizes,
        target=str(record.key.target),
        plan_bytes=record.plan.bytes,
        why_not=next(_obstacles(cache, record.key, machine), ""),
    )


def _obstacles(cache: Path, key: PlanKey, machine: Machine) -> Iterator[str]:
    if not machine.gpus:
        # Whoever builds ahead wants to know at least whether it is whole.
        yield (
            plan.reason if isinstance(plan := find_plan(cache, key), NoPlan) else "there is no GPU that it could run on"
        )
        return
    library = library_named(key.target.library)
    found = machine.runs(library)
    if found.module is None:
        yield found.reason
        return
    if key.target.version != (installed := found.module.__version__):
        yield f"{library.title} {installed} is installed"
    gpus = [Gpu(gpu.properties.name, gpu.properties.compute_capability) for gpu in machine.gpus]
    if not any(key.target.covers(gpu) for gpu in gpus):
        yield "no GPU of this kind is here"
    if isinstance(plan := find_plan(cache, key), NoPlan):
        yield plan.reason
