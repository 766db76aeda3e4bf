"""The mixture of clients: official libraries, ours, plain sockets; each asks what its script says, one call at a time.

A client knows where the server is and what it asks. It judges every answer by the model's own arithmetic, and
gives each call exactly one ending. What the ending is allowed to be is not its business.
"""

from __future__ import annotations

import http.client
import json
import random
import select
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import httpx
import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from geventhttpclient.response import HTTPParseError
from tritonclient.utils import InferenceServerException

import convoy
from convoy.models.errors import ConvoyError
from tests.campaign.asks import Ask, Picture, Script, WrongAnswer
from tests.campaign.endings import BOUND_S, PARTLY, Ending, outcome_of_grpc, outcome_of_status, outcome_of_words
from tests.campaign.forms import check_infer, infer_body, infer_path
from tests.support.wire import Wire, WireReply, chunk, head

_HUNG = (TimeoutError, httpx.TimeoutException)
_BROKEN = (OSError, http.client.HTTPException, httpx.TransportError, HTTPParseError)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the server is; the same after every restart. `now_s` is the campaign's clock."""

    http_port: int
    grpc_port: int
    now_s: Callable[[], float]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"


@dataclass(frozen=True, slots=True)
class Said:
    """What came of one request of a call."""

    protocol: str
    model: str
    outcome: str
    words: str = ""
    asked_wrong: bool = False


class Client(ABC):
    """One client; used by one thread."""

    kind: ClassVar[str]

    def __init__(self, place: Place, script: Script) -> None:
        self.place, self.script = place, script

    @abstractmethod
    def say(self, number: int) -> Iterator[Said]:
        """Make the call with this number. What breaks off raises, and `call` gives it its ending."""

    @abstractmethod
    def about(self, number: int) -> tuple[str, str, bool, int]:
        """The call's protocol, its model, whether it is wrong on purpose, and how many requests it has."""

    def close(self) -> None:  # noqa: B027 - most have nothing open
        """Leave in good order."""

    def drop(self) -> None:
        """Forget whatever is open: the server may have."""
        self.close()

    def call(self, number: int) -> list[Ending]:
        """Make one call; exactly one ending for each of its requests, whatever happens."""
        sent_s, said = self.place.now_s(), list[Said]()
        protocol, model, asked_wrong, requests = self.about(number)
        try:
            said.extend(self.say(number))
        except WrongAnswer as error:
            said.append(Said(protocol, model, "wrong", str(error), asked_wrong))
            self.drop()
        except _HUNG as error:
            said.append(Said(protocol, model, "hung", repr(error), asked_wrong))
            self.drop()
        except _BROKEN as error:
            said.append(Said(protocol, model, "broken", repr(error), asked_wrong))
            self.drop()
        said += [Said(protocol, model, "broken", "after another of the same call", asked_wrong)] * (
            requests - len(said)
        )
        ended_s = self.place.now_s()
        return [
            Ending(
                *(self.kind, number, one.protocol, one.model, one.outcome, sent_s, ended_s, one.words, one.asked_wrong)
            )
            for one in said
        ]


class TensorClient(Client):
    """Asks for tensors; `protocol` is what the server calls the wire."""

    protocol: ClassVar[str] = "v2"

    def ask(self, number: int) -> Ask:
        return self.script.ask(number)

    def about(self, number: int) -> tuple[str, str, bool, int]:
        ask = self.ask(number)
        return self.protocol, ask.model, ask.is_wrong, 1

    def said(self, ask: Ask, outcome: str, words: str = "") -> Said:
        return Said(self.protocol, ask.model, outcome, words, ask.is_wrong)

    def judge(self, ask: Ask, status: int, headers: dict[str, str], body: bytes) -> Said:
        """An answer over HTTP. Raises WrongAnswer."""
        if status == 200:
            check_infer(ask, headers, body)
            return self.said(ask, "success")
        return self.said(ask, outcome_of_status(status), error_words(body))


class ImageClient(Client):
    """Asks for the label of an image."""

    def picture(self, number: int) -> Picture:
        return self.script.picture(number)

    def about(self, number: int) -> tuple[str, str, bool, int]:
        return "predictions", "digits", self.picture(number).label is None, 1

    def judge(self, picture: Picture, status: int, body: bytes) -> Said:
        """An answer over HTTP. Raises WrongAnswer."""
        if status != 200:
            return self.said(picture, outcome_of_status(status), error_words(body))
        try:
            picture.check(json.loads(body))
        except ValueError as error:
            raise WrongAnswer(f"the answer is no JSON ({error}): {body[:80]!r}") from error
        return self.said(picture, "success")

    def said(self, picture: Picture, outcome: str, words: str = "") -> Said:
        return Said("predictions", "digits", outcome, words, picture.label is None)


