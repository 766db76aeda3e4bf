"""What tables that grow a row at a time share: the file that keeps the rows, the machine's limit, and Markdown.

Knows JSON, records and the page's cells. Knows nothing of any table's columns.
"""

from __future__ import annotations

import json
import platform
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from convoy.models.checkpoint import convoy_version, installed_versions, write_whole
from convoy.models.records import from_jsonable, to_jsonable

# Enough for a graph of 2 GB that is held several times over; the largest are to fail and not to starve the machine.
MOST_BYTES = 16 << 30
_Record = TypeVar("_Record")
_Row = TypeVar("_Row")


def read_kept(path: Path, empty: _Record) -> _Record:
    """The record in `path`, of the type of `empty`, which stands for no file. Raises RecordError for a broken one."""
    return from_jsonable(type(empty), json.loads(path.read_text()), path.name) if path.exists() else empty


def write_kept(path: Path, record: Any) -> None:
    """Raises JobError when the disk does not take it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(to_jsonable(record), indent=1) + "\n").encode())


def write_lines(path: Path, lines: Sequence[str]) -> None:
    """A page of these lines. Raises JobError when the disk does not take it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, ("\n".join(lines) + "\n").encode())


def placed(rows: tuple[_Row, ...], row: _Row, name_of: Callable[[_Row], str]) -> tuple[_Row, ...]:
    """The rows with this one in the place of the former one of its name, or at the end."""
    if all(name_of(known) != name_of(row) for known in rows):
        return (*rows, row)
    return tuple(row if name_of(known) == name_of(row) else known for known in rows)


def tool_versions(*distributions: str) -> dict[str, str]:
    """Convoy's, Python's, and those of the distributions that are installed."""
    return {"convoy": convoy_version(), "python": platform.python_version()} | installed_versions(*distributions)


def shown_tools(tools: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in tools.items())


def table_head(*columns: str) -> list[str]:
    """The two lines above a Markdown table's rows."""
    return [table_line(*columns), "|---" * len(columns) + "|"]


def table_line(*cells: str) -> str:
    """A row of it; what a cell may not hold is written otherwise."""
    return f"| {' | '.join(' '.join(cell.split()).replace('|', '/') for cell in cells)} |"


def limit_memory() -> None:
    """Let this process and its children have `MOST_BYTES` each, and fail where they want more."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = MOST_BYTES if hard == resource.RLIM_INFINITY else min(MOST_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
