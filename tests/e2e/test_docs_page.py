"""`/docs` and `/openapi.json`: nothing from elsewhere, which secrets are for what, and examples that run."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urljoin

import httpx
import jsonschema
import pytest
import yaml

from tests.support.servers import Server, start_fake_server, start_server, wait_until

SHARED = Path("/dev/shm/convoy-example")
CHROMIUM = shutil.which("chromium")
# The demo's model has no class map to be answered with, and metrics are text of Prometheus' and the page of its own.
WITHOUT_EXAMPLE = {("/predictions/{model}", "image/png"), ("/predictions/{model}/{version}", "image/png")}
FOR_PEOPLE = {"/", "/metrics"}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    offered = ("--model-control", "explicit", "--load-model", "*", "--allow-shared-memory")
    with start_server("--host", "127.0.0.1", *offered) as running:
        yield running


@pytest.fixture(scope="module")
def document(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = server.get("/openapi.json").json()
    return found


class Example(NamedTuple):
    """One request and what is documented of its answer. `kind` is the body's, empty where it has none."""

    name: str
    method: str
    path: str
    kind: str
    body: dict[str, Any]
    operation: dict[str, Any]

    def answers(self) -> list[tuple[int, str, dict[str, Any] | None]]:
        """Status, content type and content with an example of this name; else the one answer without content."""
        responses = self.operation["responses"].items()
        named = [
            (int(status), kind, content)
            for status, response in responses
            for kind, content in response.get("content", {}).items()
            if self.name in content.get("examples", {})
        ]
        return named or [(int(status), "", None) for status, response in responses if "content" not in response]

    def send(self, client: httpx.Client) -> httpx.Response:
        values = {
            (one["in"], one["name"]): one["examples"][self.name]["value"]
            for one in self.operation.get("parameters", ())
            if self.name in one.get("examples", {})
        }
        for one in self.operation.get("parameters", ()):
            if one["in"] == "path" and one["name"] in self.path:  # a request of another name is about the same model
                values.setdefault(("path", one["name"]), one["examples"]["digits"]["value"])
        path = self.path.format(**{name: value for (place, name), value in values.items() if place == "path"})
        params = {name: value for (place, name), value in values.items() if place == "query"}
        return client.request(self.method, path, params=params, **(self._body(client) if self.kind else {}))

    def _body(self, client: httpx.Client) -> dict[str, Any]:
        headers = {"Content-Type": self.kind, **self.body.get("x-headers", {})}
        if self.kind == "application/json":
            return {"json": self.body["value"], "headers": headers}
        if "value" in self.body:
            return {"content": self.body["value"].encode(), "headers": headers}
        file = client.get("/" + self.body["externalValue"])
        assert file.status_code == 200
        if self.kind == "multipart/form-data":
            return {"files": {"file": ("image", file.content)}}
        return {"content": file.content, "headers": headers}


def examples_of(document: dict[str, Any]) -> Iterator[Example]:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            kinds = operation.get("requestBody", {}).get("content", {})
            for kind, content in kinds.items():
                for name, body in content["examples"].items():
                    yield Example(name, method, path, kind, body, operation)
            if not kinds:
                contents = [
                    one for response in operation["responses"].values() for one in response.get("content", {}).values()
                ]
                names = {name for content in contents for name in content.get("examples", {})}
                for name in sorted(names) or ["digits"]:
                    yield Example(name, method, path, "", {}, operation)


def in_order(examples: list[Example]) -> list[Example]:
    """What needs a model or a region before what takes them away."""
    return sorted(
        examples, key=lambda one: ("unload" in one.path, "unregister" in one.path, "register" not in one.path)
    )


def test_every_example_runs_and_is_answered_as_documented(server: Server, document: dict[str, Any]) -> None:
    found = in_order([one for one in examples_of(document) if one.path not in FOR_PEOPLE])
    assert len(found) > 70
    SHARED.write_bytes(bytes(4096))
    try:
        with server.client() as client:
            for one in found:
                ((status, kind, content),) = one.answers()
                reply = one.send(client)
                about = (one.name, one.method, one.path, one.kind, reply.text[:300])
                assert reply.status_code == status, about
                if content is None:
                    assert not reply.content, about
                    continue
                assert reply.headers["content-type"] == kind, about
                check(client, document, one.name, content, reply)
    finally:
        SHARED.unlink()


