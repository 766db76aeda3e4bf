"""The clients: tritonclient over gRPC, forms and plain sockets over HTTP; some hurry, leave or read slowly.

A client knows where the server is and what it asks, one call at a time. It holds every answer against the model's own
arithmetic and gives each request of a call exactly one ending. Which endings are allowed is the business of `checks`.
"""

from __future__ import annotations

import json
import select
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from tests.campaign.asks import LARGE_SIDES_PX, MODELS, SIDES_PX, Ask, Asked, Picture, Script, WrongAnswer
from tests.support.wire import Wire

# No call may take longer, whatever happens to the server meanwhile.
BOUND_S = 25.0
# How the words of a form's answer begin of which some files, which were right, were refused or late.
PARTLY = "in part: "
_HUNG = (TimeoutError, httpx.TimeoutException)
_BROKEN = (OSError, httpx.TransportError)
# The word for an HTTP status that is no success; any other was promised by nobody.
BY_STATUS = {
    429: "rejected",
    503: "failed",
    504: "deadline_exceeded",
    **dict.fromkeys((400, 404, 405, 408, 413, 415, 431), "invalid"),
}
_BY_CODE = {
    "INVALID_ARGUMENT": "invalid",
    "NOT_FOUND": "invalid",
    "RESOURCE_EXHAUSTED": "rejected",
    "DEADLINE_EXCEEDED": "deadline_exceeded",
    "UNAVAILABLE": "failed",
    # The library's own, of a call that came in the moment in which its server was closed.
    "CANCELLED": "broken",
}
_BROKEN_WORDS = ("connect", "socket closed", "goaway", "recvmsg", "stream removed", "connection reset", "broken pipe")
_BY_WORDS = (
    ("rejected", ("maximum queue size", "no memory for", "miss the deadline")),
    ("deadline_exceeded", ("timeout expired",)),
    ("failed", ("shut down", "shutting down", "being replaced", "being loaded", "at ready state", "not ready")),
    ("broken", _BROKEN_WORDS),
)
Outcome = tuple[str, str]  # an outcome of `Ending`, and the words of the error
Draw = Callable[[Script, int], Sequence[Asked]]  # the requests of the call with this number


@dataclass(frozen=True, slots=True)
class Ending:
    """One request and what became of it. Times are seconds since the campaign began.

    `outcome` is the server's word for it (success, invalid, rejected, deadline_exceeded, failed) or what only a client
    sees. `left`: it went away on purpose. `broken`: no answer, but the end of the connection. `hung`: neither within
    the bound. `wrong`: an answer that is not right. `undocumented`: a status that nobody promised.
    """

    client: str
    number: int
    protocol: str
    model: str
    outcome: str
    sent_s: float
    ended_s: float
    words: str = ""
    asked_wrong: bool = False  # the request had a fault of its own


def outcome_of_grpc(code: str, words: str, took_s: float) -> str:
    """The word for a gRPC status; a client that waits no longer gives its call the status of a deadline."""
    name = code.removeprefix("StatusCode.")
    if name == "DEADLINE_EXCEEDED" and took_s > 0.95 * BOUND_S:
        return "hung"
    if name == "UNAVAILABLE" and any(word in words.lower() for word in _BROKEN_WORDS):
        return "broken"
    return _BY_CODE.get(name, "undocumented")


def outcome_of_words(words: str) -> str:
    """The word for an error of which only the text has come, as in a stream or a form."""
    lowered = words.lower()
    return next((outcome for outcome, known in _BY_WORDS if any(one in lowered for one in known)), "invalid")


def error_words(body: bytes) -> str:
    """The words of an error, which must be in the form that all errors have. Raises WrongAnswer."""
    try:
        words = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        raise WrongAnswer(f"an error that is not {{'error': words}}: {body[:120]!r}") from None
    if not isinstance(words, str) or not words:
        raise WrongAnswer(f"an error without words: {body[:120]!r}")
    return words


@dataclass(frozen=True, slots=True)
class Place:
    """Where the server is; the same after every restart. `now_s` is the campaign's clock."""

    http_port: int
    grpc_port: int
    now_s: Callable[[], float]


