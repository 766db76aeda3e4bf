"""An S3 that is moto's, on this machine: uploaded to by boto3, which is not the library under test."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import httpx
from botocore.config import Config
from moto.server import ThreadedMotoServer

from tests.support.played_http import Asked

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
        self._behind = store.env["AWS_ENDPOINT_URL"]

    def answer(self, asked: Asked) -> tuple[int, dict[str, str], bytes]:
        if self.closed_for and self.closed_for in asked.path:
            self.refused += 1
            body = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>closed</Message></Error>"
            return 403, {}, body
        headers = {name: value for name, value in asked.headers.items() if name.lower() != "host"}
        found = httpx.get(f"{self._behind}{asked.path}", headers=headers, trust_env=False, verify=False)
        kept = {name: found.headers[name] for name in ("etag", "last-modified") if name in found.headers}
        return found.status_code, kept, found.content
