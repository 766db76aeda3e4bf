"""How a call ended, as its client saw it; and what the words of each library mean.

The outcomes that a server can count have its own names (`convoy_requests_total`); the others only a client sees.
"""

from __future__ import annotations

from dataclasses import dataclass

# What the server counts.
COUNTED = ("success", "invalid", "rejected", "deadline_exceeded", "failed", "cancelled")
# What only a client sees. `left`: it went away on purpose. `broken`: no answer, but the end of the connection.
# `hung`: neither within the bound. `wrong`: an answer that is not right. `undocumented`: a status that nobody promised.
SEEN = ("left", "broken", "hung", "wrong", "undocumented")
# No call may take longer, whatever happens to the server meanwhile.
BOUND_S = 25.0

# How the words of a form's answer begin of which some files, which were right, were refused or late.
PARTLY = "in part: "

_BY_STATUS = {
    200: "success",
    429: "rejected",
    503: "failed",
    504: "deadline_exceeded",
    **dict.fromkeys((400, 404, 405, 408, 413, 415, 431), "invalid"),
}
_BY_CODE = {
    "INVALID_ARGUMENT": "invalid",
    "NOT_FOUND": "invalid",
    "RESOURCE_EXHAUSTED": "rejected",
    "DEADLINE_EXCEEDED": "deadline_exceeded",
    "UNAVAILABLE": "failed",
    # By the library, of a call that came in the moment in which its server was closed.
    "CANCELLED": "broken",
}
_UNAVAILABLE_WORDS = ("shut down", "shutting down", "being replaced", "being loaded", "at ready state", "not ready")
_BROKEN_WORDS = ("connect", "socket closed", "goaway", "recvmsg", "stream removed", "connection reset", "broken pipe")


@dataclass(frozen=True, slots=True)
class Ending:
    """One call and what became of it. Times are seconds since the campaign began."""

    client: str
    number: int
    protocol: str
    model: str
    outcome: str
    sent_s: float
    ended_s: float
    words: str = ""
    asked_wrong: bool = False  # the request had a fault of its own


def outcome_of_status(status: int) -> str:
    """The word for an HTTP status."""
    return _BY_STATUS.get(status, "undocumented")


def outcome_of_grpc(code: str, words: str, took_s: float) -> str:
    """The word for a gRPC status; a client that waits no longer gives its call the status of a deadline."""
    name = code.removeprefix("StatusCode.")
    if name == "DEADLINE_EXCEEDED" and took_s > 0.95 * BOUND_S:
        return "hung"
    if name == "UNAVAILABLE" and any(word in words.lower() for word in _BROKEN_WORDS):
        return "broken"
    return _BY_CODE.get(name, "undocumented")


def outcome_of_words(words: str) -> str:
    """The word for an error of which only the text has come, as in a stream."""
    lowered = words.lower()
    if any(word in lowered for word in ("maximum queue size", "no room for", "after the deadline")):
        return "rejected"
    if "timeout expired" in lowered:
        return "deadline_exceeded"
    if any(word in lowered for word in _UNAVAILABLE_WORDS):
        return "failed"
    if any(word in lowered for word in _BROKEN_WORDS):
        return "broken"
    return "invalid"
