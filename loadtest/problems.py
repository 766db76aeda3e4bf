"""How a request can fail, as seen from the client.

Knows kinds and words. Knows nothing of counting, and imports nothing, because every generator process does.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MAX_TEXT_CHARS = 200


class Fault(StrEnum):
    """The kinds of failure."""

    HTTP = "http"  # an answer with a status other than 200
    GRPC = "grpc"  # an answer with a status other than OK
    REFUSED = "refused"  # nobody listens
    RESET = "reset"  # the connection ended before the answer did
    TIMEOUT = "timeout"
    GARBAGE = "garbage"  # not the protocol, or a good status without an answer
    NETWORK = "network"  # anything else below the protocol
    GENERATOR = "generator"  # our own fault


@dataclass(frozen=True, slots=True)
class Problem:
    """One kind of failure; `status` only for Fault.HTTP."""

    fault: Fault
    text: str
    status: int | None = None

    @property
    def title(self) -> str:
        """Short, for a table: `HTTP 429`, `connection refused`."""
        return TITLES[self.fault] if self.status is None else f"HTTP {self.status}"


TITLES = {
    Fault.HTTP: "HTTP error",
    Fault.GRPC: "gRPC error",
    Fault.REFUSED: "connection refused",
    Fault.RESET: "connection reset",
    Fault.TIMEOUT: "timeout",
    Fault.GARBAGE: "garbage",
    Fault.NETWORK: "network",
    Fault.GENERATOR: "load generator",
}


def one_line(text: str) -> str:
    """No line breaks and no control characters: what a server sends must not steer the terminal."""
    printable = "".join(character if character.isprintable() else " " for character in text[:MAX_TEXT_CHARS])
    return " ".join(printable.split())
