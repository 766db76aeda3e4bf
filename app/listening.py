"""The socket that clients connect to: opened once, whatever processes accept from it."""

from __future__ import annotations

import logging
import socket

from models.errors import UsageError

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
