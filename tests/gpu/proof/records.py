"""What a proof found out, as the file that it writes: `docs/results/<gpu name>.json`.

Knows the records and the file. Knows nothing of how anything is measured, nor what a figure must be.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from convoy.models.bundle import Precision
from convoy.models.checkpoint import write_whole
from convoy.models.records import from_jsonable, to_jsonable

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class GpuState:
    """What NVML says of the device at one moment; `throttled` are its reasons for not running faster."""

    at_s: float
    sm_mhz: int
    memory_mhz: int
    power_w: float
    temperature_c: int
    throttled: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Environment:
    """Where and when. `libraries` are versions, "none" where one is missing."""

    created_at: str
    gpu: str
    compute_capability: str
    memory_gib: float
    driver: str
    cuda: str
    cpu: str
    cores: int
    python: str
    libraries: dict[str, str]
    states: tuple[GpuState, ...] = ()


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of the program and how it ended: "done", or what stopped it."""

    name: str
    seconds: float
    ended: str


@dataclass(frozen=True, slots=True)
class TestRun:
    """What pytest counted, and the last words of each test that failed or was skipped."""

    __test__ = False  # for pytest, which would take it for a test

    passed: int
    failed: int
    skipped: int
    seconds: float
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Setting:
    """One point of the experiment: a network in an engine, and how it runs there."""

    network: str
    engine: str
    precision: Precision
    batch_size: int
    graphs: bool
    slots: int


@dataclass(frozen=True, slots=True)
class BareRow:
    """The engine alone, fed by as many threads as it has slots, from page-locked memory.

    `period_ms` is the wall time per batch; the stages are medians of what the engine itself says of a batch.
    """

    setting: Setting
    images_per_s: float
    period_ms: float
    copy_in_ms: float
    waited_ms: float
    compute_ms: float
    copy_out_ms: float


@dataclass(frozen=True, slots=True)
class CoreRow:
    """The same engine behind the core: requests of `request_samples` through slab, queue, batcher and lane."""

    setting: Setting
    request_samples: int
    images_per_s: float
    mean_batch: float
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class HttpRow:
    """A `convoy serve` process under the load tester; `edges` is None where the server has no edge processes."""

    network: str
    engine: str
    precision: str
    edges: int | None
    request_samples: int
    images_per_s: float
    p50_ms: float
    p99_ms: float
    failed: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """An engine's answers to pictures against the fp32 graph's on the CPU; the error is ||a - b|| / ||b||, worst."""

    network: str
    engine: str
    precision: Precision
    pictures: str
    images: int
    max_relative_error: float
    top1_agreement: float


@dataclass(frozen=True, slots=True)
class GatherRow:
    """Bringing a batch of equal requests to the device, one way and the other; medians."""

    request_samples: int
    requests: int
    request_bytes: int
    by_host_ms: float
    by_copy_engine_ms: float


@dataclass(frozen=True, slots=True)
class Gathering:
    """`threshold_bytes` is what an engine would choose at load; None: the host gathers always."""

    network: str
    threshold_bytes: int | None
    batched_copies: str
    rows: tuple[GatherRow, ...]


@dataclass(frozen=True, slots=True)
class Yardstick:
    """torch by itself: the tensors lie on the device already, and nothing is copied."""

    network: str
    precision: Precision
    batch_size: int
    images_per_s: float


@dataclass(frozen=True, slots=True)
class Dropped:
    """What was not measured, and why."""

    what: str
    reason: str


@dataclass(frozen=True, slots=True)
class Target:
    """What was wanted and what came of it; `measured` None: there is nothing to tell from, and `how` says why."""

    name: str
    engine: str
    at_least: float | None
    at_most: float | None
    measured: float | None
    how: str

    @property
    def passed(self) -> bool | None:
        if self.measured is None:
            return None
        above = self.at_least is None or self.measured >= self.at_least
        return above and (self.at_most is None or self.measured <= self.at_most)

    @property
    def verdict(self) -> str:
        return {None: "unproved", True: "pass", False: "FAIL"}[self.passed]


@dataclass(frozen=True, slots=True)
class Proof:
    """Everything. `ended` is empty until the program has come to its end; `label` tells a GPU's runs apart."""

    schema_version: int
    environment: Environment
    ended: str = ""
    stages: tuple[Stage, ...] = ()
    tests: TestRun | None = None
    targets: tuple[Target, ...] = ()
    agreements: tuple[Agreement, ...] = ()
    bare: tuple[BareRow, ...] = ()
    core: tuple[CoreRow, ...] = ()
    http: tuple[HttpRow, ...] = ()
    gatherings: tuple[Gathering, ...] = ()
    yardsticks: tuple[Yardstick, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    label: str = ""


def file_name(gpu: str) -> str:
    """NVIDIA H200 -> nvidia-h200.json"""
    words = "".join(letter if letter.isalnum() else " " for letter in gpu.lower()).split()
    return f"{'-'.join(words) or 'gpu'}.json"


def write_proof(proof: Proof, folder: Path) -> Path:
    """Raises JobError when the disk does not take it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(f"{proof.environment.gpu} {proof.label}")
    write_whole(path, (json.dumps(to_jsonable(proof), indent=1) + "\n").encode())
    return path


def read_proof(path: Path) -> Proof:
    """Raises RecordError for a file of another shape."""
    return from_jsonable(Proof, json.loads(path.read_text()), path.name)
