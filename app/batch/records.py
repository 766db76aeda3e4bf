"""A run, its parts, and what workers report about them: plain data that processes send each other."""

from __future__ import annotations

import hashlib

from msgspec import Struct
from msgspec.json import encode
from msgspec.structs import replace


class PathsPiece(Struct, frozen=True, tag="paths"):
    """Image files, by their names in the results."""

    paths: list[str]


class RowsPiece(Struct, frozen=True, tag="rows"):
    """Rows from `start` to `stop` of a parquet file. `column` has paths or images, `names` the names of images."""

    file: str
    column: str
    names: str | None
    start: int
    stop: int


class MembersPiece(Struct, frozen=True, tag="members"):
    """`count` images of a tar, from the header at `offset`."""

    file: str
    offset: int
    count: int


Piece = PathsPiece | RowsPiece | MembersPiece


class BatchPart(Struct, frozen=True):
    """The images of one result file. Relative names start at `base`."""

    number: int
    images: int
    base: str
    pieces: list[Piece]


class Runner(Struct, frozen=True):
    """Which engine labels, with which file of the bundle, on which device."""

    engine: str
    file: str
    precision: str
    device: str

    @property
    def words(self) -> str:
        return f"{self.engine} with {self.file}"


class RunIdentity(Struct, frozen=True):
    """What determines the rows. `bundle` and `inputs` are digests."""

    model: str
    version: int
    bundle: str
    engine: str
    precision: str
    top_k: int
    threshold: float | None
    embeddings: str | None
    max_pixels: int
    inputs: str
    images: int


class RunFile(Struct, frozen=True):
    """The run that a folder belongs to. `runner` labels its first part and then all others; None before that."""

    identity: RunIdentity
    part_images: int
    runner: Runner | None = None
    schema: int = 1

    @property
    def digest(self) -> str:
        """Names the run in each of its parts."""
        return hashlib.sha256(encode((self.identity, self.part_images))).hexdigest()

    def labelled_by(self, runner: Runner) -> RunFile:
        return replace(self, runner=runner)


class BatchJob(Struct, frozen=True):
    """The job of a worker. `threads` compute and as many decode; `batch_size` 0 means the model's own.

    Without a runner in `run`, the worker takes the fastest engine that proves itself. `gpu` is a device number if
    workers share several.
    """

    store: str
    out: str
    run: RunFile
    batch_size: int
    threads: int = 1
    gpu: int | None = None


class Ready(Struct, frozen=True):
    """A worker has loaded its engine."""

    runner: Runner
    reason: str
    batch_size: int


class Labelled(Struct, frozen=True):
    """`images` more are done, of which `errors` could not be read. Negative if a worker's death undoes some."""

    images: int
    errors: int


class PartDone(Struct, frozen=True, tag="done"):
    """A part is on disk."""

    number: int
    images: int
    errors: int


class Fatal(Struct, frozen=True, tag="fatal"):
    """Why the run cannot go on, and what to do."""

    message: str


Report = Ready | Labelled | PartDone | Fatal
