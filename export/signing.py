"""Signs a bundle's folder before it is published: OpenSSF's model signing with a key, in its own format.

https://github.com/sigstore/model-transparency; `model_signing verify key` reads what is written here, and a server with
`--require-signature` loads what `model_signing sign key` has signed.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from convoy.models.bundle import SIGNATURE
from convoy.models.errors import UsageError


class BundleSigner:
    """Has a private key, read at once: a long export is not to end with a wrong one. Raises UsageError."""

    def __init__(self, key_file: Path) -> None:
        try:
            library: Any = import_module("model_signing.signing")
            self._hashing: Any = import_module("model_signing.hashing")
        except ImportError as error:
            raise UsageError(f"--sign needs {error.name}; pip install 'convoy-serve[signing]'") from error
        try:
            self._config = library.Config().use_elliptic_key_signer(private_key=key_file)
        except Exception as error:  # whatever the libraries make of a file that is none
            raise UsageError(
                f"--sign {key_file} is no private key of an elliptic curve in PEM without a password ({error}); make "
                "one with `openssl ecparam -name prime256v1 -genkey -noout`"
            ) from error

    def sign(self, folder: Path) -> None:
        """Write the signature of all other files in the folder."""
        left_out = self._hashing.Config().set_ignored_paths(paths=[Path(SIGNATURE)])
        self._config.set_hashing_config(left_out).sign(folder, folder / SIGNATURE)


def signer_of(key_file: Path | None) -> BundleSigner | None:
    """None where nothing is to be signed. Raises UsageError."""
    return None if key_file is None else BundleSigner(key_file)