def error_words(body: bytes) -> str:
    """The words of an error, which must be in the form that all errors have. Raises WrongAnswer."""
    try:
        document = json.loads(body)
        words = document["error"]
    except (ValueError, KeyError, TypeError):
        raise WrongAnswer(f"an error that is not {{'error': words}}: {body[:120]!r}") from None
    if not isinstance(words, str) or not words:
        raise WrongAnswer(f"an error without words: {body[:120]!r}")
    return words


class TritonHttp(TensorClient):
    """tritonclient.http, as Triton's users have it."""

    kind = "tritonclient"

    def __init__(self, place: Place, script: Script) -> None:
        super().__init__(place, script)
        self._own: triton_http.InferenceServerClient | None = None

    def say(self, number: int) -> Iterator[Said]:
        ask = self.ask(number)
        if self._own is None:
            limits = {"connection_timeout": BOUND_S, "network_timeout": BOUND_S}
            self._own = triton_http.InferenceServerClient(f"127.0.0.1:{self.place.http_port}", **limits)
        compression = self.script.chance(number).choice((None, None, None, "gzip", "deflate"))
        inputs = triton_inputs(triton_http, ask, binary_data=ask.binary)
        try:
            answer = self._own.infer(ask.model, inputs, request_id=ask.id, request_compression_algorithm=compression)
        except InferenceServerException as error:
            yield self.said(ask, outcome_of_status(int(error.status() or 0)), str(error))
            return
        document = answer.get_response()
        outputs = {one["name"]: answer.as_numpy(one["name"]) for one in document["outputs"]}
        ask.check(document["model_name"], document["model_version"], document.get("id", ""), outputs)
        yield self.said(ask, "success")

    def close(self) -> None:
        if self._own is not None:
            self._own.close()
            self._own = None


class TritonGrpc(TensorClient):
    """tritonclient.grpc, one call at a time."""

    kind, protocol = "tritonclient-grpc", "grpc"

    def __init__(self, place: Place, script: Script) -> None:
        super().__init__(place, script)
        self.own: triton_grpc.InferenceServerClient | None = None

    def client(self) -> triton_grpc.InferenceServerClient:
        if self.own is None:
            self.own = triton_grpc.InferenceServerClient(f"127.0.0.1:{self.place.grpc_port}")
        return self.own

    def say(self, number: int) -> Iterator[Said]:
        ask = self.ask(number)
        answer, outcome, words = self.infer(ask.model, triton_inputs(triton_grpc, ask), request_id=ask.id)
        if answer is not None:
            _check_grpc(ask, answer)
        yield self.said(ask, outcome, words)

    def infer(self, model: str, inputs: list[Any], **options: Any) -> tuple[Any, str, str]:
        """The answer, the outcome and the words of an error; without an answer where there is one."""
        began_s = time.monotonic()
        try:
            return self.client().infer(model, inputs, client_timeout=BOUND_S, **options), "success", ""
        except InferenceServerException as error:
            took_s = time.monotonic() - began_s
            return None, outcome_of_grpc(str(error.status()), str(error), took_s), str(error)

    def close(self) -> None:
        if self.own is not None:
            self.own.close()
            self.own = None


