"""Calls to the routes that infer, alone and one after the other on a connection: each is answered by itself."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.support.servers import Server, start_server, wait_until
from tests.support.stores import StoreFolder, digit
from tests.support.wire import Wire, WireReply, chunk, head

# Many servers are started here, and much is waited for.
pytestmark = pytest.mark.slow

MIB = 1 << 20
DIGITS = "/predictions/digits"
SIMPLE = "/v2/models/simple/infer"
BROAD = 16 << 10  # values of a sample of `broad`
LENGTH = "Inference-Header-Content-Length"
CHANGING = {"server-timing", "x-request-id"}


class Asked(NamedTuple):
    """A request's body, in its two parts, and its path."""

    header: bytes
    data: bytes
    path: str = SIMPLE

    def headers(self, **more: str) -> dict[str, str]:
        length = str(len(self.header) + len(self.data))
        return {LENGTH: str(len(self.header)), "Content-Length": length} | {
            name.replace("_", "-"): value for name, value in more.items()
        }

    def whole(self, **more: str) -> bytes:
        return head(self.path, self.headers(**more)) + self.header + self.data


def binary(inputs: dict[str, np.ndarray], outputs: list[str], path: str, **more: Any) -> Asked:
    """A request that brings its tensors as bytes and wants its answer so."""
    dtypes = {"int32": "INT32", "float32": "FP32"}
    tensors = [
        {
            "name": name,
            "shape": list(array.shape),
            "datatype": dtypes[array.dtype.name],
            "parameters": {"binary_data_size": array.nbytes},
        }
        for name, array in inputs.items()
    ]
    wanted = [{"name": name, "parameters": {"binary_data": True}} for name in outputs]
    document = {"inputs": tensors, "outputs": wanted, **more}
    return Asked(json.dumps(document).encode(), b"".join(array.tobytes() for array in inputs.values()), path)


def numbers(seed: int, samples: int = 1) -> tuple[np.ndarray, np.ndarray]:
    left, right = np.random.default_rng(seed).integers(-1000, 1000, (2, samples, 16), np.int32)
    return left, right


def simple(seed: int = 0, samples: int = 1, path: str = SIMPLE, **more: Any) -> Asked:
    left, right = numbers(seed, samples)
    return binary({"INPUT0": left, "INPUT1": right}, ["OUTPUT0", "OUTPUT1"], path, **more)


def tensors(reply: WireReply) -> tuple[dict[str, Any], bytes]:
    """An answer's JSON and what follows it."""
    assert reply.status == 200, reply
    length = int(reply.headers[LENGTH.lower()])
    return json.loads(reply.body[:length]), reply.body[length:]


def check(reply: WireReply, seed: int = 0, samples: int = 1) -> None:
    """The answer to `simple` must be the right one."""
    left, right = numbers(seed, samples)
    document, data = tensors(reply)
    assert [one["name"] for one in document["outputs"]] == ["OUTPUT0", "OUTPUT1"]
    assert [one["shape"] for one in document["outputs"]] == [[samples, 16]] * 2
    assert data == (left + right).tobytes() + (left - right).tobytes()


def alike(one: WireReply, other: WireReply) -> None:
    """Nothing tells two answers apart but what is new in every answer."""
    assert one.status == other.status
    assert one.body == other.body
    assert {*one.headers} == {*other.headers}
    assert {name for name, value in one.headers.items() if other.headers[name] != value} <= CHANGING


@pytest.fixture(scope="module")
def filled_store(shared_store: StoreFolder) -> StoreFolder:
    shared_store.add_add_sub()
    shared_store.add_add_sub(name="counted")
    shared_store.add_identity("FP32", ("batch", BROAD), name="broad")
    return shared_store


@pytest.fixture(scope="module")
def server(filled_store: StoreFolder) -> Iterator[Server]:
    with start_server("--access-log", "all", store=filled_store.root) as server:
        yield server
        wait_until(server.is_at_rest, "nothing is held after all these requests")


@pytest.fixture
def wire(server: Server) -> Iterator[Wire]:
    """A connection to a server that knows `simple()`."""
    with Wire(server.port) as wire:
        for _ in range(2):
            wire.send(simple().whole())
            check(wire.reply())
        yield wire
        wire.send(simple(99).whole())
        check(wire.reply(), 99)


def ask(wire: Wire, asked: Asked, **more: str) -> WireReply:
    wire.send(asked.whole(**more))
    return wire.reply()


