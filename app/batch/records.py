"""Parts of a run, and what is said of them; plain data that processes send each other as JSON."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

ColumnKind = Literal["path", "bytes", "struct"]


class PathsPiece(Struct, frozen=True, tag="paths"):
    """Image files, by the names that the rows bear."""

    paths: list[str]


class RowsPiece(Struct, frozen=True, tag="rows"):
    """Rows from `start` to `stop` of a parquet file. `names`: a column with the images' own names."""

    file: str
    column: str
    kind: ColumnKind
    names: str | None
    start: int
    stop: int


class MembersPiece(Struct, frozen=True, tag="members"):
    """So many images of a tar, from the header at `offset`."""

    file: str
    offset: int
    count: int


Piece = PathsPiece | RowsPiece | MembersPiece


class BatchPart(Struct, frozen=True):
    """What one file of results is for. Relative names start at `base`."""

    number: int
    images: int
    base: str
    pieces: list[Piece]


class Runner(Struct, frozen=True):
    """Which engine labels, with which of the bundle's files, and on what."""

    engine: str
    file: str
    precision: str
    device: str

    @property
    def words(self) -> str:
        return f"{self.engine} with {self.file}"


class BatchJob(Struct, frozen=True, kw_only=True):
    """All that a worker is told. `run` is the digest of what decides the results (`run_file`).

    `threads` compute and as many decode. `runner`: which engine labelled before; None: the fastest that proves itself.
    `gpu` is a device's number where workers share several. `batch_size` 0: the model's own.
    """

    store: str
    model: str
    version: int
    engine: str
    precision: str
    out: str
    run: str
    top_k: int
    embeddings: str | None
    batch_size: int
    threads: int
    max_pixels: int
    gpu: int | None = None
    runner: Runner | None = None


class Ready(Struct, frozen=True, tag="ready"):
    """A worker has loaded its engine."""

    runner: Runner
    reason: str
    batch_size: int


class Labelled(Struct, frozen=True, tag="labelled"):
    """So many images more, and so many that could not be read."""

    images: int
    errors: int


class PartDone(Struct, frozen=True, tag="done"):
    """A part is on disk."""

    number: int
    images: int
    errors: int


class Fatal(Struct, frozen=True, tag="fatal"):
    """The run cannot go on, and what to do."""

    message: str


Said = Ready | Labelled | PartDone | Fatal
