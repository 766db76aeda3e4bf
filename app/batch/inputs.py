"""What INPUT names: image files, folders, patterns, lists, parquet files and tars, counted and cut into parts.

Counting reads names and headers, no image. The order is the same each time, which the digest proves, so that a run that
goes on finds its images in the same parts. A worker gets a part's images one by one, with a function that reads each.
"""

from __future__ import annotations

import glob
import hashlib
import os
import tarfile
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from convoy.app.batch.records import BatchPart, ColumnKind, MembersPiece, PathsPiece, Piece, RowsPiece
from convoy.models.errors import ImageError, JobError, UsageError
from convoy.models.image_files import IMAGE_SUFFIXES, read_image_file
from convoy.models.images import sniff

_LISTS = frozenset((".txt", ".lst", ".list"))
_PACKED_TARS = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_BYTES_NAMES = ("image", "bytes", "content", "data", "jpg", "jpeg", "png")
_PATH_NAMES = ("path", "image_path", "file", "file_name", "filename", "image", "uri", "url")


class BatchSource(ABC):
    """Images in one order; a worker gets any stretch of them as a piece."""

    images: int

    @abstractmethod
    def piece(self, start: int, stop: int) -> Piece: ...

    @abstractmethod
    def identity(self) -> Iterator[str]:
        """What makes it the same source another time."""


class PathsSource(BatchSource):
    """Image files."""

    def __init__(self, paths: list[str]) -> None:
        self._paths, self.images = paths, len(paths)

    def piece(self, start: int, stop: int) -> Piece:
        return PathsPiece(self._paths[start:stop])

    def identity(self) -> Iterator[str]:
        return iter(self._paths)


class _Column(NamedTuple):
    name: str
    kind: ColumnKind
    names: str | None


class ParquetSource(BatchSource):
    """A parquet file with a column of paths or of encoded images. Raises UsageError where there is none."""

    def __init__(self, file: str, column: str | None) -> None:
        self._file = file
        try:
            with pq.ParquetFile(file) as opened:
                schema, self.images = opened.schema_arrow, opened.metadata.num_rows
        except (OSError, pa.ArrowException) as error:
            raise JobError(f"{file} cannot be read as parquet ({_brief(error)}); repair it or leave it out") from error
        self._column = _column(file, schema, column)

    def piece(self, start: int, stop: int) -> Piece:
        name, kind, names = self._column
        return RowsPiece(self._file, name, kind, names, start, stop)

    def identity(self) -> Iterator[str]:
        yield from (self._file, self._column.name, str(self.images), str(Path(self._file).stat().st_size))


class TarSource(BatchSource):
    """A tar with image files in it, as WebDataset makes them. Raises JobError for one that cannot be read."""

    def __init__(self, file: str) -> None:
        self._file, self._offsets = file, array("Q")
        try:
            with tarfile.open(file, "r:") as opened:
                while (member := opened.next()) is not None:
                    opened.members = []  # type: ignore[attr-defined]  # it would keep them all
                    if is_image_member(member):
                        self._offsets.append(member.offset)
        except (OSError, tarfile.TarError) as error:
            raise JobError(f"{file} cannot be read as a tar ({_brief(error)}); repair it or leave it out") from error
        self.images = len(self._offsets)

    def piece(self, start: int, stop: int) -> Piece:
        return MembersPiece(self._file, self._offsets[start], stop - start)

    def identity(self) -> Iterator[str]:
        yield from (self._file, str(self.images), str(Path(self._file).stat().st_size))


