"""What one generator process is told, as one line of JSON; the big parts stand behind file descriptors.

Knows the line's layout, the same for the parent that writes it and the child that reads it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import msgspec

from convoy.loadtest.answers import AnswerCheck, Form
from convoy.loadtest.endpoint import Endpoint
from convoy.loadtest.problems import Problem
from convoy.loadtest.request_pool import Protocol, RequestPool
from convoy.loadtest.shared import read_blobs

# What a generator says first. It is told when to start, by a number in a line; after that, closing the pipe means stop.
READY = b"ready"


@dataclass(frozen=True, slots=True)
class GeneratorJob:
    """`clients` None: an open loop with a schedule. Descriptors are inherited from the parent."""

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
    """A generator's last words."""

    problems: tuple[Problem, ...]
    waited: int
    cpu_s: float
    event_loop: str
    timer: str
    stopped: bool


def line_of(said: GeneratorJob | Finished) -> bytes:
    return msgspec.json.encode(said) + b"\n"
