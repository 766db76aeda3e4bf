"""What was measured, as records, and as a JSON document.

Knows figures and where they came from. Draws no conclusions: that is compare's.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from convoy.models.errors import JobError

SCHEMA_VERSION = 2

BodyKind = Literal["binary", "json", "grpc", "ids", "ids150k", "png", "jpeg340", "jpeg500"]
Stage = Literal["environment", "start", "answers", "load"]


@dataclass(frozen=True, slots=True)
class Setting:
    """How a server batches: at most `max_batch` samples, waiting at most `window_ms` for company.

    `window_ms` None: the framework decides by itself. `max_batch` 0: the server is started as it comes. `decoders` are
    processes that do nothing but decode pictures; 0: who computes decodes.
    """

    max_batch: int
    window_ms: float | None
    decoders: int = 0

    @property
    def title(self) -> str:
        if self.max_batch == 0:
            return "untouched"
        window = "its own window" if self.window_ms is None else f"{self.window_ms:g} ms"
        batching = "no batching" if self.max_batch == 1 else f"batch {self.max_batch}, {window}"
        return batching + (f", {self.decoders} decoders" if self.decoders else "")


@dataclass(frozen=True, slots=True)
class ClosedLoad:
    """So many connections, each asking again as soon as it is answered; one sample a request."""

    body: BodyKind
    connections: int

    @property
    def name(self) -> str:
        return f"{self.body}-{self.connections}"


@dataclass(frozen=True, slots=True)
class Reading:
    """One load on one server for `seconds`. Latencies are of all answers, CPU is per answer.

    `server_cpu_us` is of the server's whole process tree, `generator_cpu_us` of the process that made the load.
    """

    seconds: float
    answered: int
    failed: int
    p50_ms: float
    p99_ms: float
    server_cpu_us: float
    generator_cpu_us: float
    problem: str | None = None

    @property
    def rps(self) -> float:
        return self.answered / self.seconds


@dataclass(frozen=True, slots=True)
class SweepTrial:
    """A reading of the sweep that looks for a peer's best setting."""

    peer: str
    load: ClosedLoad
    setting: Setting
    reading: Reading


@dataclass(frozen=True, slots=True)
class Pair:
    """A peer and Convoy under the same load, one right after the other; `round` counts from 0."""

    round: int
    peer: str
    load: ClosedLoad
    setting: Setting
    theirs: Reading
    ours: Reading


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a peer, or one of its settings, has no figure."""

    peer: str
    stage: Stage
    reason: str


@dataclass(frozen=True, slots=True)
class HostInfo:
    """`load_average` is the one-minute average before anything was started: above 0.5, figures are doubtful."""

    cpu: str
    cores: int
    kernel: str
    python: str
    load_average: float


@dataclass(frozen=True, slots=True)
class Conditions:
    """What was the same for everybody. `versions` is by server, then by package; `networks` are hashes by name."""

    started_at: str
    machine: HostInfo
    generator: str
    threads: int
    networks: dict[str, str]
    duration_s: float
    warm_up_s: float
    rounds: int
    rounds_per_start: int
    seed: int
    versions: dict[str, dict[str, str]]
    titles: dict[str, str]
    notes: dict[str, str]


@dataclass(frozen=True, slots=True)
class Results:
    """A comparison, whole or as far as it came (`interrupted`)."""

    conditions: Conditions
    trials: tuple[SweepTrial, ...]
    pairs: tuple[Pair, ...]
    failures: tuple[Failure, ...]
    interrupted: bool


def write_json(path: Path, results: Results) -> None:
    """Everything, raw, for other programs and for later. Raises JobError where the disk does not take it."""
    document = {"schema_version": SCHEMA_VERSION, **asdict(results)}
    write_text(path, json.dumps(document, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Raises JobError where the disk does not take it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise JobError(f"cannot write {path}: {error.strerror}; choose another place") from error
