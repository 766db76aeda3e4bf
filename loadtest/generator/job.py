"""What one generator process is told, as one line of JSON; the big parts stand behind file descriptors.

Knows the line's layout, the same for the parent that writes it and the child that reads it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from convoy.loadtest.answers import AnswerCheck, Form
from convoy.loadtest.endpoint import Endpoint
from convoy.loadtest.request_pool import Protocol, RequestPool
from convoy.loadtest.shared import read_blobs, read_integers


@dataclass(frozen=True, slots=True)
class GeneratorJob:
    """`clients` None: an open loop with `scheduled` due times. Descriptors are inherited from the parent."""

    endpoint: Endpoint
    protocol: Protocol
    form: Form
    word: str  # latin-1, so that any bytes pass through JSON
    metadata: tuple[tuple[str, str], ...]
    requests: int
    requests_descriptor: int
    clients: int | None
    scheduled: int
    schedule_descriptor: int
    capacity: int
    rows_descriptor: int
    connections: int
    first_connections: int
    duration_s: float
    timeout_s: float

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> GeneratorJob:
        values: dict[str, Any] = json.loads(line)
        endpoint = Endpoint(**values.pop("endpoint"))
        metadata = tuple((name, value) for name, value in values.pop("metadata"))
        return cls(endpoint=endpoint, metadata=metadata, **values)

    def request_pool(self) -> RequestPool:
        requests = read_blobs(self.requests_descriptor, self.requests)
        check = AnswerCheck(self.form, self.word.encode("latin-1"))
        return RequestPool(requests, check, self.protocol, self.metadata)

    def offsets_ns(self) -> list[int]:
        return read_integers(self.schedule_descriptor, self.scheduled)


@dataclass(frozen=True, slots=True)
class Finished:
    """A generator's last words."""

    problems: tuple[tuple[str, str, int | None], ...]  # fault, text, status
    waited: int
    cpu_s: float
    event_loop: str
    timer: str
    stopped: bool

    def to_line(self) -> bytes:
        return json.dumps({"finished": asdict(self)}).encode() + b"\n"

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Finished:
        problems = tuple((fault, text, status) for fault, text, status in values.pop("problems"))
        return cls(problems=problems, **values)


READY = b'{"ready": true}\n'


def start_line(start_ns: int) -> bytes:
    """The parent's second and last word. After it, closing the pipe means stop."""
    return json.dumps({"start_ns": start_ns}).encode() + b"\n"
