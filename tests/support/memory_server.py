"""Connections without sockets, whose other end is the test; and a whole server on them, in a thread of this process."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import uvicorn
from uvicorn.lifespan.on import LifespanOn
from uvicorn.server import ServerState

from convoy.app.config.settings import read_settings
from convoy.app.core import Core
from convoy.app.http.application import create_app
from convoy.app.http.connection import GuardedProtocol, guarded_protocol
from tests.support.fake_devices import until
from tests.support.wire import WireReply, head, read_reply

Result = TypeVar("Result")
_PATIENCE_S = 60.0


class Connection(asyncio.Transport):
    """A connection of which the test is the client. What the server has written is in `sent`."""

    def __init__(self, make: Callable[[], GuardedProtocol]) -> None:
        super().__init__()
        self.sent = bytearray()
        self.is_read = True
        self.has_ended = self._is_closing = False
        self.protocol = make()
        self.protocol.connection_made(self)

    def send(self, data: bytes) -> None:
        self.protocol.data_received(data)

    @property
    def replies(self) -> list[WireReply]:
        """All that came so far as a whole."""
        file, found = io.BytesIO(self.sent), []
        while file.tell() < len(self.sent):
            one = read_reply(file)
            if len(one.body) < int(one.headers.get("content-length", 0)):
                break
            found.append(one)
        return found

    async def reply(self, count: int = 1) -> list[WireReply]:
        """So many answers, which are taken away."""
        await until(lambda: len(self.replies) >= count)
        found = self.replies
        assert len(found) == count
        self.sent.clear()
        return found

    async def ask(self, data: bytes) -> WireReply:
        self.send(data)
        (one,) = await self.reply()
        return one

    def leave(self) -> None:
        self.protocol.connection_lost(ConnectionResetError())

    # What the server sees

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"sockname": ("127.0.0.1", 8000), "peername": ("192.0.2.7", 5000)}.get(name, default)

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        assert not self.has_ended
        if not self._is_closing:
            self.sent += data

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.has_ended = True

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True


class MemoryServer:
    """What `convoy serve` is made of, with these settings, but for sockets, signals and processes."""

    def __init__(self, **settings: Any) -> None:
        given = read_settings({"engine": "cpu", **settings})
        options = given.serve_options()
        self.core = Core(given.core_options())
        app = create_app(self.core, options)
        self._kind = guarded_protocol(given.connection_limits())
        self._config = uvicorn.Config(app, http=self._kind, ws="none", log_config=None, access_log=False)
        self._config.load()
        self._state = ServerState()
        self._loop = asyncio.new_event_loop()

    def run(self, doing: Coroutine[Any, Any, Result]) -> Result:
        """On the server's event loop."""
        return asyncio.run_coroutine_threadsafe(doing, self._loop).result(_PATIENCE_S)

    async def connect(self) -> Connection:
        return Connection(lambda: self._kind(self._config, self._state, {}, _loop=self._loop))

    async def rest(self) -> None:
        """Return when nothing is held after all that was asked."""
        await until(lambda: self.core.slab.slots_in_use == self.core.open_calls == self.core.scheduler.unfinished == 0)

    def live(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Ready, in a thread of its own."""
        thread = threading.Thread(target=self.live, name="memory-server", daemon=True)
        thread.start()
        lifespan = LifespanOn(self._config)
        self.run(lifespan.startup())
        try:
            self.run(until(lambda: self.core.ready))
            yield
            self.run(self.rest())
        finally:
            self.run(lifespan.shutdown())
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join(_PATIENCE_S)


class MemoryWire:
    """One connection to a `MemoryServer`, as `Wire` is one by TCP."""

    def __init__(self, server: MemoryServer) -> None:
        self._server, self._connection = server, server.run(server.connect())

    def send(self, data: bytes) -> None:
        async def deliver() -> None:
            self._connection.send(data)

        self._server.run(deliver())

    def ask(
        self, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None, method: str = "POST"
    ) -> WireReply:
        """One request with a declared length, and its answer."""
        self.send(head(path, {"Content-Length": str(len(body)), **(headers or {})}, method) + body)
        return self.reply()

    def reply(self) -> WireReply:
        """The next answer."""
        (one,) = self._server.run(self._connection.reply())
        return one
