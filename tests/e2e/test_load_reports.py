"""Load reports of a real server: over HTTP and gRPC."""

from __future__ import annotations

import re
import socket
import struct

import pytest

from tests.support.servers import Server, rows_request, start_fake_server, wait_until

pytestmark = pytest.mark.slow
ASKS = "endpoint-load-metrics-format"
ROWS = "/v2/models/rows/infer"
TOLD = re.compile(r"TEXT application_utilization=(\d+\.\d+), rps_fractional=(\d+\.\d+)")


def told(server: Server) -> tuple[float, float]:
    """Utilisation and requests a second, as an answer has them."""
    reply = server.post(ROWS, json=rows_request(1.0), headers={ASKS: "TEXT"})
    found = TOLD.fullmatch(reply.headers["endpoint-load-metrics"])
    assert found
    return float(found[1]), float(found[2])


def test_a_server_tells_of_the_load_that_it_has() -> None:
    with start_fake_server() as server, server.client() as client:

        def is_told_of() -> bool:
            for _ in range(20):
                client.post(ROWS, json=rows_request(1.0))
            utilisation, requests_per_s = told(server)
            return utilisation > 0 and requests_per_s > 10

        wait_until(is_told_of, "the load is told")
        assert "endpoint-load-metrics" not in client.post(ROWS, json=rows_request(1.0)).headers
        assert client.get("/v2/health/ready", headers={ASKS: "JSON"}).headers["endpoint-load-metrics"][:5] == "JSON "


def test_a_grpc_call_that_asks_has_it_in_its_trailer() -> None:
    """On the wire, because gRPC's own library for Python keeps this one from its callers."""
    with start_fake_server() as server:
        assert TRAILER_NAME not in trailers(server.grpc_address)
        found = trailers(server.grpc_address, (ASKS.encode(), b"BIN"))
        value = found[found.index(TRAILER_NAME) + len(TRAILER_NAME) :]
        assert value[0] == 1 + 18  # its length; the client said that it takes bytes as they are, behind a zero
        assert value[1:3] == b"\x00\x31"
        assert value[11:12] == b"\x49"


TRAILER_NAME = b"endpoint-load-metrics-bin"
_TAKES_BYTES = 0xFE03, 1  # a setting of gRPC's own


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def field(name: bytes, value: bytes) -> bytes:
    """A header that no table has (RFC 7541, 6.2.2)."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def trailers(address: str, *more: tuple[bytes, bytes]) -> bytes:
    """All header blocks of the answer to ServerLive, as they come over the wire."""
    host, _, port = address.partition(":")
    path = b"/inference.GRPCInferenceService/ServerLive"
    headers = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"here")]
    headers += [(b"content-type", b"application/grpc"), (b"te", b"trailers"), *more]
    with socket.create_connection((host, int(port)), timeout=30) as connection, connection.makefile("rb") as file:
        connection.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + frame(4, 0, 0, struct.pack(">HI", *_TAKES_BYTES))
            + frame(1, 4, 1, b"".join(field(*one) for one in headers))
            + frame(0, 1, 1, bytes(5))
        )
        found = b""
        while True:
            start = file.read(9)
            body, kind, flags = file.read(int.from_bytes(start[:3], "big")), start[3], start[4]
            if kind == 4 and not flags & 1:
                connection.sendall(frame(4, 1, 0, b""))
            if kind == 1:
                found += body
                if flags & 1:
                    return found
