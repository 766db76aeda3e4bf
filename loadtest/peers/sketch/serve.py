"""The least that a batching server does: raw ASGI under stock uvicorn, one thread for the engine, nothing else.

A yardstick for what plain ASGI costs. It takes the protocol's binary requests of one sample of a fixed size.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import uvicorn
from peer_side import Network, settings

_MAX_BATCH = 32
_LENGTH = b"inference-header-content-length"


class Sketch:
    """The ASGI application. Whatever waits when the engine is free becomes the next batch."""

    def __init__(self) -> None:
        self._network = Network()
        self._pool = ThreadPoolExecutor(1)
        self._waiting: deque[tuple[bytes, asyncio.Future[bytes]]] = deque()
        self._is_busy = False
        size = self._network(np.zeros((1, *self._network.sample_shape), self._network.dtype)).nbytes
        output = {"name": self._network.output_name, "datatype": "FP32", "shape": [1, size // 4]}
        self._head = json.dumps({"outputs": [{**output, "parameters": {"binary_data_size": size}}]}).encode()
        self._headers = [(b"content-length", b"%d" % (len(self._head) + size)), (_LENGTH, b"%d" % len(self._head))]

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        message = await receive()
        body: bytes = message["body"]
        while message["more_body"]:
            message = await receive()
            body += message["body"]
        length = int(dict(scope["headers"])[_LENGTH])
        msgspec.json.decode(body[:length])  # what a server has to know is in it
        waits = asyncio.get_running_loop().create_future()
        self._waiting.append((body[length:], waits))
        if not self._is_busy:
            self._is_busy = True
            asyncio.get_running_loop().call_soon(self._start)
        logits = await waits
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await send({"type": "http.response.body", "body": self._head + logits})

    def _start(self) -> None:
        batch = [self._waiting.popleft() for _ in range(min(_MAX_BATCH, len(self._waiting)))]
        self._is_busy = bool(batch)
        if batch:
            self._pool.submit(self._run, batch, asyncio.get_running_loop())

    def _run(self, batch: list[tuple[bytes, asyncio.Future[bytes]]], loop: asyncio.AbstractEventLoop) -> None:
        samples = np.frombuffer(b"".join(body for body, _ in batch), self._network.dtype)
        logits = self._network(samples.reshape(-1, *self._network.sample_shape))
        loop.call_soon_threadsafe(self._finish, batch, logits)

    def _finish(self, batch: list[tuple[bytes, asyncio.Future[bytes]]], logits: np.ndarray) -> None:
        for (_, waits), row in zip(batch, logits, strict=True):
            if not waits.done():
                waits.set_result(row.tobytes())
        self._start()


if __name__ == "__main__":
    uvicorn.run(Sketch(), host="127.0.0.1", port=settings().port, log_level="warning", access_log=False)
