"""Plans: TensorRT engines built for one kind of GPU, kept in a cache beside the store and never in it.

    CACHE/<ONNX digest>/trt<version>-sm<capability>-<digest>.plan    the engine
                        trt<version>-sm<capability>-<digest>.json    the record that vouches for its bytes
                        trt<version>-sm<capability>-<digest>.lock    held by whoever builds it
    CACHE/timing-trt<version>-sm<capability>.cache                   measured kernel times, shared by all builds

Knows the records, the keys and where files lie, not what is in them: `models.plan_cache` finds and verifies
plans. Knows neither TensorRT nor how a plan is built. The server and the builder share it.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

from models.bundle import FileRecord, Precision
from models.errors import UsageError
from models.records import to_jsonable

SCHEMA_VERSION = 1
# Part of every key. Raise it when the builder makes a different plan from the same options.
RECIPE = 1

HardwareCompatibility = Literal["none", "same_compute_capability"]
_PATH_PART = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+]*")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as far as plans care: its marketing name and its compute capability, such as "9.0"."""

    name: str
    compute_capability: str


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What the builder is asked for, as far as it changes the plan.

    One static profile per batch size, in this order. `workspace_mb` (MiB) bounds a kernel's scratch memory;
    None leaves it to TensorRT. With "same_compute_capability" the plan serves every GPU of the same
    capability, at some cost in speed; with "none" only GPUs of the same name. Raises UsageError.
    """

    precision: Precision
    batch_sizes: tuple[int, ...]
    workspace_mb: int | None = None
    hardware_compatibility: HardwareCompatibility = "none"

    def __post_init__(self) -> None:
        sizes = self.batch_sizes
        if not sizes or sizes[0] < 1 or any(a >= b for a, b in pairwise(sizes)):
            raise UsageError(f"batch sizes must ascend from 1 or more, such as 1,2,4,8; got {list(sizes)}")
        if self.workspace_mb is not None and self.workspace_mb < 1:
            raise UsageError(f"the workspace must be at least 1 MiB, got {self.workspace_mb}")


@dataclass(frozen=True, slots=True)
class PlanKey:
    """All that a plan depends on. `gpu_name` is None where any GPU of the capability will do."""

    onnx_sha256: str
    tensorrt: str
    compute_capability: str
    gpu_name: str | None
    options_sha256: str

    def __post_init__(self) -> None:
        for part in (self.onnx_sha256, self.tensorrt, self.compute_capability):
            if not _PATH_PART.fullmatch(part):
                raise ValueError(f"{part!r} cannot be part of a plan's path; this is a bug")

    @property
    def target(self) -> str:
        """The runtime and the device, for people."""
        named = f" ({self.gpu_name})" if self.gpu_name else ""
        return f"compute capability {self.compute_capability}{named} and TensorRT {self.tensorrt}"


def plan_key(onnx_sha256: str, tensorrt: str, gpu: Gpu, options: BuildOptions) -> PlanKey:
    """The key of a model on a device; `onnx_sha256` is `models.onnx_digest.onnx_digest` of its file."""
    is_for_any = options.hardware_compatibility == "same_compute_capability"
    options_sha256 = _sha256_of({"recipe": RECIPE, "options": to_jsonable(options)})
    return PlanKey(onnx_sha256, tensorrt, gpu.compute_capability, None if is_for_any else gpu.name, options_sha256)


@dataclass(frozen=True, slots=True)
class PlanAudit:
    """What runs in which precision, by the engine inspector: the number of layers that compute in each
    (the narrowest of a layer's data types), and of those that only move or convert data."""

    by_precision: dict[str, int]
    moving: int

    @property
    def layers(self) -> int:
        return sum(self.by_precision.values())


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """What is known of a plan. `scratch_bytes` is the device memory a context needs, per batch size."""

    schema_version: int
    key: PlanKey
    options: BuildOptions
    plan: FileRecord
    scratch_bytes: tuple[int, ...]
    audit: PlanAudit
    build_s: float
    device_name: str
    onnx_name: str
    created_at: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """A verified plan. `data` are the very bytes that were hashed: deserialise these and not the file again."""

    path: Path
    record: PlanRecord
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class NoPlan:
    """There is no plan to use, and why; building it anew is always the remedy."""

    reason: str


@dataclass(frozen=True, slots=True)
class BuildEvent:
    """One line of JSON on the builder's stdout, under `--json-progress`.

    progress: `text` is TensorRT's phase, `step` of `total` done, `parent` the phase around it; note: for the
    log; done: `text` is the plan's path; failed: `text` is the error, and the builder exits with 1 or 2.
    """

    kind: Literal["progress", "note", "done", "failed"]
    text: str
    elapsed_s: float
    parent: str | None = None
    step: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class PlanPaths:
    """Where a key's files lie."""

    folder: Path
    stem: str

    @staticmethod
    def of(cache: Path, key: PlanKey) -> PlanPaths:
        digest = _sha256_of(to_jsonable(key))[:16]
        return PlanPaths(cache / key.onnx_sha256, f"trt{key.tensorrt}-sm{key.compute_capability}-{digest}")

    @property
    def plan(self) -> Path:
        return self.folder / f"{self.stem}.plan"

    @property
    def record(self) -> Path:
        return self.folder / f"{self.stem}.json"

    @property
    def lock(self) -> Path:
        return self.folder / f"{self.stem}.lock"


def timing_cache_path(cache: Path, key: PlanKey) -> Path:
    """Where the kernel times for this TensorRT and device are remembered; they fit no other."""
    return cache / f"timing-trt{key.tensorrt}-sm{key.compute_capability}.cache"


def _sha256_of(body: object) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
