"""`convoy.Client` and `convoy.AsyncClient` against a real server: its answers, its errors, and when to come back."""

from __future__ import annotations

import asyncio
import io
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from PIL import Image
from tritonclient.grpc import service_pb2_grpc

import convoy
from convoy.app.client.standalone.__main__ import write_project
from convoy.models.errors import (
    DeadlineExceeded,
    ImageError,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unauthorized,
    Unavailable,
    UsageError,
)
from tests.support.grpc_calls import answering
from tests.support.played_http import Asked, playing
from tests.support.servers import Server, start_server
from tests.support.stores import DATA, StoreFolder

SEVEN = DATA / "seven.png"


@pytest.fixture(scope="module")
def server(shared_store: StoreFolder) -> Iterator[Server]:
    shared_store.add_digits()
    shared_store.add_shift(1.0, 1)
    shared_store.add_shift(2.0, 2)
    with start_server("--version-policy", "all", store=shared_store.root) as running:
        yield running


@pytest.fixture(scope="module")
def engine() -> Iterator[convoy.Engine]:
    with convoy.Engine(engine="cpu") as engine:
        yield engine


@pytest.fixture(params=["http", "grpc"])
def url(request: pytest.FixtureRequest, server: Server) -> str:
    return url_of(server, request.param)


def url_of(server: Server, wire: str) -> str:
    return server.url if wire == "http" else f"grpc://{server.grpc_address}"


@pytest.fixture
def client(url: str) -> Iterator[convoy.Client]:
    with convoy.Client(url, timeout_s=30.0) as client:
        yield client


def test_an_image_is_whatever_a_program_has(server: Server, client: convoy.Client) -> None:
    told = server.post("/predictions/digits", content=SEVEN.read_bytes()).json()
    opened = Image.open(SEVEN)
    for image in (SEVEN, str(SEVEN), SEVEN.read_bytes(), opened, np.asarray(opened.convert("RGB"))):
        found = client.predict("digits", image)
        assert (found.model, found.version, found.error) == ("digits", 1, None)
        assert [one.label for one in found.predictions] == [row["label"] for row in told["predictions"]]
        scores = [one.score for one in found.predictions]
        assert scores == pytest.approx([row["score"] for row in told["predictions"]], abs=1e-6)
        assert found.timing_ms is not None
        assert found.timing_ms.total > 0
    assert len(client.predict("digits", SEVEN, top_k=2).predictions) == 2
    assert [one.label for one in client.predict("digits", SEVEN, threshold=0.5).predictions] == ["7"]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "I"])
def test_pixels_of_every_kind_give_what_the_engine_in_a_program_gives(
    client: convoy.Client, engine: convoy.Engine, mode: str
) -> None:
    grey = Image.open(SEVEN).convert("L").resize((40, 33))
    image = Image.fromarray(np.asarray(grey).astype(np.uint16) * 256) if mode == "I;16" else grey.convert(mode)
    assert image.mode == mode
    here = engine.predict("digits", image)
    there = client.predict("digits", image)
    assert there.best.label == here.best.label
    assert there.best.score == pytest.approx(here.best.score, abs=1e-6)


def test_an_image_that_lies_on_its_side_is_turned(client: convoy.Client) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    Image.open(SEVEN).convert("RGB").rotate(90, expand=True).save(file, "PNG", exif=exif)
    assert client.predict("digits", Image.open(file)).best.label == client.predict("digits", SEVEN).best.label


def test_several_images_have_an_answer_or_an_error_each(client: convoy.Client) -> None:
    images = [SEVEN, b"no image", "missing.png", *[SEVEN] * 20]
    found = client.predict("digits", images, top_k=1)
    assert [one.best.label for one in (found[0], *found[3:])] == ["7"] * 21
    assert isinstance(found[1].error, InvalidRequest)
    assert isinstance(found[2].error, ImageError)
    with pytest.raises(ImageError, match=r"cannot read missing\.png"):
        client.predict("digits", "missing.png")