class TritonStream(TritonGrpc):
    """tritonclient.grpc, some requests in one stream; answers must come in their order, one for each."""

    kind = "tritonclient-stream"

    def asks(self, number: int) -> list[Ask]:
        count = 1 + self.script.chance(number).randrange(16)
        return [self.script.ask(number * 64 + one) for one in range(count)]

    def about(self, number: int) -> tuple[str, str, bool, int]:
        asks = self.asks(number)
        return self.protocol, asks[0].model, asks[0].is_wrong, 0

    def say(self, number: int) -> Iterator[Said]:
        asks, answers, came = self.asks(number), list[tuple[Any, Any]](), threading.Semaphore(0)

        def take(result: Any, error: Any) -> None:
            answers.append((result, error))
            came.release()

        client = self.client()
        client.start_stream(take)
        unsent = None
        for ask in asks:
            try:
                client.async_stream_infer(ask.model, triton_inputs(triton_grpc, ask), request_id=ask.id)
            except InferenceServerException as error:  # the stream has ended
                unsent = error
                break
        until_s, is_broken = time.monotonic() + BOUND_S, False
        for place, ask in enumerate(asks):
            if not is_broken and not came.acquire(timeout=max(0.01, until_s - time.monotonic())):
                yield self.said(ask, "broken" if unsent is not None else "hung", str(unsent or "no answer in a stream"))
                is_broken = True
                continue
            if is_broken:
                yield self.said(ask, "broken", "its stream had ended")
                continue
            result, error = answers[place]
            if error is None:
                try:
                    _check_grpc(ask, result)
                except WrongAnswer as wrong:
                    yield self.said(ask, "wrong", str(wrong))
                    continue
                yield self.said(ask, "success")
                continue
            code = str(error.status() or "")
            is_broken = bool(code)  # a status ends the stream; an error without one is an answer
            words = str(error.message() or "")
            yield self.said(ask, outcome_of_grpc(code, words, 0.0) if code else outcome_of_words(words), words)
        client.stop_stream(cancel_requests=is_broken)
        # The end of a stream that breaks off comes as one more, with a status.
        more = [one for one in answers[len(asks) :] if one[1] is None or not one[1].status()]
        if more:
            raise WrongAnswer(f"{len(asks) + len(more)} answers to {len(asks)} requests of a stream")
        if is_broken:
            self.drop()


class Httpx(TensorClient):
    """httpx, tensors as JSON or binary; asks for compressed answers, as it does by default."""

    kind = "httpx"

    def __init__(self, place: Place, script: Script) -> None:
        super().__init__(place, script)
        self._own = httpx.Client(base_url=place.url, trust_env=False, verify=False, timeout=BOUND_S)

    def say(self, number: int) -> Iterator[Said]:
        ask = self.ask(number)
        body, headers = infer_body(ask)
        answer = self._own.post(infer_path(ask), content=body, headers={**headers, "X-Request-Id": ask.id})
        if answer.headers.get("x-request-id") != ask.id:
            raise WrongAnswer(f"asked as {ask.id}, answered as {answer.headers.get('x-request-id')}")
        yield self.judge(ask, answer.status_code, dict(answer.headers), answer.content)

    def close(self) -> None:
        self._own.close()

    def drop(self) -> None:
        """httpx opens connections anew by itself."""


class HttpClient(ImageClient):
    """http.client over a kept connection, and urllib for every fifth call."""

    kind = "http.client"

    def __init__(self, place: Place, script: Script) -> None:
        super().__init__(place, script)
        self._own = http.client.HTTPConnection("127.0.0.1", place.http_port, timeout=BOUND_S)

    def say(self, number: int) -> Iterator[Said]:
        picture = self.picture(number)
        if number % 5 == 0:
            yield self.judge(picture, *_by_urllib(f"{self.place.url}/predictions/digits", picture.data))
            return
        if self._own.sock is not None and _has_something(self._own.sock):
            with suppress(ConnectionError):
                if stray := self._own.sock.recv(80, socket.MSG_PEEK):
                    raise WrongAnswer(f"between two calls there came {stray!r}")
            self._own.close()  # by the server, while another connection waited for long; libraries look, too
        self._own.request("POST", "/predictions/digits", picture.data)
        answer = self._own.getresponse()
        yield self.judge(picture, answer.status, answer.read())

    def close(self) -> None:
        self._own.close()


