"""What HTTP and gRPC calls share: options, request ids, API keys and the access log.

Also ORCA load reports for balancers (gRFC A51, `xds.data.orca.v3.OrcaLoadReport`). A request asks for one with
`endpoint-load-metrics-format: TEXT`, `JSON` or `BIN`, or over gRPC with that metadata key and any value. A report has
the two fields that Envoy's client_side_weighted_round_robin needs.
"""

from __future__ import annotations

import base64
import hmac
import logging
import re
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from convoy.app.lifecycle.load_watch import CoreLoad
from convoy.app.server import logs
from convoy.models.errors import Unauthorized
from convoy.models.images import DEFAULT_MAX_PIXELS
from convoy.models.tls import ServerTls

_log = logging.getLogger("convoy.access")
# https://www.w3.org/TR/trace-context: version, trace id, parent id, flags.
_TRACE = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_ID = re.compile(rb"[\x21-\x7e]{1,128}")
SHUT_DOWN = "the server shut down before it could answer; send the request to another one"
# The name of the admin token in the log.
ADMIN = "admin"
KEY_IS_WRONG = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'"


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """The time for a body: `grace_s`, plus one second for every `slowest_bytes_per_s` of it."""

    max_bytes: int
    grace_s: float = 10.0
    slowest_bytes_per_s: int = 256 << 10

    def seconds_for(self, nbytes: int) -> float:
        return self.grace_s + nbytes / self.slowest_bytes_per_s


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key and its name in the log."""

    name: str
    secret: str = field(repr=False)


# The options that may change while the server runs.
_LIVE = (
    *("default_timeout_ms", "timeouts_ms", "api_keys", "admin_token", "allowed_hosts", "cors_origins", "access_log"),
    "tls",
)


@dataclass(slots=True)
class ServeOptions:
    """Options that apply to every call. Some of them can `change` while the server runs.

    `default_timeout_ms` 0 means no timeout; `timeouts_ms` has the timeouts of single models. `is_loopback` means that
    only this machine can reach the server. `allowed_hosts` are further host names under which pages of the server may
    call routes that change state. `cors_origins` are the origins that may read answers, `*` for all. `tls` None means
    plain text.
    """

    body: BodyLimits
    decode_threads: int
    max_decoding: int = 1024
    max_pixels: int = DEFAULT_MAX_PIXELS
    default_timeout_ms: float = 0.0
    timeouts_ms: dict[str, float] = field(default_factory=dict)
    server_name: str = "convoy"
    api_keys: tuple[ApiKey, ...] = ()
    admin_token: str | None = field(default=None, repr=False)
    is_loopback: bool = False
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    tls: ServerTls | None = None
    access_log: str = "all"
    slow_request_ms: float = 1000.0

    @property
    def is_open(self) -> bool:
        """Whether other machines may send requests without an API key or a client certificate."""
        return not (self.is_loopback or self.api_keys or (self.tls and self.tls.client_ca))

    def change(self, to: ServeOptions) -> None:
        """Copy the options that may change from `to`. They apply to calls from now on."""
        for name in _LIVE:
            setattr(self, name, getattr(to, name))

    def timeout_ms(self, model: str) -> float | None:
        """The timeout of requests without a deadline of their own; None means no limit."""
        return self.timeouts_ms.get(model, self.default_timeout_ms) or None


class Authenticator:
    """Checks API keys and the admin token in the `Authorization` header or metadata."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options

    def is_admin_token(self, authorization: bytes | None) -> bool:
        """Whether the header holds the admin token. False if there is no admin token."""
        token = self._options.admin_token
        return token is not None and _holds(authorization, token)

    def check(
        self, authorization: bytes | None, *, is_open: Callable[[], bool], takes_admin_token: Callable[[], bool]
    ) -> str:
        """Return the name of the caller's key, empty if it has none. Raises Unauthorized.

        `is_open` says whether the call needs no key, `takes_admin_token` whether the admin token counts as a key. They
        are called only if the header holds no valid key.
        """
        keys = self._options.api_keys
        if not keys:
            return ""
        found = [key.name for key in keys if _holds(authorization, key.secret)]  # compare all keys in constant time
        if found:
            return found[-1]
        if self.is_admin_token(authorization) and takes_admin_token():
            return ADMIN
        if not is_open():
            raise Unauthorized(KEY_IS_WRONG)
        return ""

    def check_admin(self, authorization: bytes | None) -> None:
        """Raise Unauthorized unless the caller may change what is served."""
        if self._options.admin_token is None:
            if not self._options.is_loopback:
                raise Unauthorized(
                    "this route needs an admin token, but the server has none; start it with --admin-token-file FILE, "
                    "or with --host 127.0.0.1"
                )
        elif not self.is_admin_token(authorization):
            raise Unauthorized("the admin token is missing or wrong; send it as 'Authorization: Bearer TOKEN'")


