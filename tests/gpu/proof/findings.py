"""What has been found so far, written to disk again and again, so that a killed run still leaves it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.gpu.proof.page import write_page
from tests.gpu.proof.records import (
    SCHEMA_VERSION,
    Agreement,
    BareRow,
    CoreRow,
    Dropped,
    Environment,
    Gathering,
    GpuState,
    HttpRow,
    Proof,
    Stage,
    TestRun,
    Yardstick,
    write_proof,
)
from tests.gpu.proof.targets import judge


@dataclass(slots=True)
class Findings:
    """Grows while the program runs; `folder` is where results and page go.

    `label` is in the file's name, where one GPU has several.
    """

    environment: Environment
    folder: Path
    label: str = ""
    ended: str = ""
    tests: TestRun | None = None
    stages: list[Stage] = field(default_factory=list)
    states: list[GpuState] = field(default_factory=list)
    agreements: list[Agreement] = field(default_factory=list)
    bare: list[BareRow] = field(default_factory=list)
    core: list[CoreRow] = field(default_factory=list)
    http: list[HttpRow] = field(default_factory=list)
    gatherings: list[Gathering] = field(default_factory=list)
    yardsticks: list[Yardstick] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)

    def drop(self, what: str, reason: object) -> None:
        """Say once why something is not there."""
        one = Dropped(what, " ".join(str(reason).split())[:400])
        if one not in self.dropped:
            self.dropped.append(one)

    def proof(self) -> Proof:
        """All of it, judged."""
        found = Proof(
            schema_version=SCHEMA_VERSION,
            environment=replace(self.environment, states=tuple(self.states)),
            ended=self.ended,
            label=self.label,
            stages=tuple(self.stages),
            tests=self.tests,
            agreements=tuple(self.agreements),
            bare=tuple(self.bare),
            core=tuple(self.core),
            http=tuple(self.http),
            gatherings=tuple(self.gatherings),
            yardsticks=tuple(self.yardsticks),
            dropped=tuple(self.dropped),
        )
        return replace(found, targets=judge(found))

    def write(self) -> Path:
        """The JSON, and the page over all results that lie beside it. Raises JobError."""
        path = write_proof(self.proof(), self.folder / "results")
        write_page(self.folder)
        return path
