from __future__ import annotations

import io
import json
from unittest.mock import Mock

import httpx
import pytest
from rich.console import Console

from convoy.app.client import http_wire
from convoy.app.client.client import Client
from convoy.app.client.options import whole_url
from convoy.app.commands.predict import predict
from convoy.models.errors import JobError, UsageError

INDEX = [
    {"name": "digits", "version": "1", "state": "READY"},
    {"name": "broken", "version": "1", "state": "UNAVAILABLE", "reason": "broken"},
]
TIMING = {"decode_wait": 0, "decode": 0.1, "queue": 0.2, "compute": 0.3, "total": 0.7}


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
        answer = {"model": "digits", "version": "1", "predictions": found[:top_k], "timing_ms": TIMING}
        return httpx.Response(200, json=answer)


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def ask(server, monkeypatch):
    """Calls predict; gives the exit code and what was printed, errors last."""
    real = httpx.Client

    def mocked(**options):
        return real(transport=httpx.MockTransport(server), **options)

    monkeypatch.setattr(http_wire.httpx, "Client", mocked)

    def ask(*images, model="digits", top_k=5, key=None, as_json=False, stdin=b""):
        console, errors = Console(file=io.StringIO(), width=200), Console(file=io.StringIO(), width=200)
        with Client("http://host:8000", api_key=key, retries=0) as client:
            given = [str(image) for image in images]
            files = {"console": console, "errors": errors, "stdin": io.BytesIO(stdin)}
            code = predict(client, model, given, top_k, as_json=as_json, **files)
        return code, console.file.getvalue() + errors.file.getvalue()

    return ask


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "seven.png"
    path.write_bytes(b"\x89PNG...")
    return path


@pytest.mark.parametrize(
    ("given", "whole"),
    [
        ("localhost", "http://localhost:8000"),
        ("models.example:80/prefix", "http://models.example:80/prefix"),
        ("[::1]", "http://[::1]:8000"),
        ("http://localhost", "http://localhost"),
        ("HTTPS://models.example", "https://models.example"),
        ("grpc://localhost", "grpc://localhost"),
    ],
)
def test_a_url_may_leave_out_its_scheme(given, whole):
    assert whole_url(given) == whole


def test_labels_and_scores_stand_in_one_table(ask, server, image):
    code, printed = ask(image, image)
    assert code == 0
    assert printed.count("seven ") >= 2
    assert "0.9800" in printed
    assert "None" not in printed
    assert [request.content for request in server.asked] == [b"\x89PNG..."] * 2
    assert "0.0200" not in ask(image, top_k=1, key="secret")[1]
    assert server.asked[-1].url.params["top_k"] == "1"
    assert server.asked[-1].headers["authorization"] == "Bearer secret"


def test_one_bad_image_does_not_stop_the_others(ask, image, tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    code, printed = ask(text, tmp_path / "missing.png", image)
    assert code == 1
    assert "0.9800" in printed
    assert f"{text}: the body is not an image; send a JPEG or PNG" in printed
    assert f"cannot read {tmp_path}/missing.png: No such file or directory; check the file" in printed


def test_an_unknown_model_names_those_that_are_ready_and_a_wrong_key_says_how_to_give_it(ask, image):
    with pytest.raises(JobError, match=r"unknown model.*; available: digits$"):
        ask(image, model="cats")
    with pytest.raises(JobError, match="--api-key-file or CONVOY_API_KEY_FILE"):
        ask(image, key="wrong")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (httpx.ConnectError("refused"), "start it with `convoy serve`"),
        (httpx.ReadTimeout("slow"), "did not answer within"),
        (httpx.RemoteProtocolError("Server disconnected"), "was closed"),
    ],
)
def test_a_server_that_is_not_there_ends_the_job(ask, image, server, monkeypatch, error, words):
    monkeypatch.setattr(Server, "__call__", Mock(side_effect=error))
    with pytest.raises(JobError, match=words):
        ask(image)


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", json.dumps({"predictions": [{"class_id": None}]}).encode()])
def test_an_answer_that_is_none_is_said(ask, image, monkeypatch, body):
    monkeypatch.setattr(Server, "__call__", lambda self, request: httpx.Response(200, content=body))
    code, printed = ask(image)
    assert code == 1
    assert "the response is not" in printed
    assert "is it a Convoy server?" in printed


def test_folders_patterns_and_stdin_name_images(ask, server, image, tmp_path):
    deep = tmp_path / "more" / "deep"
    deep.mkdir(parents=True)
    (deep / "eight.PNG").write_bytes(b"\x89PNG8")
    (deep / "notes.txt").write_text("not asked for")
    code, printed = ask(tmp_path / "more", tmp_path / "*.png", "-", stdin=b"\x89PNG-")
    assert code == 0
    # Several are asked at a time, so that only what is printed has the order in which they were named.
    assert sorted(request.content for request in server.asked) == sorted([b"\x89PNG8", b"\x89PNG...", b"\x89PNG-"])
    assert printed.index("eight.PNG") < printed.index("seven.png") < printed.index("stdin")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="contains no images"):
        ask(tmp_path / "empty")
    with pytest.raises(UsageError, match="matches no image"):
        ask(tmp_path / "*.jpg")


def test_lines_of_json_are_for_programs(ask, image, tmp_path):
    code, printed = ask(image, tmp_path / "missing.png", top_k=1, as_json=True)
    lines = [json.loads(line) for line in printed.splitlines()[:2]]
    assert code == 1
    assert lines[0] == {
        "image": str(image),
        "model": "digits",
        "version": "1",
        "predictions": [{"class_id": 7, "label": "seven", "score": 0.98}],
        "timing_ms": TIMING,
    }
    assert list(lines[1]) == ["image", "error"]
    assert "cannot read" in lines[1]["error"]


@pytest.mark.parametrize(
    ("images", "options", "words"),
    [
        ([], {}, "at least one image"),
        (["a.png"], {"top_k": 0}, "--top-k"),
        (["-", "-"], {}, "pass it once"),
        (["a.png"], {"key": "schlüssel"}, "API key"),
    ],
)
def test_a_wrong_call_is_named(ask, images, options, words):
    with pytest.raises(UsageError, match=words):
        ask(*images, **options)


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"Authorization": "Bearer x"}, "the client sets the header 'authorization' itself; pass a key in `api_key`"),
        ({"Content-Length": "3"}, "the header 'content-length' itself"),
        ({"x-trace-bin": "a"}, "the header 'x-trace-bin' itself"),
        ({"x id": "a"}, "'x id' may only have letters"),
        ({"x-id": "a\r\nb: c"}, "'x-id' may only have printable ASCII"),
    ],
)
@pytest.mark.parametrize("url", ["http://host:8000", "grpc://host:8001"])
def test_headers_that_are_not_the_callers_to_say_are_refused(url, headers, words):
    with pytest.raises(UsageError, match=words):
        Client(url, headers=headers)
    with Client(url, headers=lambda: headers, retries=0) as client, pytest.raises(UsageError, match=words):
        client.models()