def check(
    client: httpx.Client, document: dict[str, Any], name: str, content: dict[str, Any], reply: httpx.Response
) -> None:
    """An answer and its example have the documented form; a refusal has the example's very words."""
    example = content["examples"][name]
    if "externalValue" in example:
        documented = client.get("/" + example["externalValue"]).content
        head = int(reply.headers["Inference-Header-Content-Length"])
        assert (reply.content[:head], len(reply.content)) == (documented[:head], len(documented))
        return
    schema = {**content["schema"], "components": document["components"]}
    for one in (reply.json(), example["value"]):
        jsonschema.validate(one, schema)
    if reply.status_code >= 400:
        assert reply.json() == example["value"]
    else:
        assert known_names(example["value"]) <= known_names(reply.json())


def known_names(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(known_names, value.values()))
    return set().union(*map(known_names, value)) if isinstance(value, list) else set()


def test_there_is_an_example_of_every_body_and_every_answer(document: dict[str, Any]) -> None:
    for path, operations in document["paths"].items():
        for operation in operations.values():
            contents = operation.get("requestBody", {}).get("content", {})
            assert all(content["examples"] for content in contents.values()), path
            for kind, content in operation["responses"].get("200", {}).get("content", {}).items():
                assert path in FOR_PEOPLE or (path, kind) in WITHOUT_EXAMPLE or content["examples"], (path, kind)


def test_the_page_names_no_other_host(server: Server) -> None:
    page = server.get("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    parts = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert {"docs/start.js", "docs/swagger-ui.css", "docs/swagger-ui-bundle.js"} <= set(parts)
    for part in parts:
        if not part.startswith("data:"):
            assert urljoin(str(page.url), part).startswith(server.url)
            assert server.get("/" + part).status_code == 200
    assert "//" not in page.text.replace("<!doctype html>", "")
    script, style = server.get("/docs/start.js").text, server.get("/docs/swagger-ui.css").text
    assert not re.findall(r"https?://", script)
    assert not [url for url in re.findall(r"url\(([^)]*)\)|@import", style) if not url.strip("\"'").startswith("data:")]
    policy = dict(rule.strip().partition(" ")[::2] for rule in page.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert server.get("/docs/nothing").status_code == server.get("/redoc").status_code == 404


@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's package chromium")
def test_a_browser_shows_every_route_without_a_word_of_its_policy(server: Server, document: dict[str, Any]) -> None:
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--enable-logging=stderr")
    seen = subprocess.run(
        [CHROMIUM, *flags, "--dump-dom", f"{server.url}/docs"],  # type: ignore[list-item]
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    said = [line for line in seen.stderr.splitlines() if "CONSOLE" in line]
    assert not [line for line in said if "Content Security Policy" in line or "violates" in line]
    shown = {path.replace("​", "") for path in re.findall(r'data-path="([^"]+)"', seen.stdout)}
    assert shown == set(document["paths"])


def test_behind_keys_the_page_is_open_and_says_what_they_are_for(tmp_path: Path) -> None:
    key, token = tmp_path / "key", tmp_path / "token"
    key.write_text("open sesame")
    token.write_text("abracadabra")
    files = {"api_key_file": key, "admin_token_file": token}
    with start_fake_server(**files, max_inflight_mb=256) as server:
        assert {server.get(path).status_code for path in ("/", "/docs", "/docs/start.js", "/openapi.json")} == {200}
        assert {
            server.get(path).status_code for path in ("/stats", "/store", "/metrics", "/docs/a/b", "/index.html")
        } == {401}
        document = server.get("/openapi.json").json()
    schemes = document["components"]["securitySchemes"]
    assert {name: (one["type"], one["scheme"]) for name, one in schemes.items()} == dict.fromkeys(
        ("apiKey", "adminToken"), ("http", "bearer")
    )
    for path, operations in document["paths"].items():
        for operation in operations.values():
            is_open = path.endswith("/ready") or path in ("/", "/ping", "/v2/health/live")
            is_admins = path in ("/v2/repository/models/{model}/load", "/v2/repository/models/{model}/unload")
            wanted = [] if is_open else [{"adminToken" if is_admins else "apiKey": []}]
            assert operation["security"] == wanted, path


def test_the_document_follows_the_keys(tmp_path: Path) -> None:
    key, file = tmp_path / "key", tmp_path / "convoy.yaml"
    key.write_text("open sesame")
    file.write_text("{}")
    with start_fake_server(config=file) as server:
        document = server.get("/openapi.json").json()
        assert "securitySchemes" not in document["components"]
        assert {len(one["security"]) for verbs in document["paths"].values() for one in verbs.values()} == {0}
        file.write_text(yaml.safe_dump({"keys": {"team-a": str(key)}}))
        server.signal(signal.SIGHUP)
        wait_until(lambda: "securitySchemes" in server.get("/openapi.json").json()["components"], "it says so")