@pytest.mark.parametrize("samples", [1, 3, 32])
def test_the_first_answer_and_the_later_ones_are_alike(server: Server, samples: int) -> None:
    with Wire(server.port) as wire:
        asked = simple(1, samples, id=f"first-{samples}")
        first, second, third = [ask(wire, asked) for _ in range(3)]
        check(first, 1, samples)
        alike(first, second)
        alike(first, third)
        assert tensors(third)[0]["id"] == f"first-{samples}"


@pytest.mark.parametrize("own_id", ["?", "??", "mine", ""])
def test_a_text_that_is_called_like_the_id_and_stands_before_it_is_not_the_id(server: Server, own_id: str) -> None:
    with Wire(server.port) as wire:
        for other in ("one", "two", "six", "six"):
            reply = ask(wire, simple(1, parameters={"id": other}, id=own_id))
            check(reply, 1)
            assert tensors(reply)[0]["id"] == own_id


@pytest.mark.parametrize("samples", [1, 5])
def test_each_gets_the_answer_to_its_own_tensors(server: Server, samples: int) -> None:
    def client(number: int) -> None:
        with Wire(server.port) as wire:
            for seed in range(100 * number, 100 * number + 40):
                check(ask(wire, simple(seed, samples)), seed, samples)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(client, range(8)))


def test_a_version_that_is_named_answers_too(server: Server) -> None:
    with Wire(server.port) as wire:
        for seed in range(3):
            check(ask(wire, simple(seed, path="/v2/models/simple/versions/1/infer")), seed)
        for _ in range(2):
            assert ask(wire, simple(path="/v2/models/simple/versions/2/infer")).status == 404


def test_own_ids_and_traces_come_back_and_others_are_made(wire: Wire) -> None:
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    replies = [ask(wire, simple(), X_Request_Id=f"mine-{number}", traceparent=parent) for number in range(3)]
    assert [reply.headers["x-request-id"] for reply in replies] == ["mine-0", "mine-1", "mine-2"]
    assert {reply.headers["traceparent"] for reply in replies} == {parent}
    made = [ask(wire, simple()) for _ in range(20)]
    assert len({reply.headers["x-request-id"] for reply in made}) == 20
    assert not any("traceparent" in reply.headers for reply in made)
    for unfit in ("two words", "x" * 200):
        assert ask(wire, simple(), X_Request_Id=unfit).headers["x-request-id"] != unfit


def in_two_pieces(wire: Wire, asked: Asked) -> None:
    whole = asked.whole()
    wire.send(whole[:-100])
    wire.send(whole[-100:])


def headers_byte_by_byte(wire: Wire, asked: Asked) -> None:
    start = head(asked.path, asked.headers())
    for byte in start:
        wire.send(bytes([byte]))
    wire.send(asked.header + asked.data)


def all_byte_by_byte(wire: Wire, asked: Asked) -> None:
    for byte in asked.whole():
        wire.send(bytes([byte]))


def chunked(wire: Wire, asked: Asked) -> None:
    start = head(asked.path, {LENGTH: str(len(asked.header)), "Transfer-Encoding": "chunked"})
    wire.send(start + chunk(asked.header) + chunk(asked.data) + chunk(b""))


def expecting(wire: Wire, asked: Asked) -> None:
    wire.send(head(asked.path, asked.headers(Expect="100-continue")))
    assert wire.reply().status == 100
    wire.send(asked.header + asked.data)


def expecting_nothing(wire: Wire, asked: Asked) -> None:
    wire.send(asked.whole(Expect="100-continue"))
    assert wire.reply().status == 100


def with_a_time_limit(wire: Wire, asked: Asked) -> None:
    wire.send(asked._replace(path=f"{asked.path}?timeout_ms=30000").whole())


def zipped(wire: Wire, asked: Asked) -> None:
    body = gzip.compress(asked.header + asked.data)
    wire.send(head(asked.path, asked.headers(Content_Encoding="gzip") | {"Content-Length": str(len(body))}) + body)


@pytest.mark.parametrize(
    "send",
    [
        in_two_pieces,
        headers_byte_by_byte,
        all_byte_by_byte,
        chunked,
        expecting,
        expecting_nothing,
        with_a_time_limit,
        zipped,
    ],
)
def test_however_it_is_sent_it_is_answered(wire: Wire, send: Callable[[Wire, Asked], None]) -> None:
    plain = ask(wire, simple(7))
    for _ in range(2):
        send(wire, simple(7))
        reply = wire.reply()
        check(reply, 7)
        alike(plain, reply)


