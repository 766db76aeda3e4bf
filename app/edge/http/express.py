"""Requests that say what an earlier one said are answered without asking again what that means.

A client sends the same URL and the same JSON before every binary tensor, or around every list of numbers. The first
such request goes the usual way, through ASGI, and what it meant and how it is answered is kept here; the next ones go
from the parser to the scheduler and back in two calls, without a task, a scope or a parsed header. What a connection
has sent so and sends again, byte by byte but for the binary tensors, is not even parsed. Whatever is unusual about a
request, a time limit, a compressed body, one that arrives in pieces, a client that does not read, is the usual way's
business.

Both ways share the codecs: what is sent here is written by the usual way's renderer, but for binary tensors.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from convoy.app.edge.entry import SHUT_DOWN, Entry, outcome_of
from convoy.app.edge.http.body import Body
from convoy.app.edge.http.calls import Call
from convoy.app.edge.http.compression import is_long_enough
from convoy.app.edge.http.direct import Connection
from convoy.app.edge.http.infer_request import has_plain_inputs
from convoy.app.edge.http.infer_response import render_infer
from convoy.app.edge.http.json_documents import INLINE_JSON_BYTES
from convoy.app.edge.http.json_forms import JsonForm, json_form
from convoy.app.edge.http.replies import Reply, answer_head, error_reply, headers_of, internal_error
from convoy.app.edge.oip.exchange import Terms
from convoy.app.edge.oip.inference import INLINE_BYTES, InferRequest
from convoy.app.edge.oip.outputs import WantedOutput
from convoy.app.edge.oip.tensors import TensorRef
from convoy.app.edge.options import EdgeOptions
from convoy.app.edge.timing import SERVER_TIMING, server_timing, timing_ms
from convoy.app.host.logs import request_id
from convoy.app.scheduling.request import Done, Request, Shape, Spent, TensorPlace
from convoy.app.scheduling.slab import ALIGNMENT_BYTES, Slot, SlotState
from convoy.app.submission.inference import InferenceCore, ServedLike
from convoy.app.submission.refusals import check
from convoy.models.errors import RequestError, Unavailable
from convoy.models.spec import ModelSpec

_log = logging.getLogger("convoy")
HEADER_LENGTH = b"inference-header-content-length"
_LARGEST_BYTES = 256 << 10  # of a body: more never arrives in one piece
_LONGEST_HEADER_BYTES = 4 << 10
_MOST_KNOWN = 256
_MOST_FORMS = 16  # of JSON for one URL; each is compared with what comes
_MOST_CHARACTERS_A_BYTE = 6  # of numbers in JSON: `false,` is one byte, `-1.2345678e-10,` are four
# Requests with one of these are never here.
_UNUSUAL = frozenset((b"content-encoding", b"transfer-encoding", b"expect", b"upgrade"))


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """What one kind of request means to one version, and how it is answered.

    What is kept of its body, which has `header_bytes` of JSON before binary tensors, and its outputs lie in one slot of
    `room_bytes`. `call` is its name in the access log.
    """

    call: str
    served: ServedLike
    samples: int
    shapes: tuple[Shape, ...]
    inputs: tuple[TensorPlace, ...]
    wanted: tuple[int, ...]
    outputs: tuple[TensorPlace, ...]
    room_bytes: int
    header_bytes: int
    rendering: Rendering
    may_compress: bool


class Rendering(Protocol):
    """How the answers to one kind of request are written, with bodies of `longest_bytes` at most."""

    @property
    def longest_bytes(self) -> int: ...

    def answer(self, lesson: Lesson, done: Done) -> tuple[bytes, list[bytes | memoryview]]:
        """Status line and the headers that are the reply's own, and the body."""


@dataclass(frozen=True, slots=True)
class BinaryRendering:
    """All outputs are binary tensors of known sizes: nothing but their bytes ever changes."""

    head: bytes
    json: bytes
    longest_bytes: int

    def answer(self, lesson: Lesson, done: Done) -> tuple[bytes, list[bytes | memoryview]]:
        return self.head, [self.json, *[one.data for one in done.answers]]


