"""The ways in which a request can fail, as seen by the client. Every generator process imports this module."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MAX_TEXT_CHARS = 200


class Fault(StrEnum):
    """The kinds of failure."""

    HTTP = "http"  # a response with a status other than 200
    GRPC = "grpc"  # a response with a status other than OK
    REFUSED = "refused"  # nothing listens
    RESET = "reset"  # the connection ended before the response did
    TIMEOUT = "timeout"
    GARBAGE = "garbage"  # not the protocol, or a success status without a valid body
    NETWORK = "network"  # anything else below the protocol
    GENERATOR = "generator"  # a fault of the load generator


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
    """Without line breaks and control characters, which could control the terminal."""
    printable = "".join(character if character.isprintable() else " " for character in text[:MAX_TEXT_CHARS])
    return " ".join(printable.split())
