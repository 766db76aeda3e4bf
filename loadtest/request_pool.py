"""The requests of a run as bytes, and the check of their responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from convoy.loadtest.answers import AnswerCheck

Protocol = Literal["http", "grpc"]


@dataclass(frozen=True, slots=True)
class RequestPool:
    """`requests` are sent in turn; `check` checks the responses.

    Over HTTP each is a whole request with headers and body. Over gRPC each is one serialised ModelInferRequest, and
    `metadata` is sent with every call.
    """

    requests: Sequence[bytes]
    check: AnswerCheck
    protocol: Protocol = "http"
    metadata: tuple[tuple[str, str], ...] = ()
