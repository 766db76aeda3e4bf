"""uvicorn as this project runs it: one configuration, on sockets that are there, with signals left to the process.

What of uvicorn's inside this and the connections rely on is named in `tests/unit/test_uvicorn_inside.py`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import uvicorn
from starlette.types import ASGIApp


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
        """For a connection that somebody else has taken. Only while it serves."""
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
