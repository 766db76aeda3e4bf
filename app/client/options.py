"""The checked settings of a client: trust, its own certificate, and headers."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Callable, Mapping
from typing import TypeAlias
from urllib.parse import urlsplit

from convoy.models.errors import UsageError
from convoy.models.tls import ClientTls, ClientTlsNames

_File: TypeAlias = str | os.PathLike[str]
# The CA of the server's certificate: a file, an SSLContext (HTTP only), or whether to check at all.
Verify: TypeAlias = _File | ssl.SSLContext | ClientTls | bool
# The client's own certificate: one file that includes its key, or one of each.
Cert: TypeAlias = _File | tuple[_File, _File]
Trust: TypeAlias = ClientTls | ssl.SSLContext | bool
# A mapping, or a function that is called before each request, for example for tracing.
OwnHeaders: TypeAlias = Mapping[str, str] | Callable[[], Mapping[str, str]]

_TLS_NAMES = ClientTlsNames("verify", "cert", "cert")
# Names that HTTP and gRPC both carry; those of gRPC's metadata are lower case.
_HEADER_NAME = re.compile(r"[0-9a-z_.-]+")
_OURS = frozenset(("authorization", "connection", "host", "te", "transfer-encoding", "upgrade", "user-agent"))
_OUR_KINDS = ("accept", "content-", "grpc-", "inference-header-")


_SCHEMES = ("http", "https", "grpc", "grpcs")
_LIKE = "it should look like http://localhost:8000 or grpc://localhost:8001"


def whole_url(given: str) -> str:
    """The URL with its scheme. Without one it is HTTP, on port 8000 if it names none. Raises UsageError."""
    has_scheme = "://" in given
    try:
        parts = urlsplit(given if has_scheme else f"http://{given}")
        port = parts.port
    except ValueError as error:
        raise UsageError(f"the URL {given!r} is wrong ({error}); {_LIKE}") from None
    is_odd = parts.netloc.endswith(":") or any(one.isspace() for one in given)
    if parts.scheme not in _SCHEMES or not parts.hostname or is_odd:
        raise UsageError(f"the URL {given!r} names no server; {_LIKE}")
    if not has_scheme and port is None:
        parts = parts._replace(netloc=f"{parts.netloc}:8000")
    return parts.geturl()


def trust_of(verify: Verify, cert: Cert | None) -> Trust:
    """Raises UsageError for files that TLS cannot use, and for two that contradict each other."""
    if cert is None:
        if isinstance(verify, bool | ssl.SSLContext | ClientTls):
            return verify
        return ClientTls(os.fspath(verify), names=_TLS_NAMES)
    if isinstance(verify, ssl.SSLContext | ClientTls):
        raise UsageError("`verify` is an SSL context; load the client certificate into it, or pass files for both")
    cert_file, key_file = cert if isinstance(cert, tuple) else (cert, None)
    ca_file = None if isinstance(verify, bool) else os.fspath(verify)
    tls = ClientTls(ca_file, os.fspath(cert_file), None if key_file is None else os.fspath(key_file), names=_TLS_NAMES)
    if verify is not False:
        return tls
    context = tls.context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def headers_of(own: OwnHeaders | None) -> dict[str, str]:
    """The current headers, names in lower case. Raises UsageError for headers that cannot be sent or are reserved."""
    found = {name.lower(): value for name, value in ((own() if callable(own) else own) or {}).items()}
    for name, value in found.items():
        if name in _OURS or name.startswith(_OUR_KINDS) or name.endswith("-bin"):
            raise UsageError(f"the client sets the header {name!r} itself; pass a key in `api_key`")
        if not _HEADER_NAME.fullmatch(name):
            raise UsageError(f"the header name {name!r} may only have letters, digits, '-', '_' and '.'")
        if not (isinstance(value, str) and value.isascii() and value.isprintable()):
            raise UsageError(f"the header {name!r} may only have printable ASCII characters")
    return found