@dataclass(frozen=True, slots=True)
class JsonRendering:
    """All outputs are numbers in JSON. `request` is what was asked for, without its inputs."""

    request: InferRequest
    longest_bytes: int

    def answer(self, lesson: Lesson, done: Done) -> tuple[bytes, list[bytes | memoryview]]:
        response = render_infer(self.request, lesson.served, done)
        reply = Reply(200, response.pieces, response.content_type)
        return answer_head(200, headers_of(reply)), [*reply.pieces]


class Asked(NamedTuple):
    """What one request says beside its tensors, as far as somebody wants to know. `own_id`: the client's, if any."""

    lesson: Lesson
    headers: list[tuple[bytes, bytes]]
    own_id: bytes | None
    trace: bytes | None


class Found(NamedTuple):
    """What is asked, the bytes of it that belong into the slot, and how long it took to make them out of the body."""

    asked: Asked
    data: bytes | memoryview
    decode_ns: int = 0


class Template(NamedTuple):
    """A whole request as it came in one piece; others that begin so and are as long differ in their tensors alone.

    `opening` is everything before those, from the method to the end of the JSON. It holds for one `edition` of the
    catalog, on the connection that sent it, between two requests.
    """

    opening: bytes
    nbytes: int
    body_at: int
    edition: int
    asked: Asked


