"""Convoy takes a trained CNN, optimises it for the device it will run on, proves that it is still right, and serves it.

Everything is imported as `convoy.app`, `convoy.export`, `convoy.models` and `convoy.loadtest`, so that a project may
have packages of those names beside this one. In a checkout these four are links to the folders at its top; in a wheel
they are ordinary folders.
"""

from pathlib import Path

# What a child process must have on its path to import Convoy from where this one did.
IMPORT_ROOT = Path(__file__).parent.parent
IS_CHECKOUT = Path(__file__).with_name("app").is_symlink()
