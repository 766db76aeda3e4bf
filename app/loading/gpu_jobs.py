"""What there is to do on GPUs for one version: what is to be served, what is wished for, what is left to try.

Knows nothing of how it is done.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from convoy.app.engines.cuda.device import Device
from convoy.app.engines.machine import Machine
from convoy.app.engines.select import PrecisionChoice
from convoy.models.bundle import Bundle, Variant
from convoy.models.onnx_digest import onnx_digest
from convoy.models.plans import BuildOptions, LibraryName, PlanKey


@dataclass(frozen=True, slots=True)
class GpuJob:
    """What is to be served: a bundle up to `max_batch_size` (0: without batches), and where.

    `may_wait`: nothing else may serve, so that what takes long is done before the version serves at all.
    """

    bundle: Bundle
    max_batch_size: int
    precision: PrecisionChoice
    machine: Machine
    plan_cache: Path | None
    may_wait: bool = False
    digests: Digests = field(default_factory=lambda: Digests(), compare=False)


class Digests:
    """Files' identities, read once for all that ask within one load: every library on every GPU does."""

    def __init__(self) -> None:
        self._known: dict[Path, str] = {}

    def of(self, onnx: Path) -> str:
        """Raises JobError and OSError as `onnx_digest` does."""
        if onnx not in self._known:
            self._known[onnx] = onnx_digest(onnx)
        return self._known[onnx]


@dataclass(frozen=True, slots=True)
class PlanWish:
    """A plan that does not serve yet: to be built, or there and to be compiled for the device.

    `onnx` is what it is built from, `device` a GPU of this process.
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
class Untried:
    """A file that ONNX Runtime may yet serve better than what serves on a device: tuned, and measured beside it."""

    device: Device
    variant: Variant


def refusal(engine: str, device: Device, why: object) -> str:
    """How it is told that an engine does not serve on a device."""
    return refused_on(engine, device.name, why)


def refused_on(engine: str, device: str, why: object) -> str:
    """The same of a device that is known by its name only."""
    return f"{engine} on {device}: {why}"
