"""The job of one generator process as one line of JSON, written by the parent and read by the child.

Large parts are in anonymous files, passed as file descriptors. They have no name, so nothing is left to clean up, even
after a SIGKILL.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from convoy.loadtest.answers import AnswerCheck, Form
from convoy.loadtest.endpoint import Endpoint
from convoy.loadtest.problems import Problem
from convoy.loadtest.request_pool import Protocol, RequestPool

OFFSET_BYTES = 8


def anonymous(size_bytes: int) -> int:
    """A file descriptor of that many zero bytes, which take memory when they are written. The caller closes it."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("convoy-loadtest")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, max(size_bytes, 1))
    return descriptor


def write_blobs(blobs: Sequence[bytes]) -> int:
    """A descriptor of a new file: a table of the offsets of the blobs, then the blobs."""
    table = array("q", [OFFSET_BYTES * (len(blobs) + 1)])
    for blob in blobs:
        table.append(table[-1] + len(blob))
    descriptor = anonymous(0)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(table.tobytes())
        file.writelines(blobs)
    return descriptor


def read_blobs(descriptor: int, count: int) -> list[bytes]:
    """The blobs that `write_blobs` wrote."""
    with mmap.mmap(descriptor, 0) as memory:
        table = array("q", memory[: OFFSET_BYTES * (count + 1)])
        return [memory[table[index] : table[index + 1]] for index in range(count)]


# The first message of a generator. The parent then sends the start time as a line, and closes the pipe to stop it.
READY = b"ready"


@dataclass(frozen=True, slots=True)
class GeneratorJob:
    """With `clients` None, an open loop with a schedule. Descriptors are inherited from the parent."""

    endpoint: Endpoint
    protocol: Protocol
    form: Form
    word: str  # latin-1, so that any bytes pass through JSON
    metadata: tuple[tuple[str, str], ...]
    requests: int
    requests_descriptor: int
    clients: int | None
    schedule_descriptor: int
    capacity: int
    rows_descriptor: int
    connections: int
    first_connections: int
    duration_s: float
    timeout_s: float

    def request_pool(self) -> RequestPool:
        requests = read_blobs(self.requests_descriptor, self.requests)
        check = AnswerCheck(self.form, self.word.encode("latin-1"))
        return RequestPool(requests, check, self.protocol, self.metadata)

    def offsets_ns(self) -> list[int]:
        return array("q", *read_blobs(self.schedule_descriptor, 1)).tolist()


@dataclass(frozen=True, slots=True)
class Finished:
    """The last message of a generator."""

    problems: tuple[Problem, ...]
    waited: int
    cpu_s: float
    event_loop: str
    timer: str
    stopped: bool


def line_of(said: GeneratorJob | Finished) -> bytes:
    return msgspec.json.encode(said) + b"\n"
