"""What every call has on either wire: its id, its key, its line in the access log."""

from __future__ import annotations

import hmac
import logging
import re
import secrets
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

from convoy.app.calls.options import ServeOptions
from convoy.app.server.logs import field, printable, takes_fields
from convoy.models.errors import Unauthorized

_log = logging.getLogger("convoy.access")
# https://www.w3.org/TR/trace-context: version, trace id, parent id, flags.
_TRACE = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_ID = re.compile(rb"[\x21-\x7e]{1,128}")
SHUT_DOWN = "the server shut down before it could answer"
# What the log calls the admin token.
ADMIN = "admin"
KEY_IS_WRONG = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'"


class Authenticator:
    """Who may ask for what. Values are those of the `Authorization` header or metadata."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._edition = -1
        self._read()

    def _read(self) -> None:
        """What the options say now."""
        options = self._options
        self._edition = options.edition
        self._expected = [(key.name, _bearer(key.secret)) for key in options.api_keys]
        self._expected_token = None if options.admin_token is None else _bearer(options.admin_token)

    def name_of(self, authorization: bytes | None) -> str | None:
        """The name of the key that the header holds, empty where none is asked for; None: it holds none of them."""
        if self._edition != self._options.edition:
            self._read()
        if not self._expected:
            return ""
        found: str | None = None
        for name, expected in self._expected:  # all of them, so that the time tells nothing
            if hmac.compare_digest(authorization or b"", expected):
                found = name
        return found

    def is_admin_token(self, authorization: bytes | None) -> bool:
        """Whether the header holds the admin token. False where there is none."""
        if self._edition != self._options.edition:
            self._read()
        return self._expected_token is not None and hmac.compare_digest(authorization or b"", self._expected_token)

    def check(
        self, authorization: bytes | None, *, is_open: Callable[[], bool], takes_admin_token: Callable[[], bool]
    ) -> str:
        """The name that the log has for the caller's key, empty where it has none. Raises Unauthorized.

        `is_open`: the call needs no key. `takes_admin_token`: that is a key to it. Both are asked only where the header
        holds no key.
        """
        name = self.name_of(authorization)
        if name is not None:
            return name
        if self.is_admin_token(authorization) and takes_admin_token():
            return ADMIN
        if not is_open():
            raise Unauthorized(KEY_IS_WRONG)
        return ""

    def check_admin(self, authorization: bytes | None) -> None:
        """Raises Unauthorized unless the caller may change what is served."""
        is_token = self.is_admin_token(authorization)
        if self._expected_token is None and not self._options.is_loopback:
            raise Unauthorized(
                "this needs an admin token, and the server has none; start it with --admin-token-file FILE, "
                "or with --host 127.0.0.1"
            )
        if self._expected_token is not None and not is_token:
            raise Unauthorized("the admin token is missing or wrong; send it as 'Authorization: Bearer TOKEN'")


class CallFacts(NamedTuple):
    """What the log can say of a call to a route that infers. `stages_ms` are of the last of its requests."""

    model: str | None
    version: int | None
    outcome: str
    reason: str
    stages_ms: dict[str, float]


class AccessLog:
    """The rules of one server's gates."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self.keys = Authenticator(options)
        self._process = secrets.token_hex(4).encode()
        self._numbers = count(1)

    def request_id(self, given: bytes | None) -> bytes:
        """The client's own id where it is fit for a header and a log, else a new one."""
        if given is not None and _ID.fullmatch(given):
            return given
        return b"%b-%d" % (self._process, next(self._numbers))

    def wants_line(self, is_error: bool, took_ms: float) -> bool:
        """Whether the access log has a line about such a call."""
        wanted = self._options.access_log
        return wanted == "all" or (wanted == "errors" and (is_error or took_ms > self._options.slow_request_ms))

    def log(
        self,
        client: str,
        call: str,
        status: str,
        took_ms: float,
        *,
        is_error: bool,
        trace: bytes | None,
        key_name: str,
        facts: Callable[[], CallFacts] | None,
    ) -> None:
        """One line, if the operator wants it. `facts` are asked for only then; None: the call was no inference."""
        if not self.wants_line(is_error, took_ms):
            return
        shown = f" key {key_name}" if key_name else ""
        if trace:
            shown += f" trace {field(trace.decode('latin-1'))}"
        fields: dict[str, object] | None = None
        if takes_fields():
            fields = {"client": client, "call": printable(call), "status": status, "took_ms": round(took_ms, 3)}
            if key_name:
                fields["key"] = key_name
            if trace and (found := _TRACE.match(trace)) is not None:
                fields["trace_id"] = found[1].decode()
            if facts is not None:
                told = facts()
                fields.update({name: value for name, value in told._asdict().items() if value not in (None, "")})
        _log.info("%s %s %s %.1f ms%s", client, in_line(call), status, took_ms, shown, extra=fields)


def in_line(call: str) -> str:
    """A call's verb and path in a line of text: what the client says cannot be taken for other fields of it."""
    verb, _, path = call.partition(" ")
    return f"{field(verb)} {field(path)}"


def _bearer(secret: str) -> bytes:
    return b"Bearer " + secret.encode()
