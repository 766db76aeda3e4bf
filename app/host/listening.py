"""The socket that clients connect to: opened once, whatever processes accept from it."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

from convoy.models.errors import BundleError, UsageError
from convoy.models.files import check_regular

_log = logging.getLogger("convoy")
_BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections from now on. Raises UsageError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise UsageError(f"cannot listen on {host}:{port} ({error.strerror}); choose another with --port") from error
    return listener


def announce(listener: socket.socket) -> None:
    """Say where the server listens."""
    host, port = listener.getsockname()[:2]
    _log.info("listening on http://%s:%d", "localhost" if host in ("0.0.0.0", "::") else host, port)


def write_address(listener: socket.socket, file: Path) -> None:
    """The URL at which this machine reaches the server, as the file's only line; whole whenever somebody reads it.

    A server whose disk cannot be written serves all the same, and says so.
    """
    host, port = listener.getsockname()[:2]
    own = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    text = f"http://[{own}]:{port}\n" if ":" in own else f"http://{own}:{port}\n"
    partial = file.parent / f"{file.name}.{os.getpid()}"
    try:
        if file.exists():
            check_regular(file)  # a device would become a file
        try:
            partial.write_text(text)
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)
    except (OSError, BundleError) as error:
        _log.warning("--address-file %s cannot be written (%s); name another file", file, error)
