"""A test whose process is forked fails, whichever library did it: see `tests/test_processes.py`.

A plugin of pytest's. What raises before a fork is no more than a warning to Python, and to pytest an error.
"""

from __future__ import annotations

import os


def _refuse() -> None:
    raise RuntimeError('a process with threads was forked: start a new one, or use the context "spawn"')


os.register_at_fork(before=_refuse)
