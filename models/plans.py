"""Plans: TensorRT engines built for certain GPUs, kept in a cache beside the store and never in it.

    CACHE/<ONNX digest>/trt<version>-sm<capability>-<digest>.plan    the engine
                        trt<version>-sm<capability>-<digest>.json    the record with the hash of its bytes
                        trt<version>-sm<capability>-<digest>.lock    held while it is built
                        rtx<version>-<targets>-<digest>.*            the same for TensorRT for RTX
                        rtx<version>-<targets>-<digest>-<gpu>.kernels    kernels compiled from it on a device
                        rtx<version>-<targets>-<digest>-<gpu>-<batch>.captures    the faster way to capture graphs
    CACHE/timing-trt<version>-sm<capability>.cache                   measured kernel times, shared by all builds

TensorRT's plans are built on the kind of GPU that they are for. Those of TensorRT for RTX are built anywhere, for
several kinds of GPU; the device's kernels are compiled there and kept.

Knows records, keys and file names; `convoy.models.plan_cache` finds and verifies plans. The server and the builder
share it.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

from convoy.models.bundle import FileRecord, Precision
from convoy.models.errors import UsageError
from convoy.models.gpus import PORTABLE, as_number
from convoy.models.records import to_jsonable

SCHEMA_VERSION = 2
# Part of every key. Raise it when the builder makes a different plan from the same options.
RECIPE = 2

LibraryName = Literal["tensorrt", "tensorrt-rtx"]
# Whether every batch size has its own profile, or one profile spans them all.
Profiles = Literal["each", "range"]
HardwareCompatibility = Literal["none", "same_compute_capability"]
BuildState = Literal["waiting", "building", "built", "failed"]
_PATH_PART = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+]*")
_PREFIXES: dict[LibraryName, str] = {"tensorrt": "trt", "tensorrt-rtx": "rtx"}
# The devices of a plan without named targets, by the documentation of TensorRT for RTX: this and later.
_OLDEST_PORTABLE = "8.0"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as far as plans care: its marketing name and its compute capability, such as "9.0"."""

    name: str
    compute_capability: str


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """The options of a build that affect the plan.

    The batch sizes, ascending, are those that a server runs. `workspace_mb` (MiB) bounds a kernel's scratch memory;
    None leaves it to TensorRT. With "same_compute_capability" the plan runs on every GPU of that capability, at some
    cost in speed; with "none" only on GPUs of the same name. Raises UsageError.
    """

    precision: Precision
    batch_sizes: tuple[int, ...]
    workspace_mb: int | None = None
    hardware_compatibility: HardwareCompatibility = "none"
    profiles: Profiles = "each"

    def __post_init__(self) -> None:
        sizes = self.batch_sizes
        if not sizes or sizes[0] < 1 or any(a >= b for a, b in pairwise(sizes)):
            raise UsageError(f"batch sizes must ascend from 1 or more, such as 1,2,4,8; got {list(sizes)}")
        if self.workspace_mb is not None and self.workspace_mb < 1:
            raise UsageError(f"the workspace must be at least 1 MiB, got {self.workspace_mb}")

    def serves(self, wanted: BuildOptions) -> bool:
        """Whether a plan built with these options is at least as good as one built as `wanted`.

        If each size has its own profile, a batch is padded to the next one; padding that doubles it is not acceptable.
        """
        if (self.precision, self.profiles) != (wanted.precision, wanted.profiles):
            return False
        have, need = self.batch_sizes, wanted.batch_sizes
        if self.profiles == "range":
            return have[0] <= need[0] and have[-1] >= need[-1]
        return all(any(size <= own < 2 * size for own in have) for size in need)

    def __str__(self) -> str:
        return f"{self.precision} up to batch {self.batch_sizes[-1]}"


@dataclass(frozen=True, slots=True)
class PlanTarget:
    """The library and the devices of a plan.

    `capabilities` is ascending; empty means wherever the library's plans run by default. `gpu_name` is None if any GPU
    of these capabilities will do.
    """

    library: LibraryName
    version: str
    capabilities: tuple[str, ...]
    gpu_name: str | None = None

    def __str__(self) -> str:
        named = f" ({self.gpu_name})" if self.gpu_name else ""
        library = "TensorRT for RTX" if self.library == "tensorrt-rtx" else "TensorRT"
        return f"{self.where}{named} and {library} {self.version}"

    @property
    def where(self) -> str:
        """The devices, as text."""
        if not self.capabilities:
            return f"compute capability {_OLDEST_PORTABLE} and later"
        return f"compute capability {', '.join(self.capabilities)}"

    def covers(self, gpu: Gpu) -> bool:
        """Whether a plan for this target may run on `gpu`; a library refuses devices that it does not support."""
        if not self.capabilities:
            return as_number(gpu.compute_capability) >= as_number(_OLDEST_PORTABLE)
        return gpu.compute_capability in self.capabilities and self.gpu_name in (None, gpu.name)

    @property
    def stem(self) -> str:
        """The beginning of its files' names."""
        parts = [f"sm{capability}" for capability in self.capabilities] or [PORTABLE]
        return f"{_PREFIXES[self.library]}{self.version}-{'+'.join(parts)}"


