"""What to serve and on which device: the input of each row of the table of engines, and what a row leaves for later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from convoy.app.engines.base import CPU, Engine
from convoy.app.engines.cuda.device import Device
from convoy.app.engines.machine import Machine
from convoy.app.engines.select import PrecisionChoice
from convoy.models.bundle import Bundle, Canary, Variant
from convoy.models.onnx_digest import onnx_digest
from convoy.models.plans import BuildOptions, LibraryName, PlanKey
from convoy.models.spec import ModelSpec

# Opens one engine without warming it up.
OpenEngine = Callable[[], Engine]


@dataclass(frozen=True, slots=True)
class Job:
    """A model to serve and how: its files in `folder`, with batches up to `max_batch_size` (0: without batches).

    `canary` is None if the model has none. `may_wait` means that nothing else can serve, so slow steps are done before
    the version serves. `threads` is for engines on the CPU. Each batch size is run `warm_up_runs` times.
    """

    folder: Path
    spec: ModelSpec
    variants: tuple[Variant, ...]
    canary: Canary | None
    max_batch_size: int
    precision: PrecisionChoice
    machine: Machine
    plan_cache: Path | None
    may_wait: bool = False
    threads: int = 1
    warm_up_runs: int = 1
    _digests: dict[Path, str] = field(default_factory=dict, compare=False)

    @staticmethod
    def of_bundle(
        bundle: Bundle,
        max_batch_size: int,
        precision: PrecisionChoice,
        machine: Machine,
        plan_cache: Path | None,
        *,
        may_wait: bool = False,
        threads: int = 1,
        warm_up_runs: int = 1,
    ) -> Job:
        """Make the job of a bundle. Raises BundleError if it has no canary."""
        return Job(
            bundle.folder,
            bundle.manifest.spec,
            bundle.manifest.variants,
            bundle.canary(),
            max_batch_size,
            precision,
            machine,
            plan_cache,
            may_wait,
            threads,
            warm_up_runs,
        )

    def path(self, variant: Variant) -> Path:
        return self.folder / variant.file

    def digest(self, onnx: Path) -> str:
        """A file's digest, read once for all libraries and GPUs. Raises what `onnx_digest` raises."""
        if onnx not in self._digests:
            self._digests[onnx] = onnx_digest(onnx)
        return self._digests[onnx]


@dataclass(frozen=True, slots=True)
class Place:
    """Where an engine runs: a GPU, or None for the CPU. `is_hurried` means that something better will replace it."""

    gpu: Device | None = None
    is_hurried: bool = False

    @property
    def name(self) -> str:
        return self.gpu.name if self.gpu else CPU


class NotProved(Exception):
    """The variant does not serve on this engine; the message says which and why."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A plan that does not serve yet: it must be built, or compiled for the device.

    `onnx` is the source of the build, `device` a GPU of this process.
    """

    device: Device
    onnx: Path
    variant: Variant
    options: BuildOptions
    key: PlanKey

    @property
    def library(self) -> LibraryName:
        return self.key.target.library


@dataclass(frozen=True, slots=True)
class TuningCandidate:
    """A file that ONNX Runtime may serve better than the current engine of a device, after tuning and measuring."""

    device: Device
    variant: Variant


def refusal(engine: str, device: str, why: object) -> str:
    """The message that an engine does not serve on a device."""
    return f"{engine} on {device}: {why}"
