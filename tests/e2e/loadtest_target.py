"""A small inference server that misbehaves on demand: the load test's target in its own tests.

Run as a process of its own (a generator that shares an interpreter with its server measures itself). Prints
the port it listens on. The model's name says how it behaves; each answers its first request well, as the
load test tries one before it starts.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import cast

GOOD_OUTPUTS = json.dumps(
    {"model_name": "m", "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [0.5, 1.5]}]}
).encode()
INPUTS = [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]
MODELS = (
    "steady",
    "stalls",
    "resets",
    "garbage",
    "liar",
    "sheds",
    "dies",
    "secret",
    "naps",
)


def http(status: int, body: bytes) -> bytes:
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def error(status: int, text: str) -> bytes:
    return http(status, json.dumps({"error": text}).encode())


class Target(asyncio.Protocol):
    """`asked` counts inference requests per model over all connections."""

    asked: dict[str, int] = {}  # noqa: RUF012
    naps: list[float] = [0.0]  # noqa: RUF012 - until when
    transport: asyncio.Transport

    def __init__(self) -> None:
        self.buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end].decode("latin-1")
            headers = {k.lower(): v.strip() for k, v in (line.split(":", 1) for line in head.split("\r\n")[1:])}
            total = end + 4 + int(headers.get("content-length", 0))
            if len(self.buffer) < total:
                return
            self.buffer = self.buffer[total:]
            self.answer(head.split(" ", 2)[1], headers)

    def answer(self, path: str, headers: dict[str, str]) -> None:
        parts = path.strip("/").split("/")
        if path == "/v2/repository/index":
            rows = [{"name": name, "version": "1", "state": "READY"} for name in MODELS]
            self.transport.write(http(200, json.dumps(rows).encode()))
        elif path == "/v2":
            self.transport.write(http(200, b'{"name":"target","version":"1"}'))
        elif parts[-1] not in MODELS and parts[-1] != "infer":
            self.transport.write(error(404, "no such model"))
        elif parts[0] == "predictions":
            self.transport.write(error(400, "this model takes no images"))
        elif parts[-1] == "infer":
            self.infer(parts[2], headers)
        else:
            described = {"name": parts[-1], "inputs": INPUTS, "outputs": []}
            self.transport.write(http(200, json.dumps(described).encode()))

    def infer(self, model: str, headers: dict[str, str]) -> None:
        self.asked[model] = asked = self.asked.get(model, 0) + 1
        write = self.transport.write
        if model == "secret" and headers.get("authorization") != "Bearer open sesame":
            write(error(401, "the API key is missing or wrong"))
        elif model == "naps":
            self.answer_after_a_nap(asked)
        elif asked == 1 or model in ("steady", "secret"):
            write(http(200, GOOD_OUTPUTS))
        elif model == "resets":
            self.transport.abort()
        elif model == "garbage":
            write(b"220 this is not HTTP\r\n\r\n")
        elif model == "liar":
            write(http(200, b"<html>all is well</html>"))
        elif model == "sheds":
            write(error(429, "the queue is full") if asked % 2 else http(200, GOOD_OUTPUTS))
        elif model == "dies" and asked > 20:
            os._exit(0)
        elif model == "dies":
            write(http(200, GOOD_OUTPUTS))

    def answer_after_a_nap(self, asked: int) -> None:
        """One nap of a second after the thirtieth request; those that came meanwhile are answered then."""
        loop = asyncio.get_running_loop()
        if asked == 30:
            self.naps[0] = loop.time() + 1
        loop.call_at(self.naps[0], self.transport.write, http(200, GOOD_OUTPUTS))


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Target, "127.0.0.1", int(sys.argv[1]))
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
