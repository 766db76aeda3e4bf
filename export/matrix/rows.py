"""What became of each case, as records and as a file that grows. Knows nothing of how a case is tried."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from convoy.export.zoo_table.kept import placed, read_kept, tool_versions, write_kept

_DATA = Path("results/export-matrix.json")
_TOOLS = ("torch", "torchvision", "timm", "onnx", "onnxscript", "onnxruntime", "numpy")
# Exported and as right as is asked, refused by a line that says what to do, or neither, which is a bug.
Verdict = Literal["exact", "refused", "broken"]


@dataclass(frozen=True, slots=True)
class MatrixRow:
    """One case. `error` is relative, of fp32.onnx against the original, the worst sample's; None: nothing came out.

    `is_known`: it was held against answers that were written down before export, too. `said` is the message of a
    refusal, or what export said of the network beside that it is right.
    """

    group: str
    what: str
    command: str
    verdict: Verdict
    error: float | None
    is_known: bool
    said: str
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.group}: {self.what}"


@dataclass(frozen=True, slots=True)
class Matrix:
    """The rows so far; `tools` are those of the last run."""

    tools: dict[str, str]
    rows: tuple[MatrixRow, ...]

    def find(self, name: str) -> MatrixRow | None:
        """The row of that name, if there is one."""
        return next((row for row in self.rows if row.name == name), None)

    def with_row(self, row: MatrixRow) -> Matrix:
        """With this row in the place of the former one, or at the end; the tools are those of now."""
        return Matrix(tool_versions(*_TOOLS), placed(self.rows, row, lambda known: known.name))

    def only(self, names: Iterable[str]) -> Matrix:
        """Without the rows of cases that there are no more, in the order of `names`."""
        found = (self.find(name) for name in names)
        return replace(self, rows=tuple(row for row in found if row is not None))


def read_matrix(folder: Path) -> Matrix:
    """What was kept in `folder`; nothing where there is no file. Raises RecordError for a broken one."""
    return read_kept(folder / _DATA, Matrix({}, ()))


def write_matrix(matrix: Matrix, folder: Path) -> None:
    """Raises JobError when the disk does not take it."""
    write_kept(folder / _DATA, matrix)
