"""What a server refuses, as the errors that the server itself has for it."""

from __future__ import annotations

from email.utils import parsedate_to_datetime
from time import time

from convoy.models.errors import (
    BodyTooLarge,
    DeadlineExceeded,
    Forbidden,
    InvalidRequest,
    ModelFailed,
    NotFound,
    Overloaded,
    RequestError,
    RequestTimeout,
    Unauthorized,
    Unavailable,
    Unsupported,
)

NOT_A_SERVER = "is it a Convoy server?"
_KINDS = (
    *(InvalidRequest, Unauthorized, Forbidden, NotFound, RequestTimeout, BodyTooLarge, ModelFailed, Unsupported),
    *(DeadlineExceeded, Overloaded, Unavailable),
)
# Of those that share a code, the one that says least of the cause.
_BY_CODE: dict[str, type[RequestError]] = {
    **{kind.grpc_code: kind for kind in _KINDS},
    InvalidRequest.grpc_code: InvalidRequest,
}
_BY_STATUS: dict[int, type[RequestError]] = {kind.http_status: kind for kind in _KINDS}


def of_status(status: int, words: str, retry_after: str | None) -> RequestError:
    """The error behind an HTTP status. `words` are the server's, which say what to do."""
    return _error(_BY_STATUS.get(status, RequestError), words, seconds_of(retry_after) or 0.0)


def of_grpc_code(code: str, words: str, retry_after_s: float) -> RequestError:
    """The error behind a gRPC status, by its name."""
    return _error(_BY_CODE.get(code, RequestError), words, retry_after_s)


def _error(kind: type[RequestError], words: str, retry_after_s: float) -> RequestError:
    if kind is Overloaded:
        return Overloaded(words, reason="", retry_after_s=retry_after_s)
    if kind is Unavailable:
        return Unavailable(words, retry_after_s=retry_after_s)
    return kind(words)


def seconds_of(retry_after: str | None) -> float | None:
    """`Retry-After` as RFC 9110 has it: seconds, or a date; None for what is neither."""
    if retry_after is None:
        return None
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time())
    except ValueError:
        return None
