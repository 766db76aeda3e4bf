"""Where `--weights-key` is allowed. Imports no library, because option parsing needs it."""

from __future__ import annotations

from pathlib import Path

from convoy.models.errors import UsageError


def refuse_needless_key(key: str | None, weights: Path | None) -> None:
    """Raise UsageError if `--weights-key` is given for a source without entries."""
    if key is not None and (weights is None or weights.suffix == ".safetensors"):
        raise UsageError("--weights-key selects an entry of a .pth file; pass such a file with --weights")
