"""Who is told of something may have a bug of its own. It is written down, and costs nobody else what he waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVarTuple

Args = TypeVarTuple("Args")


def tell(listener: Callable[[*Args], None], *args: *Args) -> None:
    """Call it, on the event loop; what it raises goes to the loop's handler of exceptions."""
    try:
        listener(*args)
    except Exception as error:
        tell_bug(repr(listener), error)


def tell_bug(what: str, error: Exception) -> None:
    """Have the event loop's handler of exceptions, which is the log, say what has failed."""
    context = {"message": f"{what} failed; this is a bug", "exception": error}
    asyncio.get_running_loop().call_exception_handler(context)