class BatchInputs:
    """All sources of a run. Raises UsageError or JobError, whose message names the input."""

    def __init__(self, given: Sequence[str], column: str | None = None) -> None:
        self._sources = [source for one in given for source in _sources(one, column)]
        self.images = sum(source.images for source in self._sources)
        if not self.images:
            raise UsageError(f"there are no images in {', '.join(given)}; name image files, folders, lists or tars")

    def digest(self, base: str) -> str:
        """The same for the same names in the same order, from the same folder."""
        found = hashlib.sha256(base.encode(errors="surrogateescape"))
        for source in self._sources:
            found.update(b"\1" + type(source).__name__.encode())
            for word in source.identity():
                found.update(b"\0" + word.encode(errors="surrogateescape"))
        return found.hexdigest()

    def part_images(self, batch_size: int) -> int:
        """Images of a part: whole batches."""
        # 64 parts for the workers to share; smaller ones where a worker that dies would lose too much.
        most = min(8192, max(batch_size, -(-self.images // 64)))
        return -(-most // batch_size) * batch_size

    def parts(self, part_images: int, base: str) -> list[BatchPart]:
        """Every image in one of them, in order."""
        parts: list[BatchPart] = []
        pieces: list[Piece] = []
        room = part_images
        for source in self._sources:
            start = 0
            while start < source.images:
                stop = min(source.images, start + room)
                pieces.append(source.piece(start, stop))
                room -= stop - start
                start = stop
                if not room:
                    parts.append(BatchPart(len(parts), part_images, base, pieces))
                    pieces, room = [], part_images
        if pieces:
            parts.append(BatchPart(len(parts), part_images - room, base, pieces))
        return parts


def is_image_member(member: tarfile.TarInfo) -> bool:
    return member.isreg() and os.path.splitext(member.name)[1].lower() in IMAGE_SUFFIXES  # noqa: PTH122 - of a name


def _sources(given: str, column: str | None) -> list[BatchSource]:
    path = Path(given)
    if path.is_dir():
        return [PathsSource(list(_images_below(given)))]
    if not path.exists():
        found = sorted(glob.glob(given, recursive=True)) if glob.has_magic(given) else []  # noqa: PTH207 - any pattern
        if not found:
            what = "nothing matches" if glob.has_magic(given) else "there is no"
            raise UsageError(f"{what} {given}; name image files, folders, lists, parquet files or tars")
        if all(Path(one).suffix.lower() in IMAGE_SUFFIXES for one in found):
            return [PathsSource(found)]
        return [source for one in found for source in _sources(one, column)]
    return [_source_of_file(given, path.suffix.lower(), column)]


def _source_of_file(given: str, suffix: str, column: str | None) -> BatchSource:
    if suffix in (".parquet", ".pq"):
        return ParquetSource(given, column)
    if given.lower().endswith(_PACKED_TARS):
        raise UsageError(f"{given} is compressed, so that it cannot be read from the middle; unpack it to a .tar")
    if suffix == ".tar":
        return TarSource(given)
    if suffix in _LISTS:
        return PathsSource(_listed(given))
    if suffix in IMAGE_SUFFIXES or _begins_like_an_image(given):
        return PathsSource([given])
    raise UsageError(
        f"{given} is none of image, folder, list (.txt), parquet file or tar; give a list of paths the suffix .txt"
    )


def _images_below(folder: str) -> Iterator[str]:
    """Image files by their suffixes, sorted; links to folders are followed, no folder twice."""
    seen: set[tuple[int, int]] = set()

    def refuse(error: OSError) -> None:
        raise JobError(f"{error.filename} cannot be read ({error.strerror}); make it readable or leave it out")

    for place, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        there = Path(place).stat()
        if (there.st_dev, there.st_ino) in seen:
            folders.clear()
            continue
        seen.add((there.st_dev, there.st_ino))
        folders.sort()
        for name in sorted(files):
            if os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES:  # noqa: PTH122 - of millions of names
                yield f"{place.rstrip('/')}/{name}"


def _listed(file: str) -> list[str]:
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"the list {file} cannot be read ({_brief(error)}); it has one path a line, in UTF-8"
        ) from error
    return [line.strip() for line in lines if line.strip()]


def _begins_like_an_image(file: str) -> bool:
    try:
        with Path(file).open("rb") as opened:
            return sniff(opened.read(16)) is not None
    except OSError:
        return False


def _column(file: str, schema: pa.Schema, wanted: str | None) -> _Column:
    """Which column has the images. Raises UsageError."""
    kinds = {field.name: kind for field in schema if (kind := _kind(field.type)) is not None}
    if wanted is not None:
        if wanted not in kinds:
            have = ", ".join(schema.names) or "none"
            raise UsageError(f"{file} has no column {wanted!r} of paths or images; its columns: {have}")
        name = wanted
    else:
        name = _guessed(file, kinds)
    named = [one for one in _PATH_NAMES if kinds.get(one) == "path" and one != name]
    return _Column(name, kinds[name], None if kinds[name] == "path" or not named else named[0])


def _guessed(file: str, kinds: dict[str, ColumnKind]) -> str:
    images = [name for name, kind in kinds.items() if kind != "path"]
    paths = [name for name, kind in kinds.items() if kind == "path"]
    for found, names in ((images, _BYTES_NAMES), (paths, _PATH_NAMES)):
        if len(found) == 1:
            return found[0]
        known = [name for name in names if name in found]
        if known:
            return known[0]
        if found:
            raise UsageError(f"{file} has several columns that may be meant ({', '.join(found)}); name one by --column")
    raise UsageError(f"{file} has no column of paths or of encoded images; its columns are of other types")


def _kind(kind: pa.DataType) -> ColumnKind | None:
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return "bytes"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "path"
    # As Hugging Face's data sets keep images.
    is_image = pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0
    return "struct" if is_image and _kind(kind.field("bytes").type) == "bytes" else None


def _brief(error: Exception) -> str:
    strerror = getattr(error, "strerror", None)
    return str(strerror or error).strip().splitlines()[0][:200] if str(error) else type(error).__name__


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
