"""The version of Convoy, in one place for the command, the metrics and the metadata."""

from __future__ import annotations

from importlib.util import find_spec

VERSION = "0.1.0"
_IN_THE_HOT_PATH = "convoy.app.scheduling.policy"


def is_compiled() -> bool:
    """Whether the hot path is machine code, as in the image; a checkout's is interpreted."""
    spec = find_spec(_IN_THE_HOT_PATH)
    return spec is not None and not (spec.origin or "").endswith(".py")
