"""One end of the socket between an edge and the core: messages in, messages out, many at a time.

What one turn of the event loop has to say goes out with one send, as one frame: the length of the rest in 64 bits, and
the list of messages in MessagePack. That carries bytes as they are, and msgspec reads it into our types or not at all.
Not pickle: reading that would run whatever it says. Knows no message's meaning.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable, Iterator
from typing import Any

from msgspec import DecodeError
from msgspec.msgpack import Decoder, Encoder

from convoy.app.processes.messages import Message

_log = logging.getLogger("convoy")
_LENGTH = struct.Struct("<Q")
_encode = Encoder().encode
_decode = Decoder(list[Message]).decode


class Channel(asyncio.Protocol):
    """Calls `on_message` for each message, and `on_lost` once, when the other end has gone or spoke nonsense."""

    def __init__(self, on_message: Callable[[Message], None], on_lost: Callable[[], None]) -> None:
        self._on_message, self._on_lost = on_message, on_lost
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
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
        self._received += data
        try:
            for message in self._whole_messages():
                self._on_message(message)
        except (DecodeError, UnicodeDecodeError) as error:
            _log.error("a process of this server was not understood: %s; this is a bug", error)
            self.close()
        except Exception:
            _log.exception("a message of another process of this server could not be taken; this is a bug")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost()

    def _whole_messages(self) -> Iterator[Message]:
        received, begin = self._received, 0
        while len(received) - begin >= _LENGTH.size:
            body = begin + _LENGTH.size
            end = body + _LENGTH.unpack_from(received, begin)[0]
            if len(received) < end:
                break
            yield from _decode(received[body:end])
            begin = end
        del received[:begin]

    def _flush(self) -> None:
        messages, self._outgoing = self._outgoing, []
        if not self.is_open:
            return
        try:
            body = _encode(messages)
        except Exception:  # who waits for an answer would wait for ever
            _log.exception("a message to another process of this server could not be written; this is a bug")
            self.close()
            return
        self._transport.write(_LENGTH.pack(len(body)) + body)