@dataclass(frozen=True, slots=True)
class PlanKey:
    """Everything that a plan depends on; `onnx_sha256` is `convoy.models.onnx_digest.onnx_digest` of its file."""

    onnx_sha256: str
    target: PlanTarget
    options_sha256: str

    def __post_init__(self) -> None:
        for part in (self.onnx_sha256, self.target.version, *self.target.capabilities):
            if not _PATH_PART.fullmatch(part):
                raise ValueError(f"{part!r} cannot be part of a plan's path; this is a bug")


def plan_key(onnx_sha256: str, target: PlanTarget, options: BuildOptions) -> PlanKey:
    """The key of a file's plan."""
    return PlanKey(onnx_sha256, target, _sha256_of({"recipe": RECIPE, "options": to_jsonable(options)}))


def tensorrt_target(version: str, gpu: Gpu, options: BuildOptions) -> PlanTarget:
    """TensorRT's target on `gpu`: GPUs of the same name, unless more is asked for."""
    is_for_any = options.hardware_compatibility == "same_compute_capability"
    return PlanTarget("tensorrt", version, (gpu.compute_capability,), None if is_for_any else gpu.name)


@dataclass(frozen=True, slots=True)
class PlanAudit:
    """What runs in which precision, as the library reports: the number of layers that compute in each (the narrowest of
    a layer's data types), and the number of others, which mostly move or convert data.
    """

    by_precision: dict[str, int]
    moving: int

    @property
    def layers(self) -> int:
        return sum(self.by_precision.values())


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """What is known about a plan.

    `scratch_bytes` is the device memory that a context needs, per profile; empty if there was no device, and then
    `device_name` is empty too. `audit` is None if the library did not report it. `warnings` are the parser's and the
    builder's.
    """

    schema_version: int
    key: PlanKey
    options: BuildOptions
    plan: FileRecord
    scratch_bytes: tuple[int, ...]
    audit: PlanAudit | None
    build_s: float
    device_name: str
    onnx_name: str
    created_at: str
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """A verified plan. `data` are the very bytes that were hashed: deserialise these and do not read the file again."""

    path: Path
    record: PlanRecord
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class NoPlan:
    """There is no plan to use, and why; building it again is always the remedy."""

    reason: str


@dataclass(frozen=True, slots=True)
class BuildEvent:
    """One line of JSON on the builder's stdout, under `--json-progress`.

    progress: `text` is TensorRT's phase, `step` of `total` done, `parent` the enclosing phase; note: for the log; done:
    `text` is the plan's path; failed: `text` is the error, and the builder exits with 1 or 2.
    """

    kind: Literal["progress", "note", "done", "failed"]
    text: str
    elapsed_s: float
    parent: str | None = None
    step: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class PlanBuild:
    """The state of a build of `file`: `step` of `total` in the builder's `phase`.

    `reason` says why it failed, or why the plan does not serve although it was built. `refused` means that the library
    does not accept the file, so a retry is pointless.
    """

    state: BuildState
    file: str = ""
    phase: str = ""
    step: int = 0
    total: int = 0
    elapsed_s: float = 0.0
    reason: str | None = None
    plan: Path | None = None
    refused: bool = False


@dataclass(frozen=True, slots=True)
class PlanPaths:
    """The file names of a key."""

    folder: Path
    stem: str

    @staticmethod
    def of(cache: Path, key: PlanKey) -> PlanPaths:
        digest = _sha256_of(to_jsonable(key))[:16]
        return PlanPaths(cache / key.onnx_sha256, f"{key.target.stem}-{digest}")

    @property
    def plan(self) -> Path:
        return self.folder / f"{self.stem}.plan"

    @property
    def record(self) -> Path:
        return self.folder / f"{self.stem}.json"

    @property
    def lock(self) -> Path:
        return self.folder / f"{self.stem}.lock"

    def kernels(self, gpu_name: str, driver: str) -> Path:
        """Kernels compiled from the plan on such a GPU; they fit no other GPU or driver."""
        return self.folder / f"{self.stem}-{_sha256_of([gpu_name, driver])[:16]}.kernels"


def is_record(path: Path, library: LibraryName | None = None) -> bool:
    """Whether a file of the cache has the name of a plan's record, of this library if one is given."""
    prefixes = tuple(_PREFIXES.values()) if library is None else (_PREFIXES[library],)
    return path.suffix == ".json" and path.name.startswith(prefixes)


def timing_cache_path(cache: Path, key: PlanKey) -> Path:
    """The file with kernel times for this TensorRT and device; they fit no other."""
    return cache / f"timing-{key.target.stem}.cache"


def _sha256_of(body: object) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
