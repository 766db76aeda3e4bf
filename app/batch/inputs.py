"""The images that INPUT names: image files, folders, patterns, lists, parquet files and tars, counted and cut into
parts.

Counting reads names and headers, no images. The order is reproducible, which the digest proves, so that a resumed run
finds its images in the same parts. A worker gets the images of a part one by one, each with a function that reads it.
"""

from __future__ import annotations

import glob
import hashlib
import os
import tarfile
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from convoy.app.batch.records import BatchPart, MembersPiece, PathsPiece, Piece, RowsPiece
from convoy.models.errors import ImageError, JobError, UsageError
from convoy.models.image_files import IMAGE_SUFFIXES, read_image_file
from convoy.models.images import sniff

_LISTS = frozenset((".txt", ".lst", ".list"))
_PACKED_TARS = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_BYTES_NAMES = ("image", "bytes", "content", "data", "jpg", "jpeg", "png")
_PATH_NAMES = ("path", "image_path", "file", "file_name", "filename", "image", "uri", "url")


class Source(NamedTuple):
    """Images in a fixed order. `cut` returns those from `start` to `stop`; `identity` recognises the source later."""

    images: int
    cut: Callable[[int, int], Piece]
    identity: Sequence[str]


def _files(paths: list[str]) -> Source:
    return Source(len(paths), lambda start, stop: PathsPiece(paths[start:stop]), ["paths", *paths])


def _parquet(file: str, wanted: str | None) -> Source:
    """A parquet file with a column of paths or of encoded images. Raises UsageError if it has none."""
    try:
        with pq.ParquetFile(file) as opened:
            schema, images = opened.schema_arrow, opened.metadata.num_rows
    except (OSError, pa.ArrowException) as error:
        raise JobError(f"{file} cannot be read as parquet ({_brief(error)}); repair or remove it") from error
    column, names = _columns(file, schema, wanted)
    identity = ["parquet", file, column, str(images), str(Path(file).stat().st_size)]
    return Source(images, partial(RowsPiece, file, column, names), identity)


def _tar(file: str) -> Source:
    """A tar of image files, as WebDataset makes them. Raises JobError if it cannot be read."""
    offsets = array("Q")
    try:
        with tarfile.open(file, "r:") as opened:
            offsets.extend(member.offset for member in _image_members(opened))
    except (OSError, tarfile.TarError) as error:
        raise JobError(f"{file} cannot be read as a tar ({_brief(error)}); repair or remove it") from error
    identity = ["tar", file, str(len(offsets)), str(Path(file).stat().st_size)]
    return Source(len(offsets), lambda start, stop: MembersPiece(file, offsets[start], stop - start), identity)


