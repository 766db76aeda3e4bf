"""Opens the gRPC port without making anybody wait for the gRPC library.

The port is taken at once, so that a wrong call fails at once; the library is imported in a thread while the
models load, and the listener opens when it is there.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import socket
from typing import Any

# The client stubs register dtypes with numpy, and numpy reads that registry when it loads this part of itself, which
# it does at the first median. Both would happen in threads at the same time, and a model would be refused for it.
import numpy.ma  # noqa: F401

from convoy.app.edge.options import EdgeOptions
from convoy.app.submission.management import ManagedCore
from convoy.models.errors import UsageError

_log = logging.getLogger("convoy")


def take_port(host: str, port: int) -> socket.socket:
    """A socket that holds the port without listening; 0 takes a free one. Raises UsageError."""
    holder = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    # With it, the library may bind the same port while this socket still holds it.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        holder.bind((host, port))
    except OSError as error:
        holder.close()
        raise UsageError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another with --grpc-port, or -1 for no gRPC"
        ) from error
    return holder


class GrpcHost:
    """The gRPC listener's life: from a port that is held to calls that have ended."""

    def __init__(self, core: ManagedCore, options: EdgeOptions, holder: socket.socket, *, max_calls: int) -> None:
        self._core, self._options, self._holder, self._max_calls = core, options, holder, max_calls
        self._server: Any = None
        core.listeners_opening += 1

    async def open(self) -> None:
        """Listen; from then on the core may be ready. Raises UsageError when the port has been lost."""
        library = await asyncio.to_thread(importlib.import_module, "convoy.app.edge.grpc.server")
        host, port = self._holder.getsockname()[:2]
        server = library.GrpcServer(self._core, self._options, max_calls=self._max_calls)
        try:
            await server.start(host, port)
        except RuntimeError as error:
            raise UsageError(f"cannot listen on {host}:{port} ({error}); choose another with --grpc-port") from error
        finally:
            self._holder.close()
        self._server = server
        self._core.listeners_opening -= 1
        _log.info("listening on grpc://%s:%d", "localhost" if host in ("0.0.0.0", "::") else host, port)

    async def close(self, grace_s: float = 1.0) -> None:
        """Take no more calls, and give those that run so long to end. Calling it twice is harmless."""
        self._holder.close()
        server, self._server = self._server, None
        if server is not None:
            await server.stop(grace_s)
