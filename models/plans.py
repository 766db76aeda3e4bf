"""Plans: TensorRT engines built for certain GPUs, kept in a cache beside the store and never in it.

    CACHE/<ONNX digest>/trt<version>-sm<capability>-<digest>.plan    the engine
                        trt<version>-sm<capability>-<digest>.json    the record that vouches for its bytes
                        trt<version>-sm<capability>-<digest>.lock    held by whoever builds it
                        rtx<version>-<targets>-<digest>.*            the same of TensorRT for RTX
                        rtx<version>-<targets>-<digest>-<gpu>.kernels    what its compiler made of it on a device
                        rtx<version>-<targets>-<digest>-<gpu>-<batch>.captures    who captures its graphs faster there
    CACHE/timing-trt<version>-sm<capability>.cache                   measured kernel times, shared by all builds

TensorRT's plans are for one kind of GPU and built on it. Those of TensorRT for RTX are built anywhere and are for every
GPU among their targets: the device's own kernels are made there, and kept.

Knows the records, the keys and where files lie, not what is in them: `convoy.models.plan_cache` finds and verifies
plans. Knows neither library nor how a plan is built. The server and the builder share it.
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
# Whether every batch size has a profile of its own, or one profile spans them all.
Profiles = Literal["each", "range"]
HardwareCompatibility = Literal["none", "same_compute_capability"]
BuildState = Literal["waiting", "building", "built", "failed"]
_PATH_PART = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+]*")
_PREFIXES: dict[LibraryName, str] = {"tensorrt": "trt", "tensorrt-rtx": "rtx"}
# What a plan without named targets runs on, by the documentation of TensorRT for RTX: this and later.
_OLDEST_PORTABLE = "8.0"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as far as plans care: its marketing name and its compute capability, such as "9.0"."""

    name: str
    compute_capability: str


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What the builder is asked for, as far as it changes the plan.

    The batch sizes, ascending, are those that a server runs. `workspace_mb` (MiB) bounds a kernel's scratch memory;
    None leaves it to TensorRT. With "same_compute_capability" the plan serves every GPU of the same
    capability, at some cost in speed; with "none" only GPUs of the same name. Raises UsageError.
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
        """Whether a plan that was built so is as good as one that is built as `wanted`, or does more.

        Where each size has its own profile, a batch is padded to the next: one that doubles it is no use.
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
    """What a plan is built with and for.

    `capabilities` ascend; none of them: wherever the library's plans run by default. `gpu_name` is None where any GPU
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
        """The devices, for people."""
        if not self.capabilities:
            return f"compute capability {_OLDEST_PORTABLE} and later"
        return f"compute capability {', '.join(self.capabilities)}"

    def covers(self, gpu: Gpu) -> bool:
        """Whether a plan for this target may run on `gpu`; what a library does not support it refuses itself."""
        if not self.capabilities:
            return as_number(gpu.compute_capability) >= as_number(_OLDEST_PORTABLE)
        return gpu.compute_capability in self.capabilities and self.gpu_name in (None, gpu.name)

    @property
    def stem(self) -> str:
        """The beginning of the names of its files."""
        parts = [f"sm{capability}" for capability in self.capabilities] or [PORTABLE]
        return f"{_PREFIXES[self.library]}{self.version}-{'+'.join(parts)}"


@dataclass(frozen=True, slots=True)
class PlanKey:
    """All that a plan depends on; `onnx_sha256` is `convoy.models.onnx_digest.onnx_digest` of its file."""

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
    """What TensorRT builds on `gpu`: a plan for GPUs of the same name, unless asked for more."""
    is_for_any = options.hardware_compatibility == "same_compute_capability"
    return PlanTarget("tensorrt", version, (gpu.compute_capability,), None if is_for_any else gpu.name)


@dataclass(frozen=True, slots=True)
class PlanAudit:
    """What runs in which precision, by the library's own account: the number of layers that compute in each
    (the narrowest of a layer's data types), and of all others, which mostly move or convert data."""

    by_precision: dict[str, int]
    moving: int

    @property
    def layers(self) -> int:
        return sum(self.by_precision.values())


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """What is known of a plan.

    `scratch_bytes` is the device memory that a context needs, per profile; empty where no device was there to be asked,
    and then `device_name` is empty, too. `audit` is None where the library did not tell what it built. `warnings` are
    the parser's and the builder's own.
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
class PlanBuild:
    """How far a build of `file` is: `step` of `total` in the builder's `phase`.

    `reason` says why it failed, or why the plan does not serve although it was built; `refused`: the library does not
    take the file, and would not on another try.
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
    """Where a key's files lie."""

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
        """What was compiled of the plan on such a GPU; it fits no other, nor another driver."""
        return self.folder / f"{self.stem}-{_sha256_of([gpu_name, driver])[:16]}.kernels"


def is_record(path: Path, library: LibraryName | None = None) -> bool:
    """Whether a file of the cache is named as a plan's record is; of this library's, where one is given."""
    prefixes = tuple(_PREFIXES.values()) if library is None else (_PREFIXES[library],)
    return path.suffix == ".json" and path.name.startswith(prefixes)


def timing_cache_path(cache: Path, key: PlanKey) -> Path:
    """Where the kernel times for this TensorRT and device are remembered; they fit no other."""
    return cache / f"timing-{key.target.stem}.cache"


def _sha256_of(body: object) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
