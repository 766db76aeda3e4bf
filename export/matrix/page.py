"""The page of the matrix, for people. Knows the Markdown and nothing of how a case is tried."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from convoy.export.matrix.rows import Matrix, MatrixRow
from convoy.export.matrix.trial import COMMON
from convoy.export.proof.verify import MAX_FP32_ERROR
from convoy.export.zoo_table.kept import shown_tools, table_head, table_line, write_lines

_PAGE = Path("export-matrix.md")
_INTRODUCTION = f"""# What `convoy export` was tried with

Written by `make export-matrix`, which goes on where it stopped. Each row is a command, run in a folder and a process of
its own with the files that `export/matrix/made` writes there; beside its words it has
`{" ".join(COMMON)}`, where they do not say otherwise.

- *exact*: exported, and `fp32.onnx` in the serving engine answers as the original does. The relative error of the worst
  sample, at most {MAX_FP32_ERROR:g}, stands beside it. With an asterisk it was also held against answers that the
  network gave before its weights were written to a file: it has the very weights. Then follows what export said.
- *refused*: nothing was published, and this is the line that says why and what to do.
- *broken*: neither of them, or an export that answers otherwise.

`nets.py` is [export/matrix/made/networks.py](../export/matrix/made/networks.py). The networks of torchvision and timm
have random weights, at their published sizes, so nothing is said of accuracy; torchvision's others are in
[zoo-table.md](zoo-table.md).
"""
_VERDICTS = ("exact", "refused", "broken")


def write_page(matrix: Matrix, names: Sequence[str], folder: Path) -> None:
    """The page, with what is missing from `names`. Raises JobError when the disk does not take it."""
    tried = {row.name for row in matrix.rows}
    missing = [name for name in names if name not in tried]
    counts = ", ".join(f"{sum(row.verdict == one for row in matrix.rows)} {one}" for one in _VERDICTS)
    write_lines(
        folder / _PAGE,
        [
            _INTRODUCTION,
            f"{shown_tools(matrix.tools)}.",
            "",
            f"{len(matrix.rows)} of {len(names)} tried: {counts}.",
            *_tables(matrix.rows),
            "",
            f"Not tried yet ({len(missing)}): {'; '.join(missing) or 'none'}.",
        ],
    )


def _tables(rows: Sequence[MatrixRow]) -> Iterator[str]:
    for group, members in groupby(rows, lambda row: row.group):
        yield from ("", f"## {group}", "", *table_head("what", "command", "verdict"))
        for row in members:
            yield table_line(row.what, f"`{row.command}`", _verdict(row))


def _verdict(row: MatrixRow) -> str:
    if row.error is None:
        return f"**{row.verdict}**: {row.said}"
    error = f"{row.error:.0e}" if row.error else "0"
    return f"**{row.verdict}** ({error}{'*' if row.is_known else ''}){': ' if row.said else ''}{row.said}"
