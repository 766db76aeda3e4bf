"""Where Convoy is imported from: a checkout or an installed package."""

from __future__ import annotations

from pathlib import Path

# The entry that a child process needs on its path to import the same Convoy.
IMPORT_ROOT = Path(__file__).parents[2]
# The root of the checkout; None if Convoy is installed without one.
CHECKOUT = Path(__file__).resolve().parents[1] if Path(__file__).parent.is_symlink() else None


def pip_install(extra: str) -> str:
    """The command that installs an extra: in a checkout into its own environment."""
    return f"pip install 'convoy-serve[{extra}]'" if CHECKOUT is None else f".venv/bin/pip install -e '.[{extra}]'"
