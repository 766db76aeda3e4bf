"""The gRPC listener next to the HTTP server. The start does not wait for the gRPC library.

The library is imported in a thread while the models load, and the listener opens when it is there.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any

# The client stubs register dtypes with numpy, and numpy reads that registry when it loads this part of itself, which
# it does at the first median. Both would happen in threads at the same time, and a model would be refused for it.
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
    """The listener of our services over a core, which is not ready before `GrpcServer` has started."""
    core.listeners_opening += holder is not None

    async def make_server() -> Any:
        library = await asyncio.to_thread(importlib.import_module, "convoy.app.grpc.server")
        return library.GrpcServer(core, options, decoder, max_calls=max_calls)

    return GrpcHost(holder, make_server, is_open=options.is_open)


class GrpcHost:
    """One listener, or none where no port is held.

    `make_server` may take its time; what it makes has `start(host, port)`, which raises RuntimeError when the port is
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
        """Serve until the HTTP server is stopped; the exit code, where no thread is left that holds up the end.

        gRPC listens as soon as there is a server for it; HTTP ends where that port has been lost until then.
        """
        if self._holder is not None:
            self._making = asyncio.create_task(self._make_server())
            self._opening = asyncio.create_task(self._open(self._holder, self._making, http.stop))
        await http.serve(sockets=[])
        await self.close()
        end_if_held_up(http.exit_code)
        return http.exit_code

    async def close(self) -> None:
        """Take no more calls, and give those that run a second to end. Calling it twice is harmless."""
        if self._making is not None and self._opening is not None:
            # A server that is made already starts whole: cancelled in the middle, the library's fails in its loop.
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
