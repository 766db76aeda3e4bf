"""Headers of the caller's own beside those of the protocol, on both wires: a trace's context, a request's id."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeAlias

from convoy.models.errors import UsageError

# Given at once, or asked for whenever something is sent, as a trace's context has to be.
OwnHeaders: TypeAlias = Mapping[str, str] | Callable[[], Mapping[str, str]]
# Both wires carry such names; those of gRPC's metadata are in lower case.
_NAME = re.compile(r"[0-9a-z_.-]+")
_OURS = frozenset(("authorization", "connection", "host", "te", "transfer-encoding", "upgrade", "user-agent"))
_OUR_KINDS = ("accept", "content-", "grpc-", "inference-header-")


def headers_of(own: OwnHeaders | None) -> dict[str, str]:
    """As they are now, names in lower case. Raises UsageError for what cannot be sent, or is the client's."""
    found = {name.lower(): value for name, value in ((own() if callable(own) else own) or {}).items()}
    for name, value in found.items():
        if name in _OURS or name.startswith(_OUR_KINDS) or name.endswith("-bin"):
            raise UsageError(f"the header {name!r} is the client's own to send; a key goes into `api_key`")
        if not _NAME.fullmatch(name):
            raise UsageError(f"the header name {name!r} may have letters, digits, '-', '_' and '.' alone")
        if not (isinstance(value, str) and value.isascii() and value.isprintable()):
            raise UsageError(f"the header {name!r} must have printable ASCII characters alone")
    return found


def checked(own: OwnHeaders | None) -> OwnHeaders | None:
    """The same; a mapping is looked at now, a function whenever it is asked. Raises UsageError as `headers_of` does."""
    if not callable(own):
        headers_of(own)
    return own