class Express:
    """One server's lessons. Belongs to the event loop."""

    def __init__(self, core: InferenceCore, options: EdgeOptions) -> None:
        self.core = core
        self.entry = Entry(options)
        self.targets: set[bytes] = set()  # URLs about which there is a lesson
        self._is_on = not options.default_timeout_ms
        self._lessons: dict[tuple[bytes, int, bytes], Lesson] = {}
        self._json_lessons: dict[bytes, list[tuple[JsonForm, Lesson]]] = {}
        self._known = 0
        self._edition = -1

    def learn(
        self, call: Call, body: Body, header_length: int | None, request: InferRequest, served: ServedLike, reply: Reply
    ) -> None:
        """A call whose body begins with so much JSON, None: is all JSON, was understood so, and is answered so."""
        json_bytes = body.nbytes if header_length is None else header_length
        longest = INLINE_JSON_BYTES if header_length is None else _LONGEST_HEADER_BYTES
        if call.scope["query_string"] or body.nbytes > _LARGEST_BYTES or json_bytes > longest:
            return
        # The version may have been withdrawn, or another come in its place, while the call waited for its answer.
        if not self._is_on or call.edition != self.core.catalog.edition or request.terms != Terms():
            return
        rendering = _rendering(request, served, reply)
        if rendering is None:
            return
        self._forget_if_old()
        if header_length is None:
            self._learn_form(call, bytes(body.view), request, served, rendering)
        else:
            self._learn_header(call, body, header_length, request, served, rendering)

    def _learn_header(
        self, call: Call, body: Body, length: int, request: InferRequest, served: ServedLike, rendering: Rendering
    ) -> None:
        url: bytes = call.scope["raw_path"]
        kind = (url, body.nbytes, bytes(body.view[:length]))
        if kind not in self._lessons and has_plain_inputs(request, served.spec):
            inputs = tuple(
                TensorPlace(0, ref.offset, ref.nbytes) for ref in request.tensors if isinstance(ref, TensorRef)
            )
            lesson = _lesson(call, request, served, inputs, body.nbytes, length, rendering)
            self._make_room(url)
            self._lessons[kind] = lesson

    def _learn_form(
        self, call: Call, text: bytes, request: InferRequest, served: ServedLike, rendering: Rendering
    ) -> None:
        url: bytes = call.scope["raw_path"]
        if any(form.fits(text) for form, _ in self._json_lessons.get(url, ())):
            return
        form = json_form(text, request, served.spec)
        if form is not None:
            nbytes = form.count * form.dtype.itemsize
            lesson = _lesson(call, request, served, (TensorPlace(0, 0, nbytes),), nbytes, 0, rendering)
            self._make_room(url)
            # The newest first: a client that says something else each time must not hide the one who repeats itself.
            self._json_lessons[url] = [(form, lesson), *self._json_lessons.get(url, ())][:_MOST_FORMS]

    def _make_room(self, url: bytes) -> None:
        if self._known >= _MOST_KNOWN:
            self._forget()
        self._known += 1
        self.targets.add(url)

    def find(self, connection: Connection, body: bytes) -> Found | None:
        """What is asked by a request whose body is there; None where that is not for here."""
        headers = dict(connection.headers)
        if not _UNUSUAL.isdisjoint(headers) or not self.entry.keys.is_key(headers.get(b"authorization")):
            return None
        self._forget_if_old()
        length = headers.get(HEADER_LENGTH)
        if length is None:
            decode_ns = -time.monotonic_ns()
            lesson, data = self._find_form(connection.url, body)
            decode_ns += time.monotonic_ns()
        elif length.isdigit() and len(length) <= 4:
            lesson, data = self._lessons.get((connection.url, len(body), body[: int(length)])), body
            decode_ns = 0
        else:
            return None
        if lesson is None or (lesson.may_compress and b"accept-encoding" in headers):
            return None
        asked = Asked(lesson, connection.headers, headers.get(b"x-request-id"), headers.get(b"traceparent"))
        return Found(asked, data, decode_ns)

    def _find_form(self, url: bytes, text: bytes) -> tuple[Lesson | None, bytes | memoryview]:
        for form, lesson in self._json_lessons.get(url, ()):
            values = form.values(text)
            if values is not None:
                return lesson, values.data.cast("B")
        return None, b""

    def template(self, data: bytes, body: bytes, asked: Asked) -> Template | None:
        """For requests like this one, which is all of `data`; None where that may not be, or will not come again."""
        body_at = len(data) - len(body)
        if not asked.lesson.header_bytes:
            return None
        if asked.own_id is not None or asked.trace is not None or data.find(b"\r\n\r\n") + 4 != body_at:
            return None
        opening = data[: body_at + asked.lesson.header_bytes]
        return Template(opening, len(data), body_at, self._edition, asked)

    def passage(self, connection: Connection, asked: Asked, arrival_ns: int) -> Passage | None:
        """What answers a request; None, and nothing has happened, where only the usual way can."""
        core = self.core
        if core.leaving:
            return None
        slot = core.slab.reserve(asked.lesson.room_bytes)
        return None if slot is None else Passage(self, connection, asked, slot, arrival_ns)

    def repeated(self, connection: Connection, template: Template, arrival_ns: int) -> Passage | None:
        """The same for what a template tells."""
        if template.edition != self.core.catalog.edition:
            return None
        return self.passage(connection, template.asked, arrival_ns)

    def _forget_if_old(self) -> None:
        edition = self.core.catalog.edition
        if edition != self._edition:
            self._edition = edition
            self._forget()

    def _forget(self) -> None:
        self._lessons.clear()
        self._json_lessons.clear()
        self.targets.clear()
        self._known = 0


class _Heard:
    """In the place of the event that uvicorn's cycle wakes its application with."""

    def set(self) -> None:
        pass


