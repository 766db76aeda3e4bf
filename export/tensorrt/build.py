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

from convoy.app.engines.tensorrt_library import TensorRt, library_named
from convoy.export.tensorrt import engine
from convoy.export.tensorrt.files import read_timing, sole_builder, store_plan, write_timing
from convoy.export.tensorrt.watch import BuildWatch
from convoy.models.bundle import FileRecord
from convoy.models.errors import FileRefused, UsageError
from convoy.models.onnx_digest import onnx_digest
from convoy.models.plan_cache import find_plan
from convoy.models.plans import (
    SCHEMA_VERSION,
    BuildOptions,
    Plan,
    PlanKey,
    PlanPaths,
    PlanRecord,
    PlanTarget,
    plan_key,
    timing_cache_path,
)


@dataclass(frozen=True, slots=True)
class BuildJob:
    """What to build, for which devices and where to. `timing_cache` None means the cache's own. `device_name` is the
    GPU that builds, or empty. If a server computes on it meanwhile, `beside_mb` MiB may be used to try kernels.
    """

    onnx: Path
    cache: Path
    options: BuildOptions
    target: PlanTarget
    device_name: str = ""
    timing_cache: Path | None = None
    beside_mb: int | None = None


def build_plan(job: BuildJob, trt: Any, watch: BuildWatch) -> Plan:
    """The verified plan, from the cache or new. Raises UsageError and JobError; the cache is then unchanged."""
    key = plan_key(_digest(job.onnx), job.target, job.options)
    paths = PlanPaths.of(job.cache, key)
    with sole_builder(job.cache, paths, watch):
        found = find_plan(job.cache, key)
        if isinstance(found, Plan):
            watch.note("the plan is already there")
            return found
        watch.note(found.reason)
        built = _build(job, key, trt, watch)
        record = PlanRecord(
            schema_version=SCHEMA_VERSION,
            key=key,
            options=job.options,
            plan=FileRecord(hashlib.sha256(built.data).hexdigest(), len(built.data)),
            scratch_bytes=built.inspected.scratch_bytes,
            audit=built.inspected.audit,
            build_s=round(watch.elapsed_s, 3),
            device_name=job.device_name,
            onnx_name=job.onnx.name,
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
            notes=tuple(watch.notes),
            warnings=built.warnings,
        )
        store_plan(paths, built.data, record)
    return Plan(paths.plan, record, built.data)


@dataclass(frozen=True, slots=True)
class _Built:
    data: bytes
    inspected: engine.Inspected
    warnings: tuple[str, ...]


def _build(job: BuildJob, key: PlanKey, trt: Any, watch: BuildWatch) -> _Built:
    library = library_named(job.target.library)
    timing_path = job.timing_cache or timing_cache_path(job.cache, key)
    # A build for devices that are not here measures nothing.
    timing = None if library.builds_anywhere else read_timing(timing_path, watch)
    capabilities = job.target.capabilities if library.builds_anywhere else ()
    tuned = engine.tune(trt, job.onnx, job.options, capabilities, timing, watch, workspace_mb=_workspace_mb(job))
    # Also after a failure, because these times help the next try. Times measured beside a server's batches are not
    # kept.
    if job.beside_mb is not None:
        watch.note(f"built beside a server, with {_workspace_mb(job)} MiB of workspace at most")
    elif tuned.timing is not None:
        write_timing(timing_path, tuned.timing, watch)
    if tuned.data is None:
        watch.check()
        raise FileRefused(f"{library.title} cannot build {job.onnx}: {tuned.problem}")
    watch.start("inspect", None, 1)
    inspected = _inspected(library, trt, tuned, job)
    watch.finish("inspect")
    return _Built(tuned.data, inspected, tuned.warnings)


def _workspace_mb(job: BuildJob) -> int | None:
    bounds = [bound for bound in (job.options.workspace_mb, job.beside_mb) if bound is not None]
    return max(1, min(bounds)) if bounds else None


def _inspected(library: TensorRt, trt: Any, tuned: engine.Tuned, job: BuildJob) -> engine.Inspected:
    assert tuned.data is not None
    if library.builds_anywhere:  # and only a GPU could load it
        return engine.as_listed(tuned.layers, job.options, job.onnx.name)
    return engine.inspect(trt, tuned.data, job.options, tuned.shapes, job.onnx.name)


def _digest(onnx: Path) -> str:
    try:
        return onnx_digest(onnx)
    except OSError as error:
        raise UsageError(f"{onnx} cannot be read ({error.strerror}); name an ONNX file") from error
