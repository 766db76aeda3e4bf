"""Whom a client trusts, and the certificate that it shows: as a program says it, and as both wires take it."""

from __future__ import annotations

import os
import ssl
from typing import TypeAlias

from convoy.models.errors import UsageError
from convoy.models.tls import ClientTls, ClientTlsNames

_File: TypeAlias = str | os.PathLike[str]
# Who has signed the server's certificate: a file, an SSLContext (HTTP alone), or whether to ask at all.
Verify: TypeAlias = _File | ssl.SSLContext | ClientTls | bool
# A certificate of the client's own: one file that has its key, too, or one of each.
Cert: TypeAlias = _File | tuple[_File, _File]
Trust: TypeAlias = ClientTls | ssl.SSLContext | bool
_SAID = ClientTlsNames("verify", "cert", "cert")


def trust_of(verify: Verify, cert: Cert | None) -> Trust:
    """Raises UsageError for files with which TLS cannot be spoken, and for two that contradict each other."""
    if cert is None:
        if isinstance(verify, bool | ssl.SSLContext | ClientTls):
            return verify
        return ClientTls(os.fspath(verify), names=_SAID)
    if isinstance(verify, ssl.SSLContext | ClientTls):
        raise UsageError("a certificate of your own is in what `verify` is given; load it there, or name files in both")
    cert_file, key_file = cert if isinstance(cert, tuple) else (cert, None)
    ca_file = None if isinstance(verify, bool) else os.fspath(verify)
    tls = ClientTls(ca_file, os.fspath(cert_file), None if key_file is None else os.fspath(key_file), names=_SAID)
    if verify is not False:
        return tls
    context = tls.context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
