"""What every call has on either wire: the options that apply to it, its id, its key, its line in the access log.

Also load reports for balancers: ORCA (gRFC A51, `xds.data.orca.v3.OrcaLoadReport`). A request asks for one with
`endpoint-load-metrics-format: TEXT`, `JSON` or `BIN`, over gRPC as metadata with any value. A report has the two fields
that Envoy's client_side_weighted_round_robin needs.
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
SHUT_DOWN = "the server shut down before it could answer"
# What the log calls the admin token.
ADMIN = "admin"
KEY_IS_WRONG = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'"


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """`grace_s` for everybody, and one second more for every `slowest_bytes_per_s` of the body."""

    max_bytes: int
    grace_s: float = 10.0
    slowest_bytes_per_s: int = 256 << 10

    def seconds_for(self, nbytes: int) -> float:
        return self.grace_s + nbytes / self.slowest_bytes_per_s


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What a client may send, and the name that the log has for it."""

    name: str
    secret: str = field(repr=False)


# What may change while the server runs.
_LIVE = (
    *("default_timeout_ms", "timeouts_ms", "api_keys", "admin_token", "allowed_hosts", "cors_origins", "access_log"),
    "tls",
)


@dataclass(slots=True)
class ServeOptions:
    """`default_timeout_ms` 0: none. `is_loopback`: only this machine can reach the server.

    `timeouts_ms` are instead of `default_timeout_ms` for single models.
    `allowed_hosts`: names by which own pages reach the routes that change something, beside this machine's.
    `cors_origins`: whose pages may read answers, `*` all. `tls` None: plain text. Some of them
    `change`.
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
        """Let what may change while the server runs be as in `to`, for every call that comes from now on."""
        for name in _LIVE:
            setattr(self, name, getattr(to, name))

    def timeout_ms(self, model: str) -> float | None:
        """Of requests to the model that name no deadline; None: no limit."""
        return self.timeouts_ms.get(model, self.default_timeout_ms) or None


class Authenticator:
    """Checks API keys and the admin token. Values are those of the `Authorization` header or metadata."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options

    def is_admin_token(self, authorization: bytes | None) -> bool:
        """Whether the header holds the admin token. False where there is none."""
        token = self._options.admin_token
        return token is not None and _holds(authorization, token)

    def check(
        self, authorization: bytes | None, *, is_open: Callable[[], bool], takes_admin_token: Callable[[], bool]
    ) -> str:
        """The name that the log has for the caller's key, empty where it has none. Raises Unauthorized.

        `is_open`: the call needs no key. `takes_admin_token`: that is a key to it. Both are asked only where the header
        holds no key.
        """
        keys = self._options.api_keys
        if not keys:
            return ""
        found = [key.name for key in keys if _holds(authorization, key.secret)]  # of all keys, in constant time
        if found:
            return found[-1]
        if self.is_admin_token(authorization) and takes_admin_token():
            return ADMIN
        if not is_open():
            raise Unauthorized(KEY_IS_WRONG)
        return ""

    def check_admin(self, authorization: bytes | None) -> None:
        """Raises Unauthorized unless the caller may change what is served."""
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
        """The client's own id where it is fit for a header and a log, else a new one."""
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
        facts: Callable[[], dict[str, object]] | None,
    ) -> None:
        """One line, if the options want it. `facts` is called only then; it is None for a call that is no inference."""
        wanted, is_unusual = self._options.access_log, is_error or took_ms > self._options.slow_request_ms
        if not (wanted == "all" or (wanted == "errors" and is_unusual)):
            return
        shown = f" key {key_name}" if key_name else ""
        if trace:
            shown += f" trace {logs.field(trace.decode('latin-1'))}"
        fields: dict[str, object] | None = None
        if logs.takes_fields():
            fields = {"client": client, "call": logs.printable(call), **_status(status), "took_ms": round(took_ms, 3)}
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
    """A call's verb and path in a line of text: what the client says cannot be taken for other fields of it."""
    verb, _, path = call.partition(" ")
    return f"{logs.field(verb)} {logs.field(path)}"


def _holds(authorization: bytes | None, secret: str) -> bool:
    return hmac.compare_digest(authorization or b"", b"Bearer " + secret.encode())


ASKS = "endpoint-load-metrics-format"
TELLS = "endpoint-load-metrics"
TRAILER = "endpoint-load-metrics-bin"
# Protocol Buffers: the field's number and wire type 1, and eight bytes of a double; two fields need no library.
_REPORT = struct.Struct("<BdBd")


def report_header(wanted: bytes, load: CoreLoad) -> bytes | None:
    """The value of the header in this format; None for an unknown format."""
    match wanted.strip().upper():
        case b"TEXT":
            return b"TEXT application_utilization=%.4f, rps_fractional=%.2f" % load[:2]
        case b"JSON":
            return b'JSON {"application_utilization": %.4f, "rps_fractional": %.2f}' % load[:2]
        case b"BIN":
            return b"BIN " + base64.b64encode(report_message(load))
    return None


def report_message(load: CoreLoad) -> bytes:
    """The same as an OrcaLoadReport, for a trailer."""
    rps_fractional, application_utilization = 6 << 3 | 1, 9 << 3 | 1  # the fields' tags
    return _REPORT.pack(rps_fractional, load.requests_per_s, application_utilization, load.utilisation)
