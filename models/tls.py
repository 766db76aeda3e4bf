"""TLS for both ends: PEM files, checked when they are read.

A server keeps the contents and not the files, so what was checked is what serves, whatever happens to the files.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from convoy.models.errors import UsageError


@dataclass(frozen=True, slots=True)
class ServerTls:
    """A server's certificate chain, its key, and the CA of its clients' certificates if they must have one; all PEM."""

    chain: str
    key: str = field(repr=False)
    client_ca: str | None = None

    @staticmethod
    def read(cert_file: Path, key_file: Path | None, client_ca_file: Path | None) -> ServerTls:
        """Read the files. Without a `key_file`, `cert_file` also has the key. Raises UsageError if they do not fit
        together.
        """
        cert = _File("--tls-cert-file", cert_file)
        key = cert if key_file is None else _File("--tls-key-file", key_file)
        ca = None if client_ca_file is None else _File("--tls-client-ca-file", client_ca_file)
        read = ServerTls(cert.text(), key.text(), None if ca is None else ca.text())
        with _explained(cert, key, ca):
            read.context()
        return read

    def context(self) -> ssl.SSLContext:
        """A context for HTTP/1.1 over TLS 1.2 or later. Raises ssl.SSLError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(["http/1.1"])
        with _as_file(self.chain) as chain, _as_file(self.key) as key:
            context.load_cert_chain(chain, key, password=_no_password)
        if self.client_ca is not None:
            context.load_verify_locations(cadata=self.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


class ClientTlsNames(NamedTuple):
    """The names of the files for error messages, such as option names."""

    ca_file: str = "--ca-file"
    cert_file: str = "--client-cert-file"
    key_file: str = "--client-key-file"


_OPTIONS = ClientTlsNames()


@dataclass(frozen=True, slots=True)
class ClientTls:
    """A client's files: the CA of the server's certificate (None: those that this machine trusts), and the client's own
    certificate. Raises UsageError if they cannot be used.
    """

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    names: ClientTlsNames = _OPTIONS

    def __post_init__(self) -> None:
        if self.key_file is not None and self.cert_file is None:
            raise UsageError(f"{self.names.key_file} needs {self.names.cert_file}")
        self.context()

    def context(self) -> ssl.SSLContext:
        """A context for any library that takes one. Raises UsageError."""
        ca, cert, key = self._files()
        for one in (ca, cert, key):
            if one is not None:
                one.text()
        with _explained(cert, key, ca):
            context = ssl.create_default_context(cafile=self.ca_file)
            if cert is not None and key is not None:
                context.load_cert_chain(cert.path, key.path, password=_no_password)
        return context

    def texts(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """PEM of the CA, the key and the chain, in gRPC's order. Raises UsageError."""
        ca, cert, key = self._files()
        found = (None if one is None else one.text().encode() for one in (ca, key, cert))
        return next(found), next(found), next(found)

    def _files(self) -> tuple[_File | None, _File | None, _File | None]:
        ca = None if self.ca_file is None else _File(self.names.ca_file, Path(self.ca_file))
        if self.cert_file is None:
            return ca, None, None
        cert = _File(self.names.cert_file, Path(self.cert_file))
        return ca, cert, cert if self.key_file is None else _File(self.names.key_file, Path(self.key_file))


class _File(NamedTuple):
    option: str
    path: Path

    def __str__(self) -> str:
        return f"{self.option} {self.path}"

    def text(self) -> str:
        """Read a file. Raises UsageError."""
        try:
            return self.path.read_text()
        except (OSError, ValueError) as error:
            raise UsageError(f"{self} cannot be read: {error}") from error


@contextmanager
def _explained(cert: _File | None, key: _File | None, ca: _File | None) -> Iterator[None]:
    """Explain the library's error codes."""
    try:
        yield
    except (ssl.SSLError, ValueError) as error:
        raise UsageError(_words(cert, key, ca, error)) from error


def _words(cert: _File | None, key: _File | None, ca: _File | None, error: Exception) -> str:
    for file in (cert, ca):
        if file is not None and "-----BEGIN CERTIFICATE-----" not in file.text():
            return f"{file} has no PEM certificate ('-----BEGIN CERTIFICATE-----'); choose another file"
    if key is not None and "PRIVATE KEY-----" not in key.text():
        return f"{key} has no PEM private key ('-----BEGIN PRIVATE KEY-----'); choose another file"
    if key is not None and "ENCRYPTED" in key.text():
        return f"the key in {key} has a password, which is not supported; remove it with `openssl pkey`"
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        return f"the key in {key} does not match the first certificate in {cert}; use a matching pair"
    files = ", ".join(dict.fromkeys(str(file) for file in (cert, key, ca) if file is not None))
    return f"cannot use {files} for TLS ({error}); check them with `openssl x509 -text -noout -in FILE`"


def _no_password() -> str:
    """Otherwise the library would prompt on the terminal."""
    return ""


@contextmanager
def _as_file(text: str) -> Iterator[str]:
    """A file name for text, for a library that only reads files; it is never written to a disk."""
    descriptor = os.memfd_create("convoy-pem")
    try:
        os.write(descriptor, text.encode())
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