class Client(ABC):
    """One client; used by one thread. `protocol` is what the server calls the wire in its counters."""

    _own: Any = None  # what is open between two calls

    def __init__(self, place: Place, script: Script, protocol: str, draw: Draw) -> None:
        self.place, self.script, self.protocol, self.draw = place, script, protocol, draw

    @abstractmethod
    def outcomes(self, number: int, asked: Sequence[Asked]) -> Iterator[Outcome]:
        """Make the call; what breaks off raises, and `call` gives the rest its endings."""

    def close(self) -> None:
        """Forget whatever is open; the next call opens it again."""
        if self._own is not None:
            self._own.close()
        self._own = None

    def call(self, kind: str, number: int) -> list[Ending]:
        """Make one call; exactly one ending for each of its requests, whatever happens."""
        sent_s, asked, found = self.place.now_s(), self.draw(self.script, number), list[Outcome]()
        try:
            found.extend(self.outcomes(number, asked))
        except (WrongAnswer, *_HUNG, *_BROKEN) as error:
            how = "wrong" if isinstance(error, WrongAnswer) else "hung" if isinstance(error, _HUNG) else "broken"
            found.append((how, str(error) or repr(error)))
            self.close()
        found += [("broken", "after another of the same call")] * (len(asked) - len(found))
        ended_s = self.place.now_s()
        return [
            Ending(kind, number, self.protocol, one.model, how, sent_s, ended_s, words, one.is_wrong)
            for one, (how, words) in zip(asked, found, strict=True)
        ]


class TritonGrpc(Client):
    """tritonclient.grpc, one call at a time."""

    def client(self) -> triton_grpc.InferenceServerClient:
        self._own = self._own or triton_grpc.InferenceServerClient(f"127.0.0.1:{self.place.grpc_port}")
        return self._own

    def outcomes(self, number: int, asked: Sequence[Asked]) -> Iterator[Outcome]:
        (ask,), began_s = asked, time.monotonic()
        try:
            answer = self.client().infer(ask.model, _inputs(ask), client_timeout=BOUND_S, request_id=ask.id)
        except InferenceServerException as error:
            yield outcome_of_grpc(str(error.status()), str(error), time.monotonic() - began_s), str(error)
            return
        _check_grpc(ask, answer)
        yield "success", ""


class TritonStream(TritonGrpc):
    """tritonclient.grpc, some requests in one stream; answers must come in their order, one for each."""

    def outcomes(self, number: int, asked: Sequence[Asked]) -> Iterator[Outcome]:
        answers, came, client = list[tuple[Any, Any]](), threading.Semaphore(0), self.client()

        def take(result: Any, error: Any) -> None:
            answers.append((result, error))
            came.release()

        client.start_stream(take)
        # The first that cannot be sent tells that the stream has ended.
        unsent = next(filter(None, (_send_in_stream(client, ask) for ask in asked)), "")
        until_s, has_ended = time.monotonic() + BOUND_S, False
        for place, ask in enumerate(asked):
            if has_ended or not came.acquire(timeout=max(0.01, until_s - time.monotonic())):
                yield "broken" if has_ended or unsent else "hung", unsent or "no answer in its stream"
                has_ended = True
                continue
            result, error = answers[place]
            if error is None:
                _check_grpc(ask, result)
                yield "success", ""
                continue
            code, words = str(error.status() or ""), str(error.message() or "")
            has_ended = bool(code)  # a status ends the stream; an error without one is an answer
            yield outcome_of_grpc(code, words, 0.0) if code else outcome_of_words(words), words
        client.stop_stream(cancel_requests=has_ended)
        # The end of a stream that breaks off comes as one more, with a status.
        if more := [one for one in answers[len(asked) :] if one[1] is None or not one[1].status()]:
            raise WrongAnswer(f"{len(asked) + len(more)} answers to {len(asked)} requests of a stream")
        if has_ended:
            self.close()


