"""The listening sockets, and the HTTP server."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import uvicorn
from starlette.types import ASGIApp

from convoy.app.server.acceptor import Acceptor
from convoy.models.errors import BundleError, UsageError
from convoy.models.files import check_regular, replace_file

_log = logging.getLogger("convoy")


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises UsageError."""
    return _bound(host, port, 2048, "choose another with --port")


def take_port(host: str, port: int) -> socket.socket | None:
    """Reserve the gRPC port without listening; 0 takes a free one, -1 none. Raises UsageError.

    The library can bind the same port while this socket still holds it.
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


def announce(scheme: str, host: str, port: int, *, is_open: bool) -> None:
    """Log where the server listens; a warning where it `is_open` to anyone who reaches it."""
    own = f"[{host}]" if ":" in host else host
    note = ""
    if is_open:
        note = " (all interfaces, no API key)" if host in ("0.0.0.0", "::") else " (no API key)"
    level = logging.WARNING if is_open else logging.INFO
    _log.log(level, "listening on %s://%s:%d%s", scheme, own, port, note, extra={"port": port})


def write_address(scheme: str, listener: socket.socket, file: Path) -> None:
    """Write the URL at which this machine reaches the server, as the file's only line, atomically.

    If the disk cannot be written, the server serves anyway and logs it.
    """
    host, port = listener.getsockname()[:2]
    own = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    text = f"{scheme}://[{own}]:{port}\n" if ":" in own else f"{scheme}://{own}:{port}\n"
    try:
        if file.exists():
            check_regular(file)  # a device would become a file
        replace_file(file, text.encode(), prefix=f"{file.name}.", mode=0o644)
    except (OSError, BundleError) as error:
        _log.warning("--address-file %s cannot be written (%s); name another file", file, error)


class HttpServer(uvicorn.Server):
    """One application over HTTP, until `stop`.

    `acceptor` is opened when the application has started, and closed before connections are asked to end.
    """

    def __init__(
        self,
        app: ASGIApp,
        protocol: type[asyncio.Protocol],
        acceptor: Acceptor,
        *,
        lifespan: Literal["auto", "off"] = "auto",
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
        self._acceptor = acceptor
        self.exit_code = 0

    def stop(self, exit_code: int = 0) -> None:
        """Let `serve` end soon, in good order. The first exit code other than 0 counts."""
        self.exit_code = self.exit_code or exit_code
        self.should_exit = True

    def _make_protocol(self) -> Any:
        kind: Any = self.config.http_protocol_class
        return kind(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._acceptor.open(self._make_protocol)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._acceptor.close()
        await super().shutdown(sockets)
