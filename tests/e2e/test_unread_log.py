"""A log that nobody reads: the server answers as before, drops what does not fit, and says so when it is read again."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from tests.support.servers import STOP_S, Server, metric, wait_until
from tests.support.stores import ROOT

pytestmark = pytest.mark.slow
CALLS = 600
# Lines so long that what waits for a reader is soon more than may wait.
LONG_PATH = "/v2/models/" + "x" * 12_000


class Unread(Server):
    """`convoy serve`, whose outputs are one pipe that nobody reads before `read_on`."""

    def __init__(self, process: subprocess.Popen[bytes], address: Path) -> None:
        super().__init__(process, address)
        self.port = int(address.read_text().rpartition(":")[2])
        self.read = bytearray()
        self.reader = threading.Thread(target=self._read_all, args=[process.stdout], daemon=True)

    @property
    def log_so_far(self) -> str:
        return self.read.decode(errors="replace")

    def _read_all(self, pipe: IO[bytes]) -> None:
        while data := os.read(pipe.fileno(), 1 << 20):
            self.read += data

    def dropped(self) -> float:
        return metric(self, "convoy_log_lines_dropped_total")


@contextmanager
def unread(folder: Path, *options: str) -> Iterator[Unread]:
    address = folder / "address"
    called = ["-m", "convoy", "serve", "--port", "0", "--grpc-port", "0", "--access-log", "all", "--engine", "cpu"]
    line = [sys.executable, *called, "--address-file", str(address), *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CONVOY_")}
    with subprocess.Popen(
        line, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            wait_until(lambda: address.exists() or process.poll() is not None, "it listens")
            server = Unread(process, address)
            server.await_ready()
            yield server
            server.signal()
            assert server.wait() == 0
            if server.reader.is_alive():
                server.reader.join(STOP_S)
        finally:
            process.kill()


def flood(server: Unread) -> None:
    with server.client() as client:
        for _ in range(CALLS):
            assert client.get(LONG_PATH).status_code == 404
    assert server.is_ready()


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_pipe_that_nobody_reads_stops_nothing_and_tells_what_is_missing(tmp_path: Path, form: str) -> None:
    with unread(tmp_path, "--log-format", form) as server:
        flood(server)
        dropped = server.dropped()
        assert dropped > 0
        server.reader.start()
        wait_until(lambda: "log lines were dropped here" in server.log_so_far, "it says what is missing")
        for number in range(50):
            server.get(f"/v2/models/after-{number}")
        wait_until(lambda: "/v2/models/after-49 " in server.log_so_far, "the log goes on")
    log = server.log_so_far
    lines = log.splitlines()
    told = [int(count) for count in re.findall(r"(\d+) log lines were dropped here", log)]
    kept = sum(LONG_PATH in line for line in lines)
    assert sum(told) >= dropped
    assert kept + sum(told) >= CALLS, "each call has its line or is counted"
    assert "all accepted requests were answered" in log
    if form == "json":
        told_of = [json.loads(line) for line in lines]
        assert not any("request_id" in line for line in told_of if "were dropped here" in line["message"])


def test_a_pipe_that_is_never_read_holds_up_no_end(tmp_path: Path) -> None:
    with unread(tmp_path) as server:
        flood(server)


def test_a_reader_that_has_gone_stops_nothing(tmp_path: Path) -> None:
    with unread(tmp_path) as server:
        server.process.stdout.close()
        for _ in range(20):
            assert server.get("/v2/models/nobody").status_code == 404
        wait_until(lambda: server.dropped() > 0, "what cannot be written is counted")