class AccessLog:
    """The rules of one server's gates."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self.keys = Authenticator(options)
        self._process = secrets.token_hex(4).encode()
        self._numbers = count(1)

    def request_id(self, given: bytes | None) -> bytes:
        """The client's request id if it is fit for a header and a log, otherwise a new one."""
        if given is not None and _ID.fullmatch(given):
            return given
        return b"%b-%d" % (self._process, next(self._numbers))

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
        code: str,
        facts: Callable[[], dict[str, object]] | None,
    ) -> None:
        """Log one line if the access log is on.

        `code` is that of the error in the response, empty without one. `facts` is None for a call that is not an
        inference.
        """
        wanted, is_unusual = self._options.access_log, is_error or took_ms > self._options.slow_request_ms
        if not (wanted == "all" or (wanted == "errors" and is_unusual)):
            return
        shown = f" {code}" if code else ""
        shown += f" key {key_name}" if key_name else ""
        if trace:
            shown += f" trace {logs.field(trace.decode('latin-1'))}"
        fields: dict[str, object] | None = None
        if logs.takes_fields():
            fields = {"client": client, "call": logs.printable(call), **_status(status), "took_ms": round(took_ms, 3)}
            if code:
                fields["code"] = code
            if key_name:
                fields["key"] = key_name
            if trace and (found := _TRACE.match(trace)) is not None:
                fields["trace_id"] = found[1].decode()
            if facts is not None:
                fields |= facts()
        _log.info("%s %s %s %.1f ms%s", client, in_line(call), status, took_ms, shown, extra=fields)


def _status(status: str) -> dict[str, object]:
    """A number for HTTP, 499 where the client left, and a name for gRPC: one field holds one type."""
    if status == "left":
        return {"status": 499}
    return {"status": int(status)} if status.isdigit() else {"grpc_status": status}


def in_line(call: str) -> str:
    """Escape a method and path for a line of text, so that they cannot look like other fields."""
    verb, _, path = call.partition(" ")
    return f"{logs.field(verb)} {logs.field(path)}"


def _holds(authorization: bytes | None, secret: str) -> bool:
    return hmac.compare_digest(authorization or b"", b"Bearer " + secret.encode())


ASKS = "endpoint-load-metrics-format"
TELLS = "endpoint-load-metrics"
TRAILER = "endpoint-load-metrics-bin"
# Encodes two doubles as Protocol Buffers by hand: field number, wire type 1, eight bytes.
_REPORT = struct.Struct("<BdBd")


def report_header(wanted: bytes, load: CoreLoad) -> bytes | None:
    """The value of the response header; None for an unknown format."""
    match wanted.strip().upper():
        case b"TEXT":
            return b"TEXT application_utilization=%.4f, rps_fractional=%.2f" % load[:2]
        case b"JSON":
            return b'JSON {"application_utilization": %.4f, "rps_fractional": %.2f}' % load[:2]
        case b"BIN":
            return b"BIN " + base64.b64encode(report_message(load))
    return None


def report_message(load: CoreLoad) -> bytes:
    """An encoded OrcaLoadReport, for a trailer."""
    rps_fractional, application_utilization = 6 << 3 | 1, 9 << 3 | 1  # field tags
    return _REPORT.pack(rps_fractional, load.requests_per_s, application_utilization, load.utilisation)