def test_tensors_go_in_and_come_out_by_name(client: convoy.Client) -> None:
    batch = np.stack([np.asarray(Image.open(SEVEN).convert("RGB").resize((32, 32)))] * 3)
    (logits,) = client.infer("digits", {"images": batch}).values()
    assert logits.shape == (3, 10)
    assert logits.argmax(axis=1).tolist() == [7] * 3
    values = np.array([[1.0, 2.0, np.inf, 4.0], [np.nan, 2.0, 3.0, 4.0]], np.float32)
    for version, shift in ((1, 1.0), (2, 2.0), (None, 2.0)):
        (found,) = client.infer("shift", {"x": values}, version=version, priority=1).values()
        np.testing.assert_array_equal(found, values + shift)
        found[:] = 0  # it is the caller's
    with pytest.raises(InvalidRequest, match="value"):
        client.infer("shift", {"value": values})
    with pytest.raises(InvalidRequest, match="must be arrays by name"):
        client.infer("shift", values)  # type: ignore[arg-type]


def test_it_knows_what_is_served(client: convoy.Client) -> None:
    assert [(one.name, one.version) for one in client.models() if one.is_ready] == [
        ("digits", 1),
        ("shift", 1),
        ("shift", 2),
    ]
    with pytest.raises(NotFound, match="unknown model"):
        client.predict("cats", SEVEN)


def test_the_async_client_gets_the_same(url: str) -> None:
    async def main() -> None:
        async with convoy.AsyncClient(url) as client:
            one, several, tensors, models = await asyncio.gather(
                client.predict("digits", SEVEN),
                client.predict("digits", [SEVEN, b"no image"]),
                client.infer("shift", {"x": np.zeros((1, 4), np.float32)}),
                client.models(),
            )
            assert one.best.label == several[0].best.label == "7"
            assert isinstance(several[1].error, InvalidRequest)
            assert next(iter(tensors.values())).tolist() == [[2.0] * 4]
            assert len(models) == 3
            with pytest.raises(NotFound):
                await client.predict("cats", SEVEN)

    asyncio.run(main())


def test_threads_share_one_client(client: convoy.Client) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: client.predict("digits", SEVEN, top_k=1).best.label, range(64)))
    assert found == ["7"] * 64


def test_a_key_is_asked_for_and_given(locked: Server) -> None:
    for wire in ("http", "grpc"):
        with convoy.Client(url_of(locked, wire)) as client, pytest.raises(Unauthorized):
            client.predict("digits", SEVEN)
        with convoy.Client(url_of(locked, wire), api_key="open sesame") as client:
            assert client.predict("digits", SEVEN).best.label == "7"
        with convoy.Client(url_of(locked, wire), api_key="open sesame\n") as client:  # as read from a file
            assert client.predict("digits", SEVEN).best.label == "7"
        for broken in ("open\nsesame", "séсret"):
            with pytest.raises(UsageError, match="API key has characters") as caught:
                convoy.Client(url_of(locked, wire), api_key=broken)
            assert "sesame" not in str(caught.value)