def test_a_connection_that_is_to_be_closed_is_closed(server: Server, wire: Wire) -> None:
    for change in (
        lambda whole: whole.replace(b"Host: test", b"Connection: close"),
        lambda whole: whole.replace(b"HTTP/1.1", b"HTTP/1.0"),
    ):
        with Wire(server.port) as other:
            other.send(change(simple(3).whole()))
            reply = other.reply()
            check(reply, 3)
            assert reply.headers["connection"] == "close"
            assert other.is_closed()


@pytest.mark.parametrize(
    "parameters", [{"timeout": 30_000_000}, {"priority": 3}, {"timeout": 20_000_000, "priority": 1}]
)
def test_terms_are_heeded_every_time(wire: Wire, parameters: dict[str, int]) -> None:
    for seed in range(3):
        check(ask(wire, simple(seed, parameters=parameters)), seed)
    for _ in range(2):
        assert ask(wire, simple(parameters={"timeout": 1})).status in (429, 504)


def test_an_answer_is_compressed_for_whom_it_was_the_first_time(server: Server) -> None:
    with Wire(server.port) as wire:
        asked = simple(5, samples=32, id="compressed")
        zipped = [ask(wire, asked, Accept_Encoding="gzip") for _ in range(3)]
        plain = [ask(wire, asked) for _ in range(2)]
        zipped.append(ask(wire, asked, Accept_Encoding="gzip, identity;q=0.5"))
        refused = ask(wire, asked, Accept_Encoding="gzip;q=0")
        for reply in plain:
            check(reply, 5, 32)
            assert "content-encoding" not in reply.headers
            alike(reply, refused)
        for reply in zipped:
            assert reply.headers["content-encoding"] == "gzip"
            assert gzip.decompress(reply.body) == plain[0].body
            alike(zipped[0], reply)


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda good: good._replace(data=good.data + b"\0" * 4), id="longer"),
        pytest.param(lambda good: good._replace(data=good.data[:-4]), id="shorter"),
        pytest.param(lambda good: good._replace(data=b""), id="no-tensor"),
        pytest.param(
            lambda good: good._replace(header=good.header[:-1], data=b"}" + good.data), id="length-less-by-one"
        ),
        pytest.param(lambda good: Asked(good.header + good.data[:1], good.data[1:]), id="length-more-by-one"),
        pytest.param(lambda good: Asked(good.header + good.data, b""), id="length-of-all"),
        pytest.param(lambda good: good._replace(header=good.header.replace(b"INT32", b"INT64")), id="another-dtype"),
    ],
)
def test_what_is_wrong_is_refused_as_on_the_first_time(wire: Wire, spoil: Callable[[Asked], Asked]) -> None:
    wrong = spoil(simple())
    direct, usual = ask(wire, wrong), ask(wire, wrong._replace(path=SIMPLE.replace("simple", "%73imple")))
    assert direct.status == 400
    assert direct.error
    alike(direct, usual)


@pytest.mark.parametrize("length", ["999999", "-1", "one", "", "0"])
def test_a_length_that_is_none_is_refused_as_on_the_first_time(wire: Wire, length: str) -> None:
    good = simple()
    replies = []
    for path in (SIMPLE, f"{SIMPLE}?"):
        wire.send(head(path, good.headers() | {LENGTH: length}) + good.header + good.data)
        replies.append(wire.reply())
    assert replies[0].status == 400
    alike(*replies)


def test_a_client_that_reads_slowly_is_waited_for_and_misses_nothing(server: Server) -> None:
    count = 300

    def broad(number: int) -> Asked:
        return binary({"x": np.full((1, BROAD), number, np.float32)}, ["y"], "/v2/models/broad/infer")

    def answered() -> int:
        return int(server.statistics("broad")["inference_stats"]["success"]["count"])

    before, seen = answered(), []

    def stands_still() -> bool:
        seen.append(answered())
        return seen[-1] > before and len(seen) > 25 and len({*seen[-25:]}) == 1

    with Wire(server.port, receive_buffer=4096) as wire, ThreadPoolExecutor(1) as pool:
        sending = pool.submit(wire.send, b"".join(broad(number).whole() for number in range(count)))
        wait_until(stands_still, "nobody answers whom nobody hears")
        assert answered() - before < count
        assert server.stats()["inflight_bytes"] < 8 << 20
        wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)  # or the rest would take long
        for number in range(count):
            _, data = tensors(wire.reply())
            assert (np.frombuffer(data, np.float32) == number).all()
            assert len(data) == BROAD * 4
        sending.result()
    assert answered() - before == count


