"""How a call ends, and why one is refused: the only list of either.

Every counter, histogram and figure of calls is about a `CallEnd`. `scheduling.request.Outcome` says how a request
leaves the scheduler; a call may have several.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from convoy.models.errors import DeadlineExceeded, RequestError, Unauthorized


class CallOutcome(StrEnum):
    """How a call to a route that infers has ended; each has exactly one."""

    ANSWERED = "answered"
    INVALID = "invalid"  # the request is wrong, or asks for what is not there
    UNAUTHORISED = "unauthorised"  # its key is missing or wrong
    REFUSED = "refused"  # it was not begun, because something is missing that may be there later
    LATE = "late"  # its deadline passed
    CANCELLED = "cancelled"  # its client left, or the time to drain was over
    FAILED = "failed"  # the model, its engine, or a bug


class Refusal(StrEnum):
    """Why something was refused that would be answered at another time."""

    QUEUE_FULL = "queue_full"
    PREDICTED_LATE = "predicted_late"  # it could not be answered before its deadline
    MEMORY = "memory"
    DECODE_QUEUE = "decode_queue"
    CALLS = "calls"  # too many over gRPC at once
    CONNECTIONS = "connections"  # too many at once; what would have been asked is not known
    DRAINING = "draining"
    NOT_READY = "not_ready"  # the model is loading, or its engine is being replaced


class CallEnd(NamedTuple):
    """How one call has ended. `reason` is that of a refusal, otherwise empty."""

    outcome: CallOutcome
    reason: str = ""


class ClientGone(Exception):
    """The client has closed the connection."""


ANSWERED = CallEnd(CallOutcome.ANSWERED)
CANCELLED = CallEnd(CallOutcome.CANCELLED)
FAILED = CallEnd(CallOutcome.FAILED)


def ending_of(error: BaseException) -> CallEnd:
    """The ending of a call in which this was raised."""
    if isinstance(error, ClientGone) or not isinstance(error, Exception):
        return CANCELLED
    if not isinstance(error, RequestError):
        return FAILED  # a bug
    if error.reason:
        return CallEnd(CallOutcome.REFUSED, Refusal(error.reason))
    if isinstance(error, DeadlineExceeded):
        return CallEnd(CallOutcome.LATE)
    if isinstance(error, Unauthorized):
        return CallEnd(CallOutcome.UNAUTHORISED)
    return FAILED if error.http_status in (500, 503) else CallEnd(CallOutcome.INVALID)
