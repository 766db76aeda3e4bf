"""What `--weights-key` may be said of. Imports no library, for whoever reads options needs it."""

from __future__ import annotations

from pathlib import Path

from convoy.models.errors import UsageError


def refuse_needless_key(key: str | None, weights: Path | None) -> None:
    """Raises UsageError where `--weights-key` is said of what has no entries."""
    if key is not None and (weights is None or weights.suffix == ".safetensors"):
        raise UsageError("--weights-key selects an entry of a .pth file; pass such a file with --weights")
