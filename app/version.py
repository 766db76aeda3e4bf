"""The version of Convoy, in one place for the command, the metrics and the metadata."""

from __future__ import annotations

import platform
from importlib import metadata

VERSION = "0.1.0"
_RUNTIMES = ("onnxruntime", "onnxruntime-gpu", "openvino", "tensorrt-cu13", "tensorrt-rtx", "torch")


def in_words() -> str:
    """`convoy 0.1.0 (Python 3.11.7, onnxruntime 1.31.0)`: what is installed, and nothing is imported for it."""
    # One look over what is installed; a version asked for by name looks anew each time.
    found = {name: one.version for one in metadata.distributions() if (name := one.name) in _RUNTIMES}
    runtimes = [f"{name} {found[name]}" for name in _RUNTIMES if name in found]
    return f"convoy {VERSION} ({', '.join([f'Python {platform.python_version()}', *runtimes])})"
