"""Programs of others that may not be here; .ci/run installs them where it can."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest


def tool(name: str, hint: str = "CONTRIBUTING.md says where to get it") -> str:
    """Where the program is; a test without it is left out and says so."""
    found = found_tool(name)
    if found is None:
        pytest.skip(f"{name} is not installed; {hint}")
    return found


def found_tool(name: str) -> str | None:
    """The same for what is no test; None where it is not."""
    beside = Path(sys.executable).parent / name
    return shutil.which(name) or (str(beside) if beside.exists() else None)
