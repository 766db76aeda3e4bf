"""Certificates as an operator has them: an authority of one's own, and what it signs, in files."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_HOUR = datetime.timedelta(hours=1)


class Authority:
    """Signs certificates and keeps them in a folder; `file` is its own."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = _subject(name)
        own = _builder(self._subject, self._subject, self._key.public_key())
        own = own.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        own = own.add_extension(usage, critical=True)
        own = own.add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(own.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def sign(self, name: str, password: bytes | None = None) -> Signed:
        """A certificate for this machine under a name of its own, and the key."""
        key = ec.generate_private_key(ec.SECP256R1())
        signed = _builder(_subject(name), self._subject, key.public_key())
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        signed = signed.add_extension(x509.SubjectAlternativeName(names), critical=False)
        signed = signed.add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
        )
        cert_file, key_file = (self._folder / f"{self._name}-{name}.{kind}" for kind in ("crt", "key"))
        cert_file.write_bytes(signed.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        encryption = (
            serialization.NoEncryption() if password is None else serialization.BestAvailableEncryption(password)
        )
        key_file.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
        )
        return Signed(cert_file, key_file)


class Signed(NamedTuple):
    """A certificate and its key, each in a file."""

    cert: Path
    key: Path

    @property
    def pair(self) -> tuple[str, str]:
        return str(self.cert), str(self.key)

    def become(self, other: Signed) -> None:
        """The files have what those of the other have, as when a certificate is renewed."""
        self.cert.write_bytes(other.cert.read_bytes())
        self.key.write_bytes(other.key.read_bytes())


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    return builder.serial_number(x509.random_serial_number()).not_valid_before(now - _HOUR).not_valid_after(now + _HOUR)
