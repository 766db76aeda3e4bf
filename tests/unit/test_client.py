from __future__ import annotations

import io
import json

import httpx
import pytest
from rich.console import Console

from convoy.app.commands import predict as client
from convoy.models.errors import JobError, UsageError

INDEX = [
    {"name": "digits", "version": "1", "state": "READY"},
    {"name": "broken", "version": "1", "state": "UNAVAILABLE", "reason": "broken"},
]


class Server:
    """Answers as Convoy does; remembers the requests."""

    def __init__(self) -> None:
        self.asked: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        if request.url.path == "/v2/repository/index":
            return httpx.Response(200, json=INDEX)
        if request.url.path != "/predictions/digits":
            return httpx.Response(404, json={"error": "Request for unknown model: 'x' is not found"})
        if request.headers.get("authorization") == "Bearer wrong":
            return httpx.Response(401, json={"error": "the API key is wrong"})
        if not request.content.startswith(b"\x89PNG"):
            return httpx.Response(400, json={"error": "the body is not an image; send a JPEG or PNG"})
        found = [{"class_id": 7, "label": "seven", "score": 0.98}, {"class_id": 1, "label": None, "score": 0.02}]
        top_k = int(request.url.params["top_k"])
        return httpx.Response(200, json={"model": "digits", "version": "1", "predictions": found[:top_k]})


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def ask(server, monkeypatch):
    """Calls predict; gives the exit code and what was printed, errors last."""
    real = httpx.Client

    def mocked(**options):
        return real(transport=httpx.MockTransport(server), **options)

    monkeypatch.setattr(client.httpx, "Client", mocked)

    def ask(*images, model="digits", top_k=5, key=None):
        console, errors = Console(file=io.StringIO(), width=200), Console(file=io.StringIO(), width=200)
        code = client.predict("http://host:8000", model, images, top_k, key, console, errors)
        return code, console.file.getvalue() + errors.file.getvalue()

    return ask


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "seven.png"
    path.write_bytes(b"\x89PNG...")
    return path


def test_labels_and_scores_stand_in_one_table(ask, server, image):
    code, printed = ask(image, image)
    assert code == 0
    assert printed.count("seven ") >= 2
    assert "0.9800" in printed
    assert "None" not in printed
    assert [request.content for request in server.asked] == [b"\x89PNG..."] * 2


def test_top_k_and_key_reach_the_server(ask, server, image):
    _, printed = ask(image, top_k=1, key="secret")
    assert "0.0200" not in printed
    assert server.asked[0].url.params["top_k"] == "1"
    assert server.asked[0].headers["authorization"] == "Bearer secret"


def test_one_bad_image_does_not_stop_the_others(ask, image, tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    code, printed = ask(text, tmp_path / "missing.png", image)
    assert code == 1
    assert "0.9800" in printed
    assert f"{text}: the body is not an image; send a JPEG or PNG" in printed
    assert "missing.png: cannot be read (No such file or directory)" in printed


def test_an_unknown_model_names_those_that_are_ready(ask, image):
    with pytest.raises(JobError, match=r"unknown model.*the server has digits$"):
        ask(image, model="cats")


def test_a_wrong_key_says_how_to_give_it(ask, image):
    with pytest.raises(JobError, match="--api-key-file or CONVOY_API_KEY_FILE"):
        ask(image, key="wrong")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (httpx.ConnectError("refused"), "start it with `convoy serve`"),
        (httpx.ReadTimeout("slow"), "did not answer within"),
        (httpx.RemoteProtocolError("Server disconnected"), "broke off"),
    ],
)
def test_a_server_that_is_not_there_ends_the_job(ask, image, server, monkeypatch, error, words):
    def fail(request):
        raise error

    monkeypatch.setattr(Server, "__call__", lambda self, request: fail(request))
    with pytest.raises(JobError, match=words):
        ask(image)


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", json.dumps({"predictions": [{"class_id": None}]}).encode()])
def test_an_answer_that_is_none_is_said(ask, image, monkeypatch, body):
    monkeypatch.setattr(Server, "__call__", lambda self, request: httpx.Response(200, content=body))
    code, printed = ask(image)
    assert code == 1
    assert "the answer is not a prediction" in printed


def test_a_wrong_call_is_named(image):
    with pytest.raises(UsageError, match="at least one image"):
        client.predict("http://host", "digits", [], 5, None)
    with pytest.raises(UsageError, match="--top-k"):
        client.predict("http://host", "digits", [image], 0, None)
    with pytest.raises(UsageError, match="should look like"):
        client.predict("localhost:8000", "digits", [image], 5, None)
    with pytest.raises(UsageError, match="API key"):
        client.predict("http://host", "digits", [image], 5, "schlüssel")
