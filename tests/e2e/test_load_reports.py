"""Load reports of a real server: over HTTP and gRPC."""

from __future__ import annotations

import re
import struct

import pytest

from tests.support.http2 import Connection
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
        found = trailers(server.grpc_address, (ASKS, "BIN"))
        value = found[found.index(TRAILER_NAME) + len(TRAILER_NAME) :]
        assert value[0] == 1 + 18  # its length; the client said that it takes bytes as they are, behind a zero
        assert value[1:3] == b"\x00\x31"
        assert value[11:12] == b"\x49"


TRAILER_NAME = b"endpoint-load-metrics-bin"
_TAKES_BYTES = 0xFE03, 1  # a setting of gRPC's own


def trailers(address: str, *more: tuple[str, str]) -> bytes:
    """All blocks of headers of the answer to ServerLive, as they come over the wire."""
    with Connection(address, struct.pack(">HI", *_TAKES_BYTES)) as connection:
        stream = connection.begin("/inference.GRPCInferenceService/ServerLive", more)
        connection.send_more(stream, bytes(5), is_last=True)
        wait_until(lambda: connection.has_ended, "it is answered")
        return connection.headers