def test_a_chunked_body_that_is_allowed_is_read_where_there_is_hardly_room() -> None:
    body = digit("seven") + bytes(5 * MIB)  # what is appended to a PNG is not looked at
    with start_server("--max-body-mb", "8", "--max-inflight-mb", "8") as server:
        with Wire(server.port) as wire:
            assert wire.ask(DIGITS, body).status == 200
        for _ in range(3):
            wait_until(server.is_at_rest, "nothing else holds memory")
            with Wire(server.port) as wire:
                pieces = [chunk(body[start : start + MIB]) for start in range(0, len(body), MIB)]
                wire.send(head(DIGITS, {"Transfer-Encoding": "chunked"}) + b"".join(pieces) + chunk(b""))
                assert wire.reply().status == 200


def picture_request(body: bytes, length: str | None = None, path: str = DIGITS, **headers: str) -> bytes:
    more = {name.replace("_", "-"): value for name, value in headers.items()}
    return head(path, {"Content-Length": str(len(body)) if length is None else length, **more}) + body


SEVEN, TWO = digit("seven"), digit("two")
# What follows a picture on a connection, as the bytes of one request.
AFTER_A_PICTURE = {
    "the same": picture_request(SEVEN),
    "another": picture_request(TWO),
    "no image": picture_request(b"no image at all"),
    "cut off": picture_request(SEVEN[:-100]),
    "nothing": picture_request(b""),
    "zeros before its length": picture_request(TWO, f"000{len(TWO)}"),
    "a length in hex": picture_request(TWO, hex(len(TWO))),
    "a length below zero": picture_request(b"", "-1"),
    "too large to be read": picture_request(b"", str(1 << 40)),
    "one more header": picture_request(TWO, x_more="more"),
    "another model": picture_request(TWO, path="/predictions/nobody"),
    "other classes": picture_request(TWO, path=f"{DIGITS}?top_k=2"),
    "its id": picture_request(TWO, x_request_id="own"),
    "a form": picture_request(
        b'--x\r\nContent-Disposition: form-data; name="a"; filename="b"\r\n\r\n' + TWO + b"\r\n--x--\r\n",
        content_type="multipart/form-data; boundary=x",
    ),
    "chunked": head(DIGITS, {"Transfer-Encoding": "chunked"}) + chunk(TWO) + chunk(b""),
    "the last": picture_request(TWO, connection="close"),
}


def same_answer(reply: WireReply) -> tuple[object, ...]:
    """What an answer says beside times and the server's own ids."""
    document = reply.json()
    for one in (document, *document.get("results", ())):
        one.pop("timing_ms", None)
    return reply.status, document, {*reply.headers}, reply.headers.get("connection")


@pytest.mark.parametrize("following", AFTER_A_PICTURE)
@pytest.mark.parametrize("in_pieces", [False, True], ids=["whole", "in-pieces"])
def test_what_follows_a_picture_is_answered_as_if_nothing_had_been_before(
    following: str, in_pieces: bool, demo: Server
) -> None:
    request = AFTER_A_PICTURE[following]
    with Wire(demo.port) as alone:
        alone.send(request)
        expected = same_answer(alone.reply())
    with Wire(demo.port) as wire:
        for body in (SEVEN, TWO, SEVEN):
            assert wire.ask(DIGITS, body).json()["predictions"][0]["label"] == ("7" if body is SEVEN else "2")
        if in_pieces:
            for at in range(0, len(request), 700):  # whether they come together is up to the system
                wire.send(request[at : at + 700])
        else:
            wire.send(request)
        assert same_answer(wire.reply()) == expected
        if expected[0] == 200 and expected[-1] != "close":
            assert wire.ask(DIGITS, SEVEN).json()["predictions"][0]["label"] == "7"


def test_several_pictures_at_once_are_answered_in_their_order(demo: Server) -> None:
    with Wire(demo.port) as wire:
        for labels in ("7", "72", "2772", "7" * 9 + "2"):
            wire.send(b"".join(picture_request(SEVEN if label == "7" else TWO) for label in labels))
            assert "".join(wire.reply().json()["predictions"][0]["label"] for _ in labels) == labels
