"""The life of a gRPC listener: from a port that is held to calls that have ended. What it serves comes from above."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from convoy.app.server.exits import end_if_held_up
from convoy.app.server.http_server import HttpServer, announce
from convoy.models.errors import JobError, UsageError

_log = logging.getLogger("convoy")


class GrpcHost:
    """One listener, or none where no port is held.

    `make_server` may take its time; what it makes has `start(host, port)`, which raises RuntimeError when the port is
    taken, and `stop(grace_s)`.
    """

    def __init__(self, holder: socket.socket | None, make_server: Callable[[], Awaitable[Any]]) -> None:
        self._holder, self._make_server = holder, make_server
        self._opening: asyncio.Task[None] | None = None
        self._server: Any = None

    async def serve_beside(self, http: HttpServer, sockets: list[socket.socket]) -> int:
        """Serve until the HTTP server is stopped; the exit code, where no thread is left that holds up the end.

        gRPC listens as soon as there is a server for it; HTTP ends where that port has been lost until then.
        """
        if self._holder is not None:
            self._opening = asyncio.ensure_future(self._open(self._holder, http.stop))
        await http.serve(sockets=sockets)
        await self.close()
        end_if_held_up(http.exit_code)
        return http.exit_code

    async def close(self, grace_s: float = 1.0) -> None:
        """Take no more calls, and give those that run so long to end. Calling it twice is harmless."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait({self._opening})
        if self._holder is not None:
            self._holder.close()
        server, self._server = self._server, None
        if server is not None:
            await server.stop(grace_s)

    async def _open(self, holder: socket.socket, on_lost: Callable[[int], None]) -> None:
        host, port = holder.getsockname()[:2]
        try:
            server = await self._make_server()
            await _started(server, host, port)
        except RuntimeError as error:
            _log.critical("cannot listen on %s:%d (%s); choose another with --grpc-port", host, port, error)
            on_lost(UsageError.exit_code)
            return
        except Exception:
            _log.critical("gRPC does not start; --grpc-port -1 leaves it out", exc_info=True)
            on_lost(JobError.exit_code)
            return
        finally:
            holder.close()
        self._server = server
        announce("grpc", host, port)


async def _started(server: Any, host: str, port: int) -> None:
    """Start it whole, or not at all: cancelled in the middle, the library's own server fails in its loop."""
    starting = asyncio.ensure_future(server.start(host, port))
    try:
        await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.wait({starting})
        if starting.exception() is None:
            await server.stop(0)
        raise