def _image_members(opened: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    while (member := opened.next()) is not None:
        opened.members = []  # type: ignore[attr-defined]  # it would keep them all
        if member.isreg() and _is_image_name(member.name):
            yield member


def _is_image_name(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES  # noqa: PTH122 - of millions of names


class BatchInputs:
    """All sources of a run. Raises UsageError or JobError, whose message names the input."""

    def __init__(self, given: Sequence[str], column: str | None = None) -> None:
        self._sources = [source for one in given for source in _sources(one, column) if source.images]
        self.images = sum(source.images for source in self._sources)
        if not self.images:
            raise UsageError(f"no images found in {', '.join(given)}; pass image files, folders, lists or tars")

    def digest(self, base: str) -> str:
        """The same for the same names in the same order, from the same folder."""
        found = hashlib.sha256(base.encode(errors="surrogateescape"))
        for source in self._sources:
            found.update(b"\1")
            for word in source.identity:
                found.update(b"\0" + word.encode(errors="surrogateescape"))
        return found.hexdigest()

    def part_images(self, batch_size: int) -> int:
        """The images of a part: whole batches."""
        # 64 parts for the workers to share; smaller ones if the loss of a worker would cost too much.
        most = min(8192, max(batch_size, -(-self.images // 64)))
        return -(-most // batch_size) * batch_size

    def parts(self, part_images: int, base: str) -> list[BatchPart]:
        """Every image in one of the parts, in order."""
        pieces: dict[int, list[Piece]] = defaultdict(list)
        before = 0
        for source in self._sources:
            for number in range(before // part_images, -(-(before + source.images) // part_images)):
                first = number * part_images - before
                pieces[number].append(source.cut(max(0, first), min(source.images, first + part_images)))
            before += source.images
        sizes = [min(part_images, self.images - number * part_images) for number in pieces]
        return [BatchPart(number, size, base, pieces[number]) for number, size in enumerate(sizes)]


def _sources(given: str, column: str | None) -> list[Source]:
    path = Path(given)
    if path.is_dir():
        return [_files(list(_images_below(given)))]
    if not path.exists():
        found = sorted(glob.glob(given, recursive=True)) if glob.has_magic(given) else []  # noqa: PTH207 - any pattern
        if not found:
            what = "nothing matches" if glob.has_magic(given) else "there is no"
            raise UsageError(f"{what} {given}; pass image files, folders, lists, parquet files or tars")
        if all(map(_is_image_name, found)):
            return [_files(found)]
        return [source for one in found for source in _sources(one, column)]
    return [_source_of_file(given, path.suffix.lower(), column)]


def _source_of_file(given: str, suffix: str, column: str | None) -> Source:
    if suffix in (".parquet", ".pq"):
        return _parquet(given, column)
    if given.lower().endswith(_PACKED_TARS):
        raise UsageError(f"{given} is compressed, so it cannot be read from the middle; unpack it to a .tar")
    if suffix == ".tar":
        return _tar(given)
    if suffix in _LISTS:
        return _files(_listed(given))
    if suffix in IMAGE_SUFFIXES or _begins_like_an_image(given):
        return _files([given])
    raise UsageError(
        f"{given} is not an image, folder, list (.txt), parquet file or tar; name a list of paths FILE.txt"
    )


def _images_below(folder: str) -> Iterator[str]:
    """Image files by their suffixes, sorted; links to folders are followed, no folder twice."""
    seen: set[tuple[int, int]] = set()

    def refuse(error: OSError) -> None:
        raise JobError(f"{error.filename} cannot be read ({error.strerror}); make it readable or remove it")

    for place, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        there = Path(place).stat()
        if (there.st_dev, there.st_ino) in seen:
            folders.clear()
            continue
        seen.add((there.st_dev, there.st_ino))
        folders.sort()
        for name in sorted(files):
            if _is_image_name(name):
                yield f"{place.rstrip('/')}/{name}"


def _listed(file: str) -> list[str]:
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"the list {file} cannot be read ({_brief(error)}); it must have one path per line, in UTF-8"
        ) from error
    return [line.strip() for line in lines if line.strip()]


def _begins_like_an_image(file: str) -> bool:
    try:
        with Path(file).open("rb") as opened:
            return sniff(opened.read(16)) is not None
    except OSError:
        return False


def _columns(file: str, schema: pa.Schema, wanted: str | None) -> tuple[str, str | None]:
    """The column with the images, and the column with the names of encoded images. Raises UsageError."""
    images = [field.name for field in schema if _is_image(field.type)]
    paths = [field.name for field in schema if pa.types.is_string(field.type) or pa.types.is_large_string(field.type)]
    if wanted is None:
        column = _guessed(file, images, _BYTES_NAMES) or _guessed(file, paths, _PATH_NAMES)
        if column is None:
            raise UsageError(f"{file} has no column of paths or of encoded images; its columns are of other types")
    elif wanted in (*images, *paths):
        column = wanted
    else:
        have = ", ".join(schema.names) or "none"
        raise UsageError(f"{file} has no column {wanted!r} of paths or images; its columns: {have}")
    names = None if column in paths else next((name for name in _PATH_NAMES if name in paths), None)
    return column, names


def _guessed(file: str, columns: list[str], usual: tuple[str, ...]) -> str | None:
    """The only column, or the first with a usual name; None if there is none. Raises UsageError."""
    found = columns if len(columns) == 1 else [name for name in usual if name in columns]
    if columns and not found:
        raise UsageError(f"{file} has several possible columns ({', '.join(columns)}); choose one with --column")
    return found[0] if found else None


def _is_image(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind = kind.field("bytes").type  # the format of image columns in Hugging Face datasets
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


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
    """All images of a part, in order. Raises JobError if a file has changed since it was counted."""
    index = 0
    for piece in part.pieces:
        for path, read in _images(piece, Path(part.base)):
            yield BatchImage(part, index, path, read)
            index += 1
    if index != part.images:
        raise JobError(
            f"part {part.number} has {index} images instead of {part.images}: an input changed since the run began; "
            "start again with another --out"
        )


Read = Callable[[], bytes]


def _images(piece: Piece, base: Path) -> Iterator[tuple[str, Read]]:
    match piece:
        case PathsPiece(paths):
            folder = str(base)
            return ((path, partial(read_image_file, os.path.join(folder, path))) for path in paths)  # noqa: PTH118 - of millions
        case MembersPiece():
            return _members(piece, base)
        case RowsPiece():
            return _rows(piece, base)


def _members(piece: MembersPiece, base: Path) -> Iterator[tuple[str, Read]]:
    path = base / piece.file
    try:
        with path.open("rb") as file:
            file.seek(piece.offset)
            for member in islice(_image_members(tarfile.TarFile(fileobj=file, mode="r")), piece.count):
                yield f"{piece.file}/{member.name}", partial(_read_at, path, member.offset_data, member.size)
    except (OSError, tarfile.TarError) as error:
        raise JobError(f"{piece.file} can no longer be read ({error}); check whether it changed") from error


def _read_at(path: Path, offset: int, nbytes: int) -> bytes:
    try:
        with path.open("rb", buffering=0) as file:
            found = os.pread(file.fileno(), nbytes, offset)
    except OSError as error:
        raise ImageError(f"cannot read {path}: {error.strerror}; check the file") from error
    if len(found) < nbytes:
        raise ImageError(f"{path} ends inside this image; check the file")
    return found


def _rows(piece: RowsPiece, base: Path) -> Iterator[tuple[str, Read]]:
    columns = [piece.column, *([piece.names] if piece.names else [])]
    try:
        with pq.ParquetFile(base / piece.file) as opened:
            groups = range(opened.num_row_groups)
            ends = list(accumulate(opened.metadata.row_group(group).num_rows for group in groups))
            begins = [0, *ends]
            needed = [group for group in groups if begins[group] < piece.stop and ends[group] > piece.start]
            row = begins[needed[0]] if needed else 0
            for batch in opened.iter_batches(64, row_groups=needed, columns=columns):
                first, last = max(0, piece.start - row), min(len(batch), piece.stop - row)
                for number, values in enumerate(batch.slice(first, max(0, last - first)).to_pylist(), row + first):
                    yield _image_of_row(piece, number, values, base)
                row += len(batch)
    except (OSError, pa.ArrowException) as error:
        raise JobError(f"{piece.file} can no longer be read ({error}); check whether it changed") from error


def _image_of_row(piece: RowsPiece, number: int, row: dict[str, Any], base: Path) -> tuple[str, Read]:
    value, name = row[piece.column], row.get(piece.names or "")
    if isinstance(value, dict):
        path = value.get("path") or None
        name = name or path
        value = path if value["bytes"] is None else value["bytes"]
    if isinstance(value, str):
        return value, partial(read_image_file, base / value)
    return name or f"{piece.file}#{number}", _no_image if value is None else partial(bytes, value)


def _no_image() -> bytes:
    raise ImageError("the row has no image")