class GrpcLeaver(TritonGrpc):
    """Cancels its calls, and its streams with some requests in them."""

    def outcomes(self, number: int, asked: Sequence[Asked]) -> Iterator[Outcome]:
        client, leaves_after_s = self.client(), self.script.chance(number).choice((0.0, 0.001, 0.01))
        if len(asked) == 1:
            call = client.async_infer(asked[0].model, _inputs(asked[0]), lambda result, error: None)
            time.sleep(leaves_after_s)
            call.cancel()
        else:
            client.start_stream(lambda result, error: None)
            for ask in asked:
                _send_in_stream(client, ask)
            time.sleep(leaves_after_s)
            client.stop_stream(cancel_requests=True)
        yield from [("left", "cancelled")] * len(asked)


class Form(Client):
    """Forms of some files, each with its own answer, in their order. To the server's counters a form is one request."""

    def outcomes(self, number: int, asked: Sequence[Asked]) -> Iterator[Outcome]:
        self._own = self._own or httpx.Client(trust_env=False, verify=False, timeout=BOUND_S)
        pictures = _files(self.script, number)
        files = [("file", (f"{place}.any", one.data)) for place, one in enumerate(pictures)]
        answer = self._own.post(f"http://127.0.0.1:{self.place.http_port}/predictions/digits", files=files)
        if answer.status_code != 200:
            yield BY_STATUS.get(answer.status_code, "undocumented"), error_words(answer.content)
            return
        document, refused = answer.json(), ""
        # A form of one file is answered as that file alone would be.
        results = document.get("results", [document])
        for picture, result in zip(pictures, results, strict=True):
            if "error" not in result:
                picture.check(result)
            elif not picture.is_wrong:
                refused = result["error"]
                if outcome_of_words(refused) == "invalid":
                    raise WrongAnswer(f"a file that is right was called wrong: {refused}")
        yield "success", f"{PARTLY}{refused}" if refused else ""


class Plain(Client):
    """Plain sockets: requests pipelined over a kept connection, some in pieces, tensors sometimes in chunks.

    One that `waits_s` does not read for as long, and has a connection of its own for each call.
    """

    def __init__(self, place: Place, script: Script, protocol: str, draw: Draw, waits_s: float = 0.0) -> None:
        super().__init__(place, script, protocol, draw)
        self._waits_s = waits_s

    def outcomes(self, number: int, asked: Sequence[Asked]) -> Iterator[Outcome]:
        wire, chance = self._connection(), self.script.chance(number)
        for one in asked:
            data = one.request(chance.randrange(100, 20_000) if chance.random() < 0.3 else None)
            cut = chance.randrange(1, len(data)) if chance.random() < 0.3 else len(data)
            wire.send(data[:cut])
            wire.send(data[cut:])
        time.sleep(self._waits_s)
        closes = self._waits_s > 0
        for one in asked:
            reply = wire.reply()
            closes = closes or reply.headers.get("connection") == "close"
            if reply.status == 200:
                one.check_reply(reply.headers, reply.body)
                yield "success", ""
            else:
                yield BY_STATUS.get(reply.status, "undocumented"), error_words(reply.body)
        if left := wire.left_over():
            raise WrongAnswer(f"after {len(asked)} answers to {len(asked)} requests there came {left[:80]!r}")
        if closes:
            self.close()

    def _connection(self) -> Wire:
        """The kept one, unless the server closed it while it was quiet. Raises WrongAnswer for an answer to nothing."""
        if self._own is not None:
            if stray := self._own.left_over():
                raise WrongAnswer(f"between two calls there came {stray[:80]!r}")
            look = select.poll()  # not select, which knows no more than 1024 descriptors
            look.register(self._own.socket, select.POLLIN)
            if look.poll(0):
                self.close()
        buffer = 4096 if self._waits_s else None
        self._own = self._own or Wire(self.place.http_port, timeout_s=BOUND_S, receive_buffer=buffer)
        return self._own


