"""The table of torchvision's models as a file that grows and a page that people read.

Knows the row, the JSON form and the Markdown. Knows nothing of how a model is tried.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from app.engines.cpu import fingerprint, has_int8_dot_product
from app.engines.onnxruntime import LIBRARY
from models.checkpoint import convoy_version, write_whole
from models.records import from_jsonable, to_jsonable

_DATA, _PAGE = Path("results/zoo-table.json"), Path("zoo-table.md")
_TOOLS = ("torch", "torchvision", "onnx", "onnxscript", "onnxruntime", "numpy")
_INTRODUCTION = """# torchvision's classification models in Convoy

Written by `make zoo-table`. Every model gets random weights, drawn so that no output is constant, and random
pictures of its published size. *Verified*: ONNX Runtime answers as torch does at batch 1, 3 and 8, with a relative
error (of the worst picture) of at most 1e-3. *Spread* is the share of the outputs that differs between pictures: where
it were zero, agreement would prove nothing. *int8*: min-max calibration on the same 8 random pictures, and the
relative error of its outputs against fp32's, which with random weights says nothing about accuracy; the question is
whether the graph can be quantised and what that gains. Where that error is as large as the spread, the int8 outputs
tell nothing of the picture any more: with trained weights, finding and mending that is the accuracy gate's business.
Milliseconds are medians for one picture, both variants taking turns in the serving engine at the lowest priority.
Whatever else ran on the machine lengthened both, so compare the two of a row and not one row with another.
"""


@dataclass(frozen=True, slots=True)
class Row:
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

    def after(self, seconds: float) -> Row:
        """The row with the time that it took."""
        return replace(self, seconds=round(seconds, 1))

    def with_times(self, fp32_ms: float, int8_ms: float | None, int8_error: float | None, why: str) -> Row:
        """The row with what came of quantising and timing; `why` says why there is no int8."""
        return replace(self, fp32_ms=fp32_ms, int8_ms=int8_ms, int8_error=int8_error, why=why)

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
            "seconds": self.seconds,
            "why": self.why,
        }


@dataclass(frozen=True, slots=True)
class Table:
    """The rows so far; `machine` and `tools` are those of the last run."""

    machine: str
    tools: dict[str, str]
    rows: tuple[Row, ...]

    @staticmethod
    def now(threads: int, rows: tuple[Row, ...]) -> Table:
        """The rows as measured here."""
        tools = {"convoy": convoy_version(), "python": platform.python_version()}
        tools |= {name: version for name in _TOOLS if (version := _installed(name))}
        dot = "with" if has_int8_dot_product() else "without"
        machine = f"{fingerprint(threads, LIBRARY)}; {dot} 8-bit dot products"
        return Table(machine, tools, rows)


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def read_table(folder: Path) -> Table:
    """The table in `folder`, an empty one where there is none. Raises RecordError for a broken file."""
    path = folder / _DATA
    if not path.exists():
        return Table("", {}, ())
    return from_jsonable(Table, json.loads(path.read_text()), path.name)


def write_table(table: Table, folder: Path) -> None:
    """Raises JobError when the disk does not take it."""
    path = folder / _DATA
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(to_jsonable(table), indent=1) + "\n").encode())


def write_page(table: Table, names: Sequence[str], folder: Path) -> None:
    """The page for people, with what is missing from `names`. Raises JobError when the disk does not take it."""
    tried = {row.model for row in table.rows}
    missing = [name for name in names if name not in tried]
    head = "| model | input | exported | verified (error) | spread | int8 ok (error) | fastest, batch 1 |"
    lines = [
        _INTRODUCTION,
        f"Machine: {table.machine}. " + ", ".join(f"{name} {version}" for name, version in table.tools.items()) + ".",
        "",
        f"{sum(row.exported for row in table.rows)} of {len(names)} exported, "
        f"{sum(row.verified for row in table.rows)} verified, "
        f"{sum(row.int8_ms is not None for row in table.rows)} quantised.",
        "",
        head,
        "|---" * head.count(" | ") + "|---|",
        *(_line(row) for row in table.rows),
        "",
        f"Not tried yet ({len(missing)}): {', '.join(missing) or 'none'}.",
        "",
    ]
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / _PAGE, "\n".join(lines).encode())


def _line(row: Row) -> str:
    verified = "-" if row.error is None else f"{'yes' if row.verified else 'NO'} ({row.error:.1g})"
    int8 = "no" if row.int8_error is None else f"yes ({row.int8_error:.2g})"
    spread = "-" if row.spread is None else f"{row.spread:.2g}"
    cells = (row.model, row.input, "yes" if row.exported else "NO", verified, spread, int8, row.fastest)
    reason = f"; {row.why.replace('|', '/')}" if row.why else ""
    return "| " + " | ".join(cells) + f"{reason} |"
