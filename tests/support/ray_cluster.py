"""A Ray cluster on this machine for a test: raylets, HAProxy and replicas, none of which outlives the test."""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from convoy.loadtest.peers.replica.serve import FAST, cluster_environment
from convoy.loadtest.peers.servers import MARK, ProcessTree
from tests.support.servers import free_port, wait_until
from tests.support.stores import ROOT

# HAProxy can send again only what had come whole before it passed anything on. Ray has no variable for that option; it
# writes this one's value into HAProxy's file as it is, under `defaults`.
WHOLE_BODIES = {
    "RAY_SERVE_HAPROXY_RETRY_ON": f"{FAST['RAY_SERVE_HAPROXY_RETRY_ON']}\n    option http-buffer-request",
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(1 << 20),
}


class RayCluster:
    """A running cluster, and what was written on its standard error."""

    def __init__(self, process: subprocess.Popen[str], port: int, folder: Path, tree: ProcessTree) -> None:
        self._process, self.port, self.folder, self._tree = process, port, folder, tree
        self._answer(120.0)

    def do(self, name: str, *arguments: Any) -> Any:
        """What `tests.support.ray_side` gives for it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self._process.stdin.flush()
        return self._answer(180.0)

    def deploy(self, route_prefix: str = "/", **arguments: Any) -> None:
        self.do("deploy", {"engine": "cpu", **arguments}, route_prefix)

    def client(self, prefix: str = "") -> httpx.Client:
        """Of the application under this prefix."""
        return httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}{prefix}", trust_env=False, verify=False, timeout=60.0
        )

    def replicas(self) -> list[psutil.Process]:
        return [one for one in self._tree.members() if _title(one).startswith("ray::ServeReplica")]

    def ways(self, replicas: int) -> Counter[str]:
        """How requests came in, over so many replicas; each says it only where Ray's proxy leads to it."""
        found: dict[str, Counter[str]] = {}
        deadline = time.monotonic() + 60
        while len(found) < replicas:
            assert time.monotonic() < deadline, f"{len(found)} of {replicas} replicas were heard"
            # A connection each, so that the proxy chooses anew.
            with self.client() as client:
                text = client.get("/metrics").text
            families = {one.name: one for one in text_string_to_metric_families(text)}
            (own,) = families["convoy_ray_replica"].samples
            samples = families["convoy_ray_requests"].samples
            found[own.labels["replica"]] = Counter(
                {one.labels["way"]: int(one.value) for one in samples if one.name.endswith("_total")}
            )
        return sum(found.values(), Counter[str]())

    def logs(self) -> str:
        """What the replicas have written."""
        return "\n".join(
            path.read_text(errors="replace") for path in sorted(self.folder.glob("ray/session_2*/logs/worker-*.err"))
        )

    def _answer(self, within_s: float) -> Any:
        assert self._process.stdout is not None
        is_there, _, _ = select.select([self._process.stdout], [], [], within_s)
        line = self._process.stdout.readline() if is_there else ""
        told = (self.folder / "stderr").read_text(errors="replace")[-6000:]
        assert line, f"Ray's side has ended, or says nothing for {within_s:g} s:\n{told}"
        found, error = json.loads(line)
        assert error is None, error
        return found


class Crowd:
    """Clients that ask all the time, each on a connection of its own; `failed` are the answers that were none."""

    def __init__(self, port: int, path: str, body: bytes, headers: dict[str, str], clients: int) -> None:
        self.answered, self.failed = 0, list[str]()
        lines = {"Host": "127.0.0.1", "Content-Length": str(len(body)), **headers}
        start = f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._port, self._request = port, start.encode() + b"\r\n" + body
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(clients)]

    def __enter__(self) -> Crowd:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(60)

    def after(self, count: int) -> None:
        """Return when so many more have been answered."""
        wanted = self.answered + count
        wait_until(lambda: self.answered >= wanted, f"{count} more are answered", 60)

    def _ask(self) -> None:
        connection: socket.socket | None = None
        while not self._is_over.is_set():
            problem = None
            try:
                if connection is None:
                    connection = socket.create_connection(("127.0.0.1", self._port), timeout=60)
                # In one piece, as much as the kernel takes: what has come whole can be sent again by a proxy.
                connection.sendall(self._request)
                reply = HTTPResponse(connection, method="POST")
                reply.begin()
                text = reply.read()
                if reply.status != 200:
                    problem = f"{reply.status} {text[:200]!r}"
                if reply.will_close:
                    connection.close()
                    connection = None
            except (OSError, HTTPException) as error:
                problem = repr(error)
                if connection is not None:
                    connection.close()
                connection = None
            with self._lock:
                if problem is None:
                    self.answered += 1
                else:
                    self.failed.append(problem)
        if connection is not None:
            connection.close()


def _title(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


@contextmanager
def ray_cluster(
    env: dict[str, str],
    *,
    nodes: int = 1,
    cpus: float = 4,
    runtime_env: dict[str, Any] | None = None,
    dashboard_port: int = 0,
) -> Iterator[RayCluster]:
    """So many raylets; `env` is that of every node. Ends all of it, whatever happens."""
    tree, port = ProcessTree(uuid.uuid4().hex), free_port()
    # A short path: Ray puts sockets into it, whose names have a limit.
    folder = Path(tempfile.mkdtemp(prefix="cr", dir="/tmp"))
    # Nothing of this process's own that Ray or Convoy would read.
    own = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "CONVOY_"))}
    own |= {MARK: tree.mark, **cluster_environment(folder), "RAY_SERVE_LOG_TO_STDERR": "1", **env}
    own["PYTHONPATH"] = str(ROOT)
    orders = json.dumps([nodes, cpus, port, runtime_env or {}, dashboard_port])
    with (folder / "stderr").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.ray_side", orders],
            cwd=folder,
            env=own,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        yield RayCluster(process, port, folder, tree)
    finally:
        tree.end()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        shutil.rmtree(folder, ignore_errors=True)