class Leaver(Plain):
    """Goes away in the middle: of its headers, its body, the wait, the decoding, the answer."""

    def outcomes(self, number: int, asked: Sequence[Asked]) -> Iterator[Outcome]:
        chance, data = self.script.chance(number), asked[0].request()
        way = chance.choice(("headers", "body", "wait", "wait", "answer"))
        begins = data.index(b"\r\n\r\n") + 4
        end = {"headers": chance.randrange(1, begins - 1), "body": chance.randrange(begins, len(data))}.get(way)
        wire = Wire(self.place.http_port, timeout_s=BOUND_S, receive_buffer=4096)
        try:
            wire.send(data[:end])
            time.sleep(chance.choice((0.0, 0.001, 0.005, 0.03)))
            if way == "answer":
                wire.socket.recv(chance.randrange(1, 400))
        finally:
            (wire.reset if chance.random() < 0.7 else wire.close)()
        yield "left", way


def _inputs(ask: Ask) -> list[Any]:
    """The inputs as tritonclient takes them."""
    made = [triton_grpc.InferInput(one.name, one.shape, one.dtype) for one in ask.inputs]
    for own, one in zip(made, ask.inputs, strict=True):
        own.set_data_from_numpy(one.values)
    return made


def _send_in_stream(client: triton_grpc.InferenceServerClient, ask: Ask) -> str:
    """Why it could not be sent: the stream has ended. Empty where it was."""
    try:
        client.async_stream_infer(ask.model, _inputs(ask), request_id=ask.id)
    except InferenceServerException as error:
        return str(error)
    return ""


def _check_grpc(ask: Ask, answer: Any) -> None:
    response = answer.get_response()
    outputs = {one.name: answer.as_numpy(one.name) for one in response.outputs}
    ask.check(response.model_name, response.model_version, response.id, outputs)


def _asks(script: Script, number: int, counts: Sequence[int], models: tuple[str, ...] = MODELS) -> list[Asked]:
    """As many as one of `counts` says."""
    return [script.ask(number * 64 + one, models=models) for one in range(script.chance(number).choice(counts))]


def _files(script: Script, number: int) -> list[Picture]:
    return [script.picture(number * 8 + one) for one in range(1 + script.chance(number).randrange(6))]


def _flood(script: Script, number: int) -> list[Asked]:
    return [script.picture(number * 40 + one, SIDES_PX[:1], hurried=True) for one in range(40)]


_TWO = ("identity_fp32", "simple")
KINDS: dict[str, Callable[[Place, Script], Client]] = {
    "grpc": lambda p, s: TritonGrpc(p, s, "grpc", lambda s, n: [s.ask(n)]),
    "stream": lambda p, s: TritonStream(p, s, "grpc", lambda s, n: _asks(s, n, range(1, 17))),
    "tensors": lambda p, s: Plain(p, s, "v2", lambda s, n: _asks(s, n, (1, 1, 1, 3, 8))),
    "pictures": lambda p, s: Plain(p, s, "predictions", lambda s, n: [s.picture(n)]),
    # A sound file of a form speaks for it, if there is one.
    "form": lambda p, s: Form(p, s, "predictions", lambda s, n: [min(_files(s, n), key=lambda one: one.is_wrong)]),
    "slow-reader": lambda p, s: Plain(p, s, "v2", lambda s, n: _asks(s, n, (8,), _TWO[:1]), waits_s=0.3),
    "hurried": lambda p, s: Plain(p, s, "v2", lambda s, n: [s.ask(n, hurried=True)]),
    "flood": lambda p, s: Plain(p, s, "predictions", _flood),
    "large": lambda p, s: Plain(
        p, s, "predictions", lambda s, n: [s.picture(n, LARGE_SIDES_PX, hurried=s.chance(n).random() < 0.7)]
    ),
    "leaver": lambda p, s: Leaver(p, s, "v2", lambda s, n: _asks(s, n, (1,), _TWO)),
    "picture-leaver": lambda p, s: Leaver(
        p, s, "predictions", lambda s, n: [s.picture(n, (*SIDES_PX, LARGE_SIDES_PX[0]))]
    ),
    "grpc-leaver": lambda p, s: GrpcLeaver(p, s, "grpc", lambda s, n: _asks(s, n, (1, 1, 20), _TWO)),
}
