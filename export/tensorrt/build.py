"""From an ONNX file to a plan in the cache: find it, or build, audit and store it.

    digest -> key -> lock -> found? -> tune -> inspect -> store

`build_plan` is the builder without a command line.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from export.tensorrt import engine
from export.tensorrt.files import read_timing, sole_builder, store_plan, write_timing
from export.tensorrt.watch import BuildWatch
from models.bundle import FileRecord
from models.errors import JobError, UsageError
from models.onnx_digest import onnx_digest
from models.plan_cache import find_plan
from models.plans import (
    SCHEMA_VERSION,
    BuildOptions,
    Gpu,
    Plan,
    PlanKey,
    PlanPaths,
    PlanRecord,
    plan_key,
    timing_cache_path,
)


@dataclass(frozen=True, slots=True)
class BuildJob:
    """What to build and where to; `timing_cache` None is the cache's own."""

    onnx: Path
    cache: Path
    options: BuildOptions
    timing_cache: Path | None = None


def build_plan(job: BuildJob, trt: Any, gpu: Gpu, watch: BuildWatch) -> Plan:
    """The verified plan, from the cache or new. Raises UsageError and JobError; the cache is then as before."""
    key = plan_key(_digest(job.onnx), trt.__version__, gpu, job.options)
    paths = PlanPaths.of(job.cache, key)
    with sole_builder(job.cache, paths, watch):
        found = find_plan(job.cache, key)
        if isinstance(found, Plan):
            watch.note("the plan is already there")
            return found
        watch.note(found.reason)
        data, inspected = _build(job, key, trt, watch)
        record = PlanRecord(
            schema_version=SCHEMA_VERSION,
            key=key,
            options=job.options,
            plan=FileRecord(hashlib.sha256(data).hexdigest(), len(data)),
            scratch_bytes=inspected.scratch_bytes,
            audit=inspected.audit,
            build_s=round(watch.elapsed_s, 3),
            device_name=gpu.name,
            onnx_name=job.onnx.name,
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
            notes=tuple(watch.notes),
        )
        store_plan(paths, data, record)
    return Plan(paths.plan, record, data)


def _build(job: BuildJob, key: PlanKey, trt: Any, watch: BuildWatch) -> tuple[bytes, engine.Inspected]:
    timing_path = job.timing_cache or timing_cache_path(job.cache, key)
    tuned = engine.tune(trt, job.onnx, job.options, read_timing(timing_path, watch), watch)
    # Also after a failure: with these times the next try gets further.
    if tuned.timing is not None:
        write_timing(timing_path, tuned.timing, watch)
    if tuned.data is None:
        watch.check()
        raise JobError(f"TensorRT cannot build {job.onnx}: {tuned.problem}")
    watch.start("inspect", None, 1)
    inspected = engine.inspect(trt, tuned.data, job.options, tuned.shapes, job.onnx.name)
    watch.finish("inspect")
    return tuned.data, inspected


def _digest(onnx: Path) -> str:
    try:
        return onnx_digest(onnx)
    except OSError as error:
        raise UsageError(f"{onnx} cannot be read ({error.strerror}); name an ONNX file") from error
