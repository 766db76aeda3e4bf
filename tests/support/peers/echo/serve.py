"""A peer of the standard library alone: it serves a network that gives back what it gets."""

from __future__ import annotations

import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Echo(BaseHTTPRequestHandler):
    """`{"input": [...]}` to `{"output": [...]}`, with a number added to each value where one is given."""

    adds = float(os.environ.get("PEER_ADDS", "0"))
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps({"output": [self.adds + value for value in asked["input"]]}).encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(answer)}\r\n\r\n".encode()
        # In one piece: in two, the second would wait for the client's acknowledgement.
        self.wfile.write(head + answer)


class Server(ThreadingHTTPServer):
    """With room for all connections of a load at once, of which the standard five would refuse some."""

    request_queue_size = 128


Server(("127.0.0.1", int(os.environ["PEER_PORT"])), Echo).serve_forever()
