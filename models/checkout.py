"""Where this Convoy is imported from, for child processes and for what asks whether it is a checkout."""

from __future__ import annotations

from pathlib import Path

# What a child process must have on its path to import Convoy from where this one did.
IMPORT_ROOT = Path(__file__).parents[2]
# The root of the checkout; None where Convoy is installed without one.
CHECKOUT = Path(__file__).resolve().parents[1] if Path(__file__).parent.is_symlink() else None
