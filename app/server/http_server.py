"""The listeners: the sockets that clients connect to, the HTTP server, and the life of the gRPC server beside it."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import uvicorn
from starlette.types import ASGIApp

from convoy.app.server.runtime import end_if_held_up
from convoy.models.errors import BundleError, JobError, UsageError
from convoy.models.files import check_regular

_log = logging.getLogger("convoy")


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections from now on. Raises UsageError."""
    return _bound(host, port, 2048, "choose another with --port")


def take_port(host: str, port: int) -> socket.socket | None:
    """A socket that holds the port for gRPC without listening; 0 takes a free one, -1 none. Raises UsageError.

    The library may bind the same port while this socket still holds it.
    """
    return None if port < 0 else _bound(host, port, None, "choose another with --grpc-port, or -1 for no gRPC")


def _bound(host: str, port: int, backlog: int | None, instead: str) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        if backlog is not None:
            listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise UsageError(f"cannot listen on {host}:{port} ({error.strerror}); {instead}") from error
    return listener


def announce(scheme: str, host: str, port: int) -> None:
    """Say where the server listens."""
    _log.info("listening on %s://%s:%d", scheme, "localhost" if host in ("0.0.0.0", "::") else host, port)


def write_address(scheme: str, listener: socket.socket, file: Path) -> None:
    """The URL at which this machine reaches the server, as the file's only line; whole whenever it is read.

    A server whose disk cannot be written serves all the same, and says so.
    """
    host, port = listener.getsockname()[:2]
    own = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    text = f"{scheme}://[{own}]:{port}\n" if ":" in own else f"{scheme}://{own}:{port}\n"
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


class HttpServer(uvicorn.Server):
    """One application over HTTP, until `stop`.

    `on_started` runs when the application has started and the sockets are open, `on_stopping` before connections are
    asked to end.
    """

    def __init__(
        self,
        app: ASGIApp,
        protocol: type[asyncio.Protocol],
        *,
        lifespan: Literal["auto", "off"] = "auto",
        on_started: Callable[[], Awaitable[None]] | None = None,
        on_stopping: Callable[[], None] = lambda: None,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan=lifespan,
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=1,
        )
        super().__init__(config)
        self._on_started, self._on_stopping = on_started, on_stopping
        self.exit_code = 0

    def stop(self, exit_code: int = 0) -> None:
        """Let `serve` end soon, in good order. The first exit code that is not 0 stays."""
        self.exit_code = self.exit_code or exit_code
        self.should_exit = True

    def make_protocol(self) -> Any:
        """For a connection that was accepted elsewhere. Only while it serves."""
        kind: Any = self.config.http_protocol_class
        return kind(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._on_started is not None:
            await self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_stopping()
        await super().shutdown(sockets)


class GrpcHost:
    """One listener, or none where no port is held.

    `make_server` may take its time; what it makes has `start(host, port)`, which raises RuntimeError when the port is
    taken, and `stop(grace_s)`.
    """

    def __init__(self, holder: socket.socket | None, make_server: Callable[[], Awaitable[Any]]) -> None:
        self._holder, self._make_server = holder, make_server
        self._opening: asyncio.Task[None] | None = None
        self._server: Any = None

    async def serve_beside(self, http: HttpServer) -> int:
        """Serve until the HTTP server is stopped; the exit code, where no thread is left that holds up the end.

        gRPC listens as soon as there is a server for it; HTTP ends where that port has been lost until then.
        """
        if self._holder is not None:
            self._opening = asyncio.ensure_future(self._open(self._holder, http.stop))
        await http.serve(sockets=[])
        await self.close()
        end_if_held_up(http.exit_code)
        return http.exit_code

    async def close(self, grace_s: float = 1.0) -> None:
        """Take no more calls, and give those that run `grace_s` to end. Calling it twice is harmless."""
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
