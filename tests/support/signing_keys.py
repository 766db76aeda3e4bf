"""Pairs of keys, and folders signed with them as others do it: by the library's own command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from convoy.models.bundle import SIGNATURE


class KeyPair:
    """Both halves, each in a file."""

    def __init__(self, folder: Path, name: str) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        self.private, self.public = folder / f"{name}.pem", folder / f"{name}.pub.pem"
        pem = serialization.Encoding.PEM
        self.private.write_bytes(
            key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
        self.public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))


def model_signing(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The library's command."""
    line = [sys.executable, "-m", "model_signing", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def sign(folder: Path, pair: KeyPair) -> None:
    """Sign what is in a folder, by the library's command."""
    signature = folder / SIGNATURE
    signature.unlink(missing_ok=True)
    done = model_signing("sign", "key", folder, "--private_key", pair.private, "--signature", signature)
    assert done.returncode == 0, done.stderr + done.stdout
