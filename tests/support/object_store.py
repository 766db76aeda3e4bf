"""An S3 that is moto's, on this machine: uploaded to by boto3, which is not the library under test."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import boto3
import httpx
from botocore.config import Config
from moto.server import ThreadedMotoServer

BUCKET = "models"
URL = f"s3://{BUCKET}/store"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}


class ObjectStore:
    """One bucket. `env` is what a server needs to find it."""

    def __init__(self, server: ThreadedMotoServer) -> None:
        self._server = server
        host, port = server.get_host_and_port()
        self.env = {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_EC2_METADATA_DISABLED": "true"}
        self.env["AWS_MAX_ATTEMPTS"] = "1"  # who is not there is missed at once
        self._client: Any = boto3.client(
            "s3",
            endpoint_url=self.env["AWS_ENDPOINT_URL"],
            aws_access_key_id="somebody",
            aws_secret_access_key="secret",
            region_name="us-east-1",
            config=Config(proxies={}),
        )
        # All of moto's servers in one process share what is in them.
        httpx.post(f"{self.env['AWS_ENDPOINT_URL']}/moto-api/reset", trust_env=False, verify=False).raise_for_status()
        self._client.create_bucket(Bucket=BUCKET)

    def put(self, key: str, content: bytes) -> None:
        self._client.put_object(Bucket=BUCKET, Key=f"store/{key}", Body=content)

    def upload(self, folder: Path, prefix: str) -> None:
        """Every file of a folder, the manifest first, so that nothing can be told from its being there."""
        files = [path for path in folder.rglob("*") if path.is_file()]
        for path in sorted(files, key=lambda path: path.name != "manifest.json"):
            self.put("/".join(filter(None, (prefix, path.relative_to(folder).as_posix()))), path.read_bytes())

    def remove(self, prefix: str) -> None:
        for one in self._client.list_objects_v2(Bucket=BUCKET, Prefix=f"store/{prefix}").get("Contents", ()):
            self._client.delete_object(Bucket=BUCKET, Key=one["Key"])

    def stop(self) -> None:
        """Nobody answers there any more."""
        self._server.stop()


@contextmanager
def start_object_store() -> Iterator[ObjectStore]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    store = ObjectStore(server)
    try:
        yield store
    finally:
        store.stop()


class Gate:
    """Between a server and an object store; what a closed gate finds in a path is answered with no access.

    `refused` counts these answers.
    """

    def __init__(self, store: ObjectStore) -> None:
        self.closed_for, self.refused = "", 0
        gate, behind = self, store.env["AWS_ENDPOINT_URL"]

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if gate.closed_for and gate.closed_for in self.path:
                    gate.refused += 1
                    body = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>closed</Message></Error>"
                    self._answer(403, {}, body)
                    return
                headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
                found = httpx.get(f"{behind}{self.path}", headers=headers, trust_env=False, verify=False)
                kept = {name: found.headers[name] for name in ("etag", "last-modified") if name in found.headers}
                self._answer(found.status_code, kept, found.content)

            def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *about: object) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=self._server.serve_forever, daemon=True).start()
        self.env = {**store.env, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.server_address[1]}"}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