class Passage:
    """One request on its way. Stands where uvicorn has its cycle, for whoever asks a connection how far it is."""

    __slots__ = (
        *("_arrival_ns", "_connection", "_decode_ns", "_express", "_has_left", "_headers", "_lesson", "_own_id"),
        *("_request", "_slot", "_trace"),
        *("disconnected", "keep_alive", "response_complete", "template"),
    )
    more_body: ClassVar = False
    message_event: ClassVar = _Heard()

    def __init__(self, express: Express, connection: Connection, asked: Asked, slot: Slot, arrival_ns: int) -> None:
        self._express, self._connection, self._slot, self._arrival_ns = express, connection, slot, arrival_ns
        self._lesson, self._headers, own_id, self._trace = asked
        self._own_id = express.entry.request_id(own_id)
        self._decode_ns = 0
        self._request: Request | None = None
        self._has_left = False
        self.keep_alive = True
        self.response_complete = self.disconnected = False
        self.template: Template | None = None  # for the next request of the connection

    def begin(self, data: bytes | memoryview, decode_ns: int = 0) -> None:
        """Queue the request, or answer at once that it is not taken. `decode_ns` is what `data` has cost already."""
        core, ref = self._express.core, self._slot.ref
        core.begin_call()
        self._lesson.served.enter()
        try:
            core.take(self._decoded(data, decode_ns), self._ended)
        except RequestError as error:
            core.slab.free(ref)
            self._refuse(error)
        except Exception:  # else the parser would call the client's request malformed
            self._failed()

    def _decoded(self, data: bytes | memoryview, decode_ns: int) -> Request:
        started_ns = time.monotonic_ns() - decode_ns
        lesson, core = self._lesson, self._express.core
        self._slot.view[: len(data)] = data
        self._request = request = Request(
            core.next_request_id(),
            lesson.served.key,
            lesson.samples,
            lesson.shapes,
            (self._slot.ref,),
            lesson.inputs,
            lesson.wanted,
            lesson.outputs,
            self._arrival_ns,
        )
        self._decode_ns = time.monotonic_ns() - started_ns
        return request

    def client_left(self) -> None:
        """Nobody reads the answer. The scheduler gives the memory back when no engine uses it any more."""
        assert self._request is not None
        self.disconnected = True
        self._express.core.cancel(self._request, "CANCELED")
        self._leave("cancelled", 0)

    def give_up(self) -> None:
        """The time to answer what was accepted is over."""
        assert self._request is not None
        self._express.core.cancel(self._request, "CANCELED")
        self.keep_alive = False
        self._refuse(Unavailable(SHUT_DOWN), "cancelled")

    def _ended(self, end: Done | RequestError) -> None:
        if isinstance(end, RequestError):
            self._refuse(end)
            return
        try:
            self._answer(check(end))
        except RequestError as error:
            self._refuse(error)
        except Exception:  # else the client would wait for ever
            self._failed()

    def _answer(self, done: Done) -> None:
        started_ns = time.monotonic_ns()
        core, lesson, slot = self._express.core, self._lesson, self._slot
        name, timing = server_timing(timing_ms(done, self._decode_ns, started_ns - self._arrival_ns))
        head, body = lesson.rendering.answer(lesson, done)
        self._send(200, [head, name, b": ", timing, b"\r\n", *self._own_headers(), *body])
        core.slab.free(slot.ref)
        ended_ns = time.monotonic_ns()
        took_ns = ended_ns - self._arrival_ns
        core.call_answered(lesson.served.key, "v2", Spent(self._decode_ns, ended_ns - started_ns, took_ns))
        self._let_go(200, took_ns)

    def _refuse(self, error: RequestError, outcome: str | None = None) -> None:
        reply = error_reply(error)
        self._send(reply.status, [answer_head(reply.status, headers_of(reply)), *self._own_headers(), *reply.pieces])
        self._leave(outcome or outcome_of(reply.status), reply.status)

    def _failed(self) -> None:
        """What the gate does with whatever nobody foresaw."""
        token = request_id.set(self._own_id.decode())
        _log.exception("%s failed; this is a bug", self._lesson.call)
        request_id.reset(token)
        slab, ref = self._express.core.slab, self._slot.ref
        if slab.state(ref) in (SlotState.FILLING, SlotState.ANSWERED):
            slab.free(ref)
        if self._request is not None:
            self._express.core.cancel(self._request, "OTHER")  # harmless after its end
        if not self.response_complete:
            reply = internal_error(self._own_id)
            self._send(500, [answer_head(500, headers_of(reply)), *self._own_headers(), *reply.pieces])
        self._leave("failed", 500)

    def _own_headers(self) -> list[bytes]:
        """What every answer has, and the end of the headers."""
        lines = [b"x-request-id: ", self._own_id]
        if self._trace is not None:
            lines += (b"\r\ntraceparent: ", self._trace)
        if self._express.core.leaving:
            # The client's next request then goes elsewhere, and not into a closing connection.
            self.keep_alive = False
        lines.append(b"\r\n\r\n" if self.keep_alive else b"\r\nconnection: close\r\n\r\n")
        return lines

    def _send(self, status: int, pieces: list[bytes | memoryview]) -> None:
        transport = self._connection.transport
        transport.write(b"".join(pieces))
        self.response_complete = True
        if not self.keep_alive:
            transport.close()
        self._connection.on_response_complete()

    def _leave(self, outcome: str, status: int) -> None:
        """Count a call without an answer that it wanted, once; `status` 0: there was none at all."""
        if self._has_left:
            return
        core, key = self._express.core, self._lesson.served.key
        took_ns = time.monotonic_ns() - self._arrival_ns
        if self._request is not None:
            core.stage_took(key, "decode", self._decode_ns)
        core.call_ended(key, "v2", outcome, took_ns)
        self._let_go(status, took_ns)

    def _let_go(self, status: int, took_ns: int) -> None:
        """Of everything but the memory; the call has been counted."""
        self._has_left = True
        self._lesson.served.leave()
        self._express.core.end_call()
        entry = self._express.entry
        is_error = not 200 <= status < 400
        if entry.wants_line(is_error, took_ns / 1e6):
            token = request_id.set(self._own_id.decode())
            client, call = _client(self._connection, self._headers), self._lesson.call
            entry.log(client, call, str(status or "left"), took_ns / 1e6, is_error=is_error, trace=self._trace)
            request_id.reset(token)