class Album(ImageClient):
    """Files of every format and size over a kept connection, some of them in pieces."""

    kind = "album"

    def __init__(self, place: Place, script: Script) -> None:
        super().__init__(place, script)
        self._wire: Wire | None = None

    def picture(self, number: int) -> Picture:
        return self.script.file(number)

    def say(self, number: int) -> Iterator[Said]:
        picture, chance = self.picture(number), self.script.chance(number)
        wire = self._wire = self._wire or Wire(self.place.http_port, timeout_s=BOUND_S)
        _send_in_pieces(wire, picture_request(picture), chance)
        reply = wire.reply()
        if left := wire.left_over():
            raise WrongAnswer(f"after the answer there came {left[:80]!r}")
        if reply.headers.get("connection") == "close":
            self.drop()
        yield self.judge(picture, reply.status, reply.body)

    def close(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None


class Form(ImageClient):
    """Forms of some files, each with its own answer, in their order."""

    kind = "form"

    def __init__(self, place: Place, script: Script) -> None:
        super().__init__(place, script)
        self._own = httpx.Client(base_url=place.url, trust_env=False, verify=False, timeout=BOUND_S)

    def pictures(self, number: int) -> list[Picture]:
        count = 1 + self.script.chance(number).randrange(6)
        return [self.script.file(number * 8 + one) for one in range(count)]

    def about(self, number: int) -> tuple[str, str, bool, int]:
        return "predictions", "digits", all(one.label is None for one in self.pictures(number)), 1

    def say(self, number: int) -> Iterator[Said]:
        pictures = self.pictures(number)
        files = [("file", (f"{place}.any", one.data)) for place, one in enumerate(pictures)]
        answer = self._own.post("/predictions/digits", files=files)
        if answer.status_code != 200:
            sound = next((one for one in pictures if one.label is not None), pictures[0])
            yield self.judge(sound, answer.status_code, answer.content)
            return
        results = answer.json()["results"]
        if len(results) != len(pictures):
            raise WrongAnswer(f"{len(results)} results for {len(pictures)} files")
        refused = []
        for picture, result in zip(pictures, results, strict=True):
            if "error" not in result:
                picture.check(result)
            elif picture.label is not None:
                if outcome_of_words(result["error"]) == "invalid":
                    raise WrongAnswer(f"a file that is right was called wrong: {result['error']}")
                refused.append(result["error"])
        yield Said("predictions", "digits", "success", f"{PARTLY}{refused[0]}" if refused else "")

    def close(self) -> None:
        self._own.close()

    def drop(self) -> None:
        """httpx opens connections anew by itself."""


class GrpcPictures(TritonGrpc):
    """tritonclient.grpc with images: one element of BYTES."""

    kind = "grpc-pictures"

    def about(self, number: int) -> tuple[str, str, bool, int]:
        return self.protocol, "digits", self.script.file(number).label is None, 1

    def say(self, number: int) -> Iterator[Said]:
        picture = self.script.file(number)
        image = triton_grpc.InferInput("image", [1], "BYTES")
        image.set_data_from_numpy(np.array([picture.data], np.object_))
        answer, outcome, words = self.infer("digits", [image], parameters={"top_k": 1})
        if answer is not None:
            found = answer.as_numpy("predictions")
            if found is None:
                raise WrongAnswer("an answer to an image without predictions")
            picture.check(json.loads(found.item()))
        yield Said(self.protocol, "digits", outcome, words, picture.label is None)


class Convoy(ImageClient):
    """`convoy.Client`, which is behind `convoy predict`, too."""

    kind = "convoy"

    def __init__(self, place: Place, script: Script) -> None:
        super().__init__(place, script)
        # Each call is to be one request, whose end is counted here as it is there.
        self._own = convoy.Client(place.url, timeout_s=BOUND_S, retries=0)

    def say(self, number: int) -> Iterator[Said]:
        picture = self.picture(number)
        try:
            best = self._own.predict("digits", picture.data, top_k=1).best
        except ConvoyError as error:
            words = str(error)
            if "nobody answers" in words or "broke off" in words:
                yield self.said(picture, "broken", words)
            elif "did not answer within" in words:
                yield self.said(picture, "hung", words)
            else:
                yield self.said(picture, outcome_of_words(words), words)
            return
        picture.check({"predictions": [{"label": best.label, "score": best.score}]})
        yield self.said(picture, "success")

    def close(self) -> None:
        self._own.close()

    def drop(self) -> None:
        """httpx opens connections anew by itself."""


class Curl(ImageClient):
    """curl, a process for each call."""

    kind = "curl"

    def say(self, number: int) -> Iterator[Said]:
        picture = self.picture(number)
        command = [
            *("curl", "-sS", "--noproxy", "*", "--max-time", f"{BOUND_S:g}", "-w", "\n%{http_code}"),
            *("--data-binary", "@-", f"{self.place.url}/predictions/digits"),
        ]
        ended = subprocess.run(command, input=picture.data, capture_output=True, check=False)
        if ended.returncode:
            raise (TimeoutError if ended.returncode == 28 else ConnectionError)(ended.stderr.decode(errors="replace"))
        body, _, status = ended.stdout.rpartition(b"\n")
        yield self.judge(picture, int(status), body)


class Raw(TensorClient):
    """A socket: several requests in one go, bodies in pieces and in chunks."""

    kind = "raw"

    def __init__(self, place: Place, script: Script) -> None:
        super().__init__(place, script)
        self._wire: Wire | None = None

    def asks(self, number: int) -> list[Ask]:
        count = self.script.chance(number).choice((1, 1, 1, 3, 8))
        return [self.script.ask(number * 64 + one) for one in range(count)]

    def about(self, number: int) -> tuple[str, str, bool, int]:
        first = self.asks(number)[0]
        return self.protocol, first.model, first.is_wrong, 0

    def say(self, number: int) -> Iterator[Said]:
        asks, chance = self.asks(number), self.script.chance(number)
        said = 0
        try:
            wire = self._wire = self._wire or Wire(self.place.http_port, timeout_s=BOUND_S)
            for ask in asks:
                data = _as_chunks(ask, chance) if chance.random() < 0.3 else _whole(ask)
                _send_in_pieces(wire, data, chance)
            closes = False
            for ask in asks:
                reply = wire.reply()
                yield self._judged(ask, reply)
                said += 1
                closes = closes or reply.headers.get("connection") == "close"
            if left := wire.left_over():
                raise WrongAnswer(f"after {len(asks)} answers to {len(asks)} requests there came {left[:80]!r}")
            if closes:
                self.drop()
        except (*_HUNG, *_BROKEN) as error:
            outcome = "hung" if isinstance(error, TimeoutError) else "broken"
            for ask in asks[said:]:
                yield self.said(ask, outcome, repr(error))
                outcome = "broken"
            self.drop()

    def _judged(self, ask: Ask, reply: WireReply) -> Said:
        try:
            return self.judge(ask, reply.status, reply.headers, reply.body)
        except WrongAnswer as wrong:
            return self.said(ask, "wrong", str(wrong))

    def close(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None


def triton_inputs(library: Any, ask: Ask, **options: Any) -> list[Any]:
    """The inputs as either of tritonclient's libraries takes them."""
    made = []
    for one in ask.inputs:
        own = library.InferInput(one.name, one.shape, one.dtype)
        own.set_data_from_numpy(one.values, **options)
        made.append(own)
    return made


def picture_request(picture: Picture) -> bytes:
    """The picture as the body of a request, with its deadline where it has one."""
    query = "" if picture.timeout_ms is None else f"?timeout_ms={picture.timeout_ms:g}"
    return head(f"/predictions/digits{query}", {"Content-Length": str(len(picture.data))}) + picture.data


def _send_in_pieces(wire: Wire, data: bytes, chance: random.Random) -> None:
    """In two of them, or in one."""
    cut = chance.randrange(1, len(data)) if chance.random() < 0.3 else len(data)
    wire.send(data[:cut])
    wire.send(data[cut:])


def _has_something(connection: socket.socket) -> bool:
    """Whether there is something to read, the end for one."""
    look = select.poll()  # not select, which knows no more than 1024 descriptors
    look.register(connection, select.POLLIN)
    return bool(look.poll(0))


def _check_grpc(ask: Ask, answer: Any) -> None:
    response = answer.get_response()
    outputs = {one.name: answer.as_numpy(one.name) for one in response.outputs}
    ask.check(response.model_name, response.model_version, response.id, outputs)


def _by_urllib(url: str, body: bytes) -> tuple[int, bytes]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, body, method="POST"), timeout=BOUND_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def _whole(ask: Ask) -> bytes:
    body, headers = infer_body(ask)
    return head(infer_path(ask), {"Content-Length": str(len(body)), **headers}) + body


def _as_chunks(ask: Ask, chance: Any) -> bytes:
    body, headers = infer_body(ask)
    size = chance.randrange(100, 20_000)
    pieces = [chunk(body[start : start + size]) for start in range(0, len(body), size)]
    return head(infer_path(ask), {"Transfer-Encoding": "chunked", **headers}) + b"".join(pieces) + chunk(b"")


ORDINARY: tuple[type[Client], ...] = (
    *(TritonHttp, TritonGrpc, TritonStream, Httpx, HttpClient, Convoy, Raw),
    *(Album, Form, GrpcPictures),
)
if shutil.which("curl"):
    ORDINARY = (*ORDINARY, Curl)
