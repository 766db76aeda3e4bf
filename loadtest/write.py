"""Writes what was asked for to files, whole or not at all."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from convoy.models.errors import JobError


@dataclass(frozen=True, slots=True)
class File:
    """`option` is the one that named the path, for the message that asks for another."""

    path: Path
    option: str
    text: str


def write(file: File) -> None:
    """Writes aside and renames, so that a reader never finds half a file. Raises JobError."""
    aside = file.path.with_name(file.path.name + ".part")
    try:
        aside.write_text(file.text, encoding="utf-8")
        aside.replace(file.path)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise JobError(
            f"cannot write {file.path} ({error.strerror}); choose another place with {file.option}"
        ) from None
