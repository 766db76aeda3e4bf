"""The address of the server: parses the URL and resolves its name once."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from convoy.loadtest.options import DEFAULT_GRPC_URL, DEFAULT_URL, Wire
from convoy.models.errors import JobError, UsageError
from convoy.models.tls import ClientTls

CONNECT_TIMEOUT_S = 5.0
PORTS = {"http": 80, "https": 443, "grpc": 8001, "grpcs": 443}
TO_GRPC = {"http": "grpc", "https": "grpcs"}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`address` is numeric, so that no name is resolved during the run. `prefix` is "" or "/path". With `trust` None,
    the CAs of this machine are trusted, and no client certificate is sent.
    """

    url: str
    host: str
    address: str
    port: int
    tls: bool
    prefix: str
    trust: ClientTls | None = None

    @property
    def host_header(self) -> str:
        name = f"[{self.host}]" if ":" in self.host else self.host
        return name if self.port == PORTS["https" if self.tls else "http"] else f"{name}:{self.port}"

    @property
    def is_grpc(self) -> bool:
        return self.url.startswith("grpc")

    def tls_context(self) -> ssl.SSLContext | None:
        """The TLS context; None without TLS."""
        if not self.tls:
            return None
        return ssl.create_default_context() if self.trust is None else self.trust.context()


def wire_url(url: str, wire: Wire) -> str:
    """The URL with the scheme of the protocol. Raises UsageError if the two contradict each other."""
    scheme, colon, rest = url.partition("://")
    if wire == "http" and scheme in TO_GRPC.values():
        raise UsageError(f"--url {url} is a gRPC address, but --protocol is http; leave one of them out")
    if wire != "grpc" or scheme not in TO_GRPC:
        return url
    return DEFAULT_GRPC_URL if url == DEFAULT_URL else f"{TO_GRPC[scheme]}{colon}{rest}"


def find_endpoint(url: str, trust: ClientTls | None = None) -> Endpoint:
    """Resolve the name and choose the first address that accepts connections.

    Raises UsageError for an invalid URL, JobError if no address accepts connections.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"--url {url!r} is not a URL ({error}); it should look like http://localhost:8000") from None
    if parts.scheme not in PORTS or not parts.hostname:
        raise UsageError(f"--url {url!r} should look like http://localhost:8000")
    port = port or PORTS[parts.scheme]
    address = _first_listening(url, parts.hostname, port)
    prefix = parts.path.rstrip("/")
    clean_url = f"{parts.scheme}://{parts.netloc}{prefix}"
    return Endpoint(clean_url, parts.hostname, address, port, parts.scheme in ("https", "grpcs"), prefix, trust)


def _first_listening(url: str, host: str, port: int) -> str:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise JobError(f"the name {host!r} cannot be resolved ({error}); check --url") from None
    problem: OSError | None = None
    for *_, address in found:
        try:
            socket.create_connection((str(address[0]), port), timeout=CONNECT_TIMEOUT_S).close()
        except OSError as error:
            problem = problem or error
        else:
            return str(address[0])
    reason = (problem.strerror if problem else None) or "no answer"
    raise JobError(f"cannot connect to {url} ({reason}); start the server with `convoy serve`, or check --url")