def _client(connection: Connection, headers: list[tuple[bytes, bytes]]) -> str:
    """Who asked: as uvicorn has it for ASGI, which believes what a proxy on this machine says."""
    host, _ = connection.client or ("-", 0)
    given = [value for name, value in headers if name == b"x-forwarded-for"]
    middleware = connection.config.loaded_app
    if not given or not isinstance(middleware, ProxyHeadersMiddleware) or host not in middleware.trusted_hosts:
        return host
    forwarded, _ = middleware.trusted_hosts.get_trusted_client_address(b", ".join(given).decode("latin-1"))
    return forwarded or host


def _rendering(request: InferRequest, served: ServedLike, reply: Reply) -> Rendering | None:
    """How another such request is answered; None where an answer's form or length is not known before it."""
    spec = served.spec
    if any(
        wanted.classes or wanted.place is not None or not spec.outputs[wanted.index].sample_bytes
        for wanted in request.outputs
    ):
        return None
    if all(wanted.binary for wanted in request.outputs):
        always = [header for header in headers_of(reply) if header[0] != SERVER_TIMING]
        return BinaryRendering(answer_head(200, always), bytes(reply.pieces[0]), reply.length)
    nbytes = sum([_nbytes(request, spec, wanted) for wanted in request.outputs])
    if any(wanted.binary for wanted in request.outputs) or nbytes > INLINE_BYTES:
        return None
    return JsonRendering(request._replace(tensors=()), reply.length + _MOST_CHARACTERS_A_BYTE * nbytes)


def _nbytes(request: InferRequest, spec: ModelSpec, wanted: WantedOutput) -> int:
    return request.samples * (spec.outputs[wanted.index].sample_bytes or 0)


def _lesson(
    call: Call,
    request: InferRequest,
    served: ServedLike,
    inputs: tuple[TensorPlace, ...],
    nbytes: int,
    header_length: int,
    rendering: Rendering,
) -> Lesson:
    """`inputs` lie in the first `nbytes` of the slot."""
    offset = -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    outputs = []
    for wanted in request.outputs:
        size = _nbytes(request, served.spec, wanted)
        outputs.append(TensorPlace(0, offset, size))
        offset += size
    return Lesson(
        call=f"POST {call.scope['path']}",
        served=served,
        samples=request.samples,
        shapes=request.shapes,
        inputs=inputs,
        wanted=tuple(wanted.index for wanted in request.outputs),
        outputs=tuple(outputs),
        room_bytes=offset,
        header_bytes=header_length,
        rendering=rendering,
        may_compress=is_long_enough(rendering.longest_bytes),
    )
