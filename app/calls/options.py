"""Options that apply to calls on any wire: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from convoy.models.images import DEFAULT_MAX_PIXELS
from convoy.models.tls import ServerTls


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
    `change`, and `edition` with them: a cache of what was made of them is valid for one edition.
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
    edition: int = 0

    def change(self, to: ServeOptions) -> None:
        """Let what may change while the server runs be as in `to`, for every call that comes from now on."""
        for name in _LIVE:
            setattr(self, name, getattr(to, name))
        self.edition += 1

    def timeout_ms(self, model: str) -> float | None:
        """Of requests to the model that name no deadline; None: no limit."""
        return self.timeouts_ms.get(model, self.default_timeout_ms) or None
