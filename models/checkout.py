"""Where Convoy is imported from: a checkout or an installed package."""

from __future__ import annotations

from pathlib import Path

# What a child process must have on its path to import Convoy from where this one did.
IMPORT_ROOT = Path(__file__).parents[2]
IS_CHECKOUT = Path(__file__).parent.is_symlink()


def pip_install(extra: str) -> str:
    """The command that installs an extra: in a checkout into its own environment."""
    return f".venv/bin/pip install -e '.[{extra}]'" if IS_CHECKOUT else f"pip install 'convoy-serve[{extra}]'"
