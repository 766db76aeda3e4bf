"""A part's images, one by one: their names, and how to get at their bytes.

Names are found in order by one thread; `read` may come from any.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from convoy.app.batch.inputs import is_image_member
from convoy.app.batch.records import BatchPart, MembersPiece, PathsPiece, Piece, RowsPiece
from convoy.models.errors import ImageError, JobError
from convoy.models.image_files import read_image_file


class BatchImage(NamedTuple):
    """One image of a part. `read` raises ImageError."""

    part: BatchPart
    place: int
    path: str
    read: Callable[[], bytes]


def images_of(part: BatchPart) -> Iterator[BatchImage]:
    """All of them, in order. Raises JobError where a file has changed since they were counted."""
    index = 0
    for piece in part.pieces:
        for path, read in _images(piece, Path(part.base)):
            yield BatchImage(part, index, path, read)
            index += 1
    if index != part.images:
        raise JobError(
            f"part {part.number} has {index} images and not {part.images}: an input has changed since the run began; "
            "begin anew with another --out"
        )


def _images(piece: Piece, base: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    match piece:
        case PathsPiece(paths):
            folder = str(base)
            return ((path, partial(read_image_file, os.path.join(folder, path))) for path in paths)  # noqa: PTH118 - of millions
        case MembersPiece():
            return _members(piece, base)
        case RowsPiece():
            return _rows(piece, base)


def _members(piece: MembersPiece, base: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    left, path = piece.count, base / piece.file
    try:
        with path.open("rb") as file:
            file.seek(piece.offset)
            opened = tarfile.TarFile(fileobj=file, mode="r")
            while left and (member := opened.next()) is not None:
                opened.members = []  # type: ignore[attr-defined]
                if is_image_member(member):
                    yield f"{piece.file}/{member.name}", partial(_read_at, path, member.offset_data, member.size)
                    left -= 1
    except (OSError, tarfile.TarError) as error:
        raise JobError(f"{piece.file} cannot be read any more ({error}); see whether it has changed") from error


def _read_at(path: Path, offset: int, nbytes: int) -> bytes:
    try:
        with path.open("rb", buffering=0) as file:
            found = os.pread(file.fileno(), nbytes, offset)
    except OSError as error:
        raise ImageError(f"cannot read {path}: {error.strerror}; check the file") from error
    if len(found) < nbytes:
        raise ImageError(f"{path} is cut off in this image; check the file")
    return found


def _rows(piece: RowsPiece, base: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    columns = [piece.column, *([piece.names] if piece.names else [])]
    try:
        with pq.ParquetFile(base / piece.file) as opened:
            yield from _rows_of(opened, piece, columns, base)
    except (OSError, pa.ArrowException) as error:
        raise JobError(f"{piece.file} cannot be read any more ({error}); see whether it has changed") from error


def _rows_of(
    opened: pq.ParquetFile, piece: RowsPiece, columns: list[str], base: Path
) -> Iterator[tuple[str, Callable[[], bytes]]]:
    begin = 0
    for group in range(opened.num_row_groups):
        end = begin + opened.metadata.row_group(group).num_rows
        if end > piece.start and begin < piece.stop:
            row = begin
            for batch in opened.iter_batches(64, row_groups=[group], columns=columns):
                first, last = max(0, piece.start - row), min(len(batch), piece.stop - row)
                if first < last:
                    yield from _named(batch.slice(first, last - first), row + first, piece, base)
                row += len(batch)
        begin = end


def _named(
    batch: pa.RecordBatch, first: int, piece: RowsPiece, base: Path
) -> Iterator[tuple[str, Callable[[], bytes]]]:
    values = batch.column(piece.column).to_pylist()
    names = batch.column(piece.names).to_pylist() if piece.names else [None] * len(values)
    for row, (value, name) in enumerate(zip(values, names, strict=True), start=first):
        own = f"{piece.file}#{row}"
        if value is None:
            yield name or own, _no_image
        elif piece.kind == "path":
            yield value, partial(read_image_file, base / value)
        elif piece.kind == "bytes":
            yield name or own, partial(bytes, value)
        elif value["bytes"] is not None:
            yield name or value.get("path") or own, partial(bytes, value["bytes"])
        elif value.get("path"):
            yield value["path"], partial(read_image_file, base / value["path"])
        else:
            yield name or own, _no_image


def _no_image() -> bytes:
    raise ImageError("the row has no image")
