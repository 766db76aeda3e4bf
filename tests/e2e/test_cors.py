"""Pages of other origins: what they may read with `--cors-origins`, on every way to an answer; without it, nothing."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.servers import FakeServer, rows_request, start_fake_server, wait_until

pytestmark = pytest.mark.slow
PAGE, OTHER = "https://app.example", "https://elsewhere.example"
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
ALLOW = "access-control-allow-origin"


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "key"
    path.write_text("open sesame")
    return path


@pytest.fixture(scope="module")
def server(key_file: Path) -> Iterator[FakeServer]:
    origins = f"{PAGE},http://localhost:3000"
    with start_fake_server(cors_origins=origins, api_key_file=key_file) as server:
        yield server


def infer(client: httpx.Client, origin: str | None, key: str = "open sesame") -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} | ({"Origin": origin} if origin else {})
    return client.post("/v2/models/rows/infer", json=rows_request(1.0), headers=headers)


def test_a_browser_is_told_beforehand_what_it_may_ask(server: FakeServer) -> None:
    with server.client() as client:
        for path in ("/v2/models/rows/infer", "/predictions/images", "/stats"):
            asked = client.options(path, headers={"Origin": PAGE, **PREFLIGHT})  # without a key
            assert (asked.status_code, asked.headers[ALLOW]) == (200, PAGE)
            assert "POST" in asked.headers["access-control-allow-methods"]
            assert "authorization" in asked.headers["access-control-allow-headers"]
        refused = client.options("/v2/models/rows/infer", headers={"Origin": OTHER, **PREFLIGHT})
        assert (refused.status_code, refused.headers.get(ALLOW)) == (400, None)
        assert "--cors-origins" in refused.json()["error"]


def test_answers_say_which_page_may_read_them(server: FakeServer) -> None:
    with server.client() as client:
        answers = [infer(client, PAGE), infer(client, PAGE, "wrong"), client.get("/ping", headers={"Origin": PAGE})]
        answers.append(client.post("/nowhere", headers={"Origin": PAGE}))
        assert [answer.status_code for answer in answers] == [200, 401, 200, 401]
        for answer in answers:
            assert answer.headers.get_list(ALLOW) == [PAGE]
            assert answer.headers.get_list("vary") == ["Origin"]
            assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
            assert answer.headers["x-request-id"]
        for answer in (infer(client, OTHER), infer(client, None)):
            assert answer.status_code == 200
            assert ALLOW not in answer.headers
            assert answer.headers.get_list("vary") == ["Origin"]


def test_without_the_option_nothing_is_said_and_sighup_brings_it(tmp_path: Path) -> None:
    config = tmp_path / "convoy.yaml"
    config.write_text("")
    with start_fake_server(config=config) as server, server.client() as client:
        answer = infer(client, PAGE)
        assert (answer.status_code, answer.headers.get(ALLOW), answer.headers.get("vary")) == (200, None, None)
        assert client.options("/v2/models/rows/infer", headers={"Origin": PAGE, **PREFLIGHT}).status_code == 405
        config.write_text("cors_origins: ['*']")
        server.signal(signal.SIGHUP)
        wait_until(lambda: "read again: cors_origins" in server.log_so_far, "the log has it")
        assert infer(client, OTHER).headers[ALLOW] == "*"
        assert client.options("/v2/models/rows/infer", headers={"Origin": OTHER, **PREFLIGHT}).status_code == 200
