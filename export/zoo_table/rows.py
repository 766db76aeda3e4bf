"""The rows of the table of torchvision's models, as records and as a file that grows.

Knows the fields and the JSON form. Knows nothing of how a model is tried, nor of how the page looks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from convoy.app.engines.cpu import fingerprint, has_int8_dot_product
from convoy.app.engines.onnxruntime import LIBRARY
from convoy.export.zoo_table.kept import placed, read_kept, tool_versions, write_kept

_DATA = Path("results/zoo-table.json")
_TOOLS = ("torch", "torchvision", "onnx", "onnxscript", "onnxruntime", "numpy")


@dataclass(frozen=True, slots=True)
class BuilderCell:
    """What TensorRT's builder made of one file: a plan of `megabytes` in `seconds`, or `why` not.

    `warnings` are the builder's; None stands for what was not reached.
    """

    precision: str
    accepted: bool
    megabytes: float | None = None
    seconds: float | None = None
    warnings: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class ZooRow:
    """One model. Errors are relative, `spread` is a share, and None stands for what was not reached."""

    model: str
    input: str
    exported: bool
    verified: bool = False
    error: float | None = None
    spread: float | None = None
    int8_error: float | None = None
    fp32_ms: float | None = None
    int8_ms: float | None = None
    seconds: float = 0.0
    why: str = ""
    builder: tuple[BuilderCell, ...] = ()

    def with_times(self, fp32_ms: float, int8_ms: float | None, int8_error: float | None, why: str) -> ZooRow:
        """The row with what came of quantising and timing; `why` says why there is no int8."""
        return replace(self, fp32_ms=fp32_ms, int8_ms=int8_ms, int8_error=int8_error, why=why)

    def with_builder(self, cells: Iterable[BuilderCell]) -> ZooRow:
        """The row with these cells beside those of other precisions."""
        new = tuple(cells)
        precisions = {cell.precision for cell in new}
        return replace(self, builder=(*(cell for cell in self.builder if cell.precision not in precisions), *new))

    @property
    def fastest(self) -> str:
        """The variant that takes the least time, with that time and what it gains over fp32."""
        if self.fp32_ms is None:
            return "-"
        if self.int8_ms is None or self.int8_ms >= self.fp32_ms:
            return f"fp32, {self.fp32_ms:.2f} ms"
        return f"int8, {self.int8_ms:.2f} ms ({self.fp32_ms / self.int8_ms:.2f}x)"

    def summary(self) -> dict[str, object]:
        """What a person watching wants to see."""
        return {"model": self.model, "verified": self.verified, "error": self.error, "spread": self.spread} | {
            "fastest": self.fastest,
            "builder": {cell.precision: cell.seconds if cell.accepted else cell.why for cell in self.builder},
            "seconds": self.seconds,
            "why": self.why,
        }


@dataclass(frozen=True, slots=True)
class Table:
    """The rows so far; `machine` and `tools` are those of the last run that timed, `builder` the last that built."""

    machine: str
    tools: dict[str, str]
    rows: tuple[ZooRow, ...]
    builder: str = ""

    def timed(self, threads: int) -> Table:
        """The same rows, and the machine and tools of now."""
        dot = "with" if has_int8_dot_product() else "without"
        return replace(
            self, machine=f"{fingerprint(threads, LIBRARY)}; {dot} 8-bit dot products", tools=tool_versions(*_TOOLS)
        )

    def find(self, model: str) -> ZooRow | None:
        """The model's row, if it has one."""
        return next((row for row in self.rows if row.model == model), None)

    def with_row(self, row: ZooRow) -> Table:
        """The table with this row in the place of the model's former one, or at the end."""
        return replace(self, rows=placed(self.rows, row, lambda known: known.model))


def read_table(folder: Path) -> Table:
    """The table in `folder`, an empty one where there is none. Raises RecordError for a broken file."""
    return read_kept(folder / _DATA, Table("", {}, ()))


def write_table(table: Table, folder: Path) -> None:
    """Raises JobError when the disk does not take it."""
    write_kept(folder / _DATA, table)