@pytest.mark.parametrize("wire", ["http", "grpc"])
def test_a_port_without_a_server_is_reported(wire: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"{wire}://127.0.0.1:{taken.getsockname()[1]}"
        with convoy.Client(url, retries=1) as client, pytest.raises(Unavailable, match="cannot connect to"):
            client.predict("digits", SEVEN)


class Refusing:
    """Answers with what it is given, one after the other, and remembers what was asked and when."""

    def __init__(self, *answers: tuple[int, dict[str, str]]) -> None:
        self.asked: list[tuple[float, str]] = []
        self._answers = iter(answers)

    def answer(self, asked: Asked) -> tuple[int, dict[str, str], bytes]:
        self.asked.append((time.monotonic(), asked.path))
        status, headers = next(self._answers)
        return status, headers, b"" if status > 500 else b'{"error":"retry later"}'


def test_it_comes_back_after_what_the_server_says_and_no_sooner() -> None:
    busy = Refusing((429, {"Retry-After": "1"}), (503, {}), (400, {}))
    with (
        playing(busy.answer) as url,
        convoy.Client(url) as client,
        pytest.raises(InvalidRequest, match="retry later"),
    ):
        client.predict("digits", b"image")
    (first, path), (second, _), _ = busy.asked
    assert second - first >= 1.0
    assert "timeout_ms=60000" in path


def test_a_page_of_another_server_is_no_answer() -> None:
    with (
        playing(Refusing((502, {})).answer) as url,
        convoy.Client(url) as client,
        pytest.raises(convoy.RequestError, match="HTTP 502 without an explanation"),
    ):
        client.models()


class RefusingService(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Ends each call as it is told, one after the other, and remembers when it was called and the time left."""

    def __init__(self, *ends: tuple[grpc.StatusCode, dict[str, str]]) -> None:
        self.asked: list[tuple[float, float]] = []
        self._ends = iter(ends)

    def ModelInfer(self, request: Any, context: grpc.ServicerContext) -> None:  # noqa: N802 - the stubs' name
        self.asked.append((time.monotonic(), context.time_remaining()))
        code, trailer = next(self._ends)
        context.set_trailing_metadata((("x-request-id", "1"), *trailer.items()))
        context.abort(code, "retry later")


BUSY, AWAY, WRONG = (
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.INVALID_ARGUMENT,
)


def test_over_grpc_it_comes_back_after_what_the_server_says() -> None:
    service = RefusingService((BUSY, {"grpc-retry-pushback-ms": "600"}), (AWAY, {"retry-after": "1"}), (WRONG, {}))
    with (
        answering(service) as address,
        convoy.Client(f"grpc://{address}") as client,
        pytest.raises(InvalidRequest, match="later"),
    ):
        client.predict("digits", b"image")
    (first, left_s), (second, _), (third, _) = service.asked
    assert second - first >= 0.6
    assert third - second >= 1.0
    assert 0 < left_s < 61  # by the library's clocks, of which there are two


@pytest.mark.parametrize("pushback", ["-1", "no number", "6000"])
def test_over_grpc_a_wait_beyond_the_timeout_is_not_retried(pushback: str) -> None:
    service = RefusingService((BUSY, {"grpc-retry-pushback-ms": pushback}))
    with (
        answering(service) as address,
        convoy.Client(f"grpc://{address}", timeout_s=5.0) as client,
        pytest.raises(Overloaded),
    ):
        client.predict("digits", b"image")
    assert len(service.asked) == 1


def test_over_grpc_errors_are_those_of_http(url: str) -> None:
    """Asked of the server itself: the words, the kinds and the codes agree, whichever wire brings them."""
    with convoy.Client(url, retries=0) as client:
        for ask, kind, words, code in (
            (lambda: client.predict("digits", b"no image"), ImageError, "not an image", "invalid_image"),
            (lambda: client.predict("digits", SEVEN, top_k=0), InvalidRequest, "top_k must be", "invalid_request"),
            (lambda: client.predict("digits", SEVEN, threshold=9), InvalidRequest, "threshold must", "invalid_request"),
            (lambda: client.predict("shift", SEVEN), InvalidRequest, "'shift'", "invalid_request"),
            (lambda: client.segment("digits", SEVEN), InvalidRequest, "another task", "invalid_request"),
            (lambda: client.predict("cats", SEVEN), NotFound, "unknown model", "unknown_model"),
            (lambda: client.predict("digits", SEVEN, version=9), NotFound, "version", "unknown_version"),
        ):
            with pytest.raises(kind, match=words) as raised:
                ask()
            assert raised.value.code == code


@pytest.mark.parametrize(
    ("status", "sent", "kind", "code"),
    [
        (429, ',"code":"memory_exhausted"', Overloaded, "memory_exhausted"),
        (503, ',"code":"draining"', Unavailable, "draining"),
        (400, ',"code":"of_a_later_server"', InvalidRequest, "of_a_later_server"),
        (404, "", NotFound, "not_found"),  # a server that sends no codes
    ],
)
def test_an_error_has_the_servers_code(status: int, sent: str, kind: type[convoy.RequestError], code: str) -> None:
    def answer(_: Asked) -> tuple[int, dict[str, str], bytes]:
        return status, {}, b'{"error":"no"%b}' % sent.encode()

    with playing(answer) as url, convoy.Client(url, retries=0) as client:
        with pytest.raises(kind, match="no") as raised:
            client.models()
        assert raised.value.code == code


@pytest.mark.parametrize(
    "url",
    [
        *("grpc://", "grpc://host:port", "grpc://host/path", "grpcs://host?x=1", "ftp://host", ""),
        *("host:port", "localhost:99999", ":8000", "http://", "http://:8000", "local host:8000", "http:/localhost"),
    ],
)
def test_a_url_that_is_none_is_a_wrong_call(url: str) -> None:
    with pytest.raises(UsageError, match="URL"):
        convoy.Client(url)
    with pytest.raises(UsageError, match="URL"):
        convoy.AsyncClient(url)


@pytest.mark.parametrize("kind", [convoy.Client, convoy.AsyncClient])
@pytest.mark.parametrize("scheme", ["https", "grpcs"])
def test_files_with_which_there_is_no_tls_are_a_wrong_call(tmp_path: Path, scheme: str, kind: Any) -> None:
    url, missing = f"{scheme}://localhost", tmp_path / "missing.pem"
    empty = tmp_path / "empty.pem"
    empty.touch()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"verify": str(missing)}, r"^verify .*missing\.pem cannot be read"),
        ({"cert": missing}, r"^cert .*missing\.pem cannot be read"),
        ({"cert": (empty, empty)}, r"^cert .*empty\.pem has no PEM certificate"),
        ({"verify": ssl.create_default_context(), "cert": empty}, "pass files for both"),
    ]
    for options, words in wrong:
        with pytest.raises(UsageError, match=words):
            kind(url, **options)


def test_tls_over_grpc_takes_files_alone() -> None:
    for verify in (False, ssl.create_default_context()):
        with pytest.raises(UsageError, match=r"file with certificates, .* in `cert`"):
            convoy.Client("grpcs://localhost", verify=verify)


ALONE = """
import sys
import convoy_client
from convoy_client.errors import ImageError, NotFound

with convoy_client.Client(sys.argv[1]) as client:
    result = client.predict("digits", sys.argv[2])
    assert isinstance(result, convoy_client.Classification)
    for kind, ask in ((NotFound, ("none", sys.argv[2])), (ImageError, ("digits", "missing.png"))):
        try:
            client.predict(*ask)
        except kind as error:
            assert str(error)
    print(result.best.label, client.models()[0].name)
mine = {"convoy", "PIL", "fastapi", "grpc", "msgspec", "onnxruntime", "orjson", "pydantic", "tritonclient"}
assert not mine & sys.modules.keys(), mine & sys.modules.keys()
sys.modules["tritonclient"] = sys.modules["PIL"] = None
try:
    convoy_client.Client("grpc://localhost")
except convoy_client.ConvoyError as error:
    print(error)
try:
    convoy_client.Client().predict("digits", convoy_client.client.np.zeros((8, 8), "uint8"))
except ImageError as error:
    print(error)
del sys.modules["tritonclient"], sys.modules["PIL"]
with convoy_client.Client(sys.argv[3]) as client:
    print(client.predict("digits", sys.argv[2]).best.label)
"""


def test_the_client_alone_needs_httpx_and_numpy(server: Server, tmp_path: Path) -> None:
    write_project(tmp_path)
    words = (sys.executable, "-c", ALONE, f"127.0.0.1:{server.port}", str(SEVEN), f"grpc://{server.grpc_address}")
    done = subprocess.run(
        words, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr
    answer, grpc_missing, pillow_missing, over_grpc = done.stdout.splitlines()
    assert (answer, over_grpc) == ("7 digits", "7")
    assert "run `pip install 'convoy-client[grpc]'`" in grpc_missing
    assert "pip install Pillow" in pillow_missing


@contextmanager
def dripping() -> Iterator[str]:
    """A server that sends a byte of its answer every fifth of a second, and is never done."""
    is_over = threading.Event()

    def drip(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(1 << 20)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n")
            while not is_over.wait(0.2):
                connection.sendall(b" ")

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=drip, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        is_over.set()


def test_a_server_that_drips_is_waited_for_as_long_as_was_said() -> None:
    async def ask(url: str) -> None:
        async with convoy.AsyncClient(url, timeout_s=1, retries=0) as client:
            await client.predict("digits", SEVEN)

    def ask_in_a_thread(url: str) -> None:
        with convoy.Client(url, timeout_s=1, retries=0) as client:
            client.predict("digits", SEVEN)

    with dripping() as url:
        for asking in (ask_in_a_thread, lambda url: asyncio.run(ask(url))):
            with pytest.raises(DeadlineExceeded, match="did not answer within 1 s"):
                asking(url)
