"""The requests of a run as they go over the wire, and what a good answer to them looks like.

Knows bytes. Knows neither when they are sent nor how they were made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from convoy.loadtest.answers import AnswerCheck

Protocol = Literal["http", "grpc"]


@dataclass(frozen=True, slots=True)
class RequestPool:
    """`requests` are sent in turn; `check` judges the answers.

    Over HTTP each is a whole request, head and body. Over gRPC each is one serialised ModelInferRequest, and
    `metadata` goes with every call.
    """

    requests: Sequence[bytes]
    check: AnswerCheck
    protocol: Protocol = "http"
    metadata: tuple[tuple[str, str], ...] = ()
