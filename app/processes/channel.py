"""One end of the socket between an edge and the core: messages in, messages out, many at a time.

What one turn of the event loop has to say goes out with one send; whatever has arrived is read with one recv.
Knows no message's meaning.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from convoy.app.processes.codec import FrameError, FrameReader, write_frame
from convoy.app.processes.messages import Message

_log = logging.getLogger("convoy")


class Channel(asyncio.Protocol):
    """Calls `on_message` for each message, and `on_lost` once, when the other end has gone or spoke nonsense."""

    def __init__(self, on_message: Callable[[Message], None], on_lost: Callable[[], None]) -> None:
        self._on_message, self._on_lost = on_message, on_lost
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader()
        self._outgoing: list[Message] = []
        self._transport: Any = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, message: Message) -> None:
        """Say it at the end of this turn; nothing is said on a channel that is closed."""
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(message)

    def close(self) -> None:
        """End the connection now; `on_lost` follows."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._reader.feed(data):
                self._on_message(message)
        except FrameError as error:
            _log.error("a process of this server was not understood: %s; this is a bug", error)
            self.close()
        except Exception:
            _log.exception("a message of another process of this server could not be taken; this is a bug")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost()

    def _flush(self) -> None:
        messages, self._outgoing = self._outgoing, []
        if self.is_open:
            self._transport.write(write_frame(messages))
