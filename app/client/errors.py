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
    DeadlineExceeded,
)
# Of those that share a code, that which says less of the cause.
_BY_CODE: dict[str, type[RequestError]] = {
    **{kind.grpc_code: kind for kind in _KINDS},
    InvalidRequest.grpc_code: InvalidRequest,
}
_BY_STATUS: dict[int, type[RequestError]] = {kind.http_status: kind for kind in _KINDS}


def of_status(status: int, words: str, retry_after: str | None) -> RequestError:
    """The error behind an HTTP status. `words` are the server's, which say what to do."""
    if status == Overloaded.http_status:
        return Overloaded(words, reason="", retry_after_s=seconds_of(retry_after) or 0.0)
    if status == Unavailable.http_status:
        return Unavailable(words, retry_after_s=seconds_of(retry_after) or 0.0)
    return _BY_STATUS.get(status, RequestError)(words)


def of_grpc_code(code: str, words: str, retry_after_s: float) -> RequestError:
    """The error behind a gRPC status, by its name."""
    if code == Overloaded.grpc_code:
        return Overloaded(words, reason="", retry_after_s=retry_after_s)
    if code == Unavailable.grpc_code:
        return Unavailable(words, retry_after_s=retry_after_s)
    return _BY_CODE.get(code, RequestError)(words)


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
