"""Opens the gRPC listener beside the HTTP server.

The gRPC library takes a while to import, so a thread imports it while the models load, and the start does not wait for
it.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any

# tritonclient registers dtypes with numpy, and numpy reads that registry when it first imports the module for medians.
# Import it here: two threads doing both at once would break loading a model.
import numpy.ma  # noqa: F401

from convoy.app.calls.access import ServeOptions
from convoy.app.core import Core
from convoy.app.pictures.decoder import Decoder
from convoy.app.server.http_server import HttpServer, announce
from convoy.app.server.runtime import end_if_held_up
from convoy.models.errors import JobError, UsageError

_log = logging.getLogger("convoy")


def grpc_host(
    core: Core, options: ServeOptions, decoder: Decoder, holder: socket.socket | None, *, max_calls: int
) -> GrpcHost:
    """The gRPC listener of a core. The core is not ready before `GrpcServer` has started."""
    core.listeners_opening += holder is not None

    async def make_server() -> Any:
        library = await asyncio.to_thread(importlib.import_module, "convoy.app.grpc.server")
        return library.GrpcServer(core, options, decoder, max_calls=max_calls)

    return GrpcHost(holder, make_server, is_open=options.is_open)


class GrpcHost:
    """A gRPC listener, or none if no port is held.

    `make_server` may be slow. It returns an object with `start(host, port)`, which raises RuntimeError if the port is
    taken, and `stop(grace_s)`.
    """

    def __init__(
        self,
        holder: socket.socket | None,
        make_server: Callable[[], Coroutine[Any, Any, Any]],
        *,
        is_open: bool = False,
    ) -> None:
        self._holder, self._make_server, self._is_open = holder, make_server, is_open
        self._making: asyncio.Task[Any] | None = None
        self._opening: asyncio.Task[None] | None = None
        self._server: Any = None

    async def serve_beside(self, http: HttpServer) -> int:
        """Serve until the HTTP server stops. Returns an exit code if no thread delays the end.

        gRPC listens as soon as its server exists. If its port has been taken meanwhile, HTTP stops.
        """
        if self._holder is not None:
            self._making = asyncio.create_task(self._make_server())
            self._opening = asyncio.create_task(self._open(self._holder, self._making, http.stop))
        await http.serve(sockets=[])
        await self.close()
        end_if_held_up(http.exit_code)
        return http.exit_code

    async def close(self) -> None:
        """Refuse new calls and give running ones a second to end. Can be called twice."""
        if self._making is not None and self._opening is not None:
            # Let a server that exists finish its start: the library fails if a start is cancelled.
            self._making.cancel()
            await asyncio.wait({self._opening})
        server, self._server = self._server, None
        if server is not None:
            await server.stop(1.0)

    async def _open(self, holder: socket.socket, making: asyncio.Task[Any], on_lost: Callable[[int], None]) -> None:
        host, port = holder.getsockname()[:2]
        try:
            server = await making
            await server.start(host, port)
        except RuntimeError as error:
            _log.critical("cannot listen on %s:%d (%s); choose another with --grpc-port", host, port, error)
            on_lost(UsageError.exit_code)
        except Exception:
            _log.critical("gRPC does not start; --grpc-port -1 turns it off", exc_info=True)
            on_lost(JobError.exit_code)
        else:
            self._server = server
            announce("grpc", host, port, is_open=self._is_open)
        finally:
            holder.close()
