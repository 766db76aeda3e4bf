"""`POST /predictions/{model}[/{version}]`: an image in, what is in it out: classes, boxes, or a class of each pixel.

The body is one image, told by its bytes and not by its content type, a multipart form with one or more files, or JSON
with images in base64. Each file is a request of its own: it is decoded, queued and answered by itself, and one that
fails does not harm the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

import orjson

from convoy.app.calls.call import Call, Terms
from convoy.app.calls.options import ServeOptions
from convoy.app.core import Core
from convoy.app.http.body import UploadRoom
from convoy.app.http.compression import quality
from convoy.app.http.hot_route import HotRoute, HttpHead
from convoy.app.http.replies import Reply, error_reply
from convoy.app.http.uploads import JsonImages, boundary_of, is_json, needed_bytes, split_files, split_images
from convoy.app.lifecycle.catalog import Served
from convoy.app.pictures.answering import CLASS_MAP, SegmentedPicture, Wanted, palette_png
from convoy.app.pictures.decoder import Decoder, DecodeWork
from convoy.app.pictures.documents import Document, answer_document, check_takes_pictures, envelope, wanted_of
from convoy.app.pictures.predictor import EncodedPicture, Predicted, Predictor
from convoy.app.protocol.inference import INLINE_BYTES
from convoy.app.scheduling.slab import Slot
from convoy.models.errors import BodyTooLarge, InvalidRequest, RequestError


def in_form(wanted: Wanted, head: HttpHead) -> Wanted:
    """A class map in the form that the request asks for. Raises InvalidRequest."""
    form = head.query.get("format", "")
    if form not in ("", "json", "png"):
        raise InvalidRequest(f"format must be json or png, got {form[:40]!r}")
    is_png = form == "png" or (not form and prefers_png(head.headers.get(b"accept", b"")))
    return wanted._replace(finish=as_png) if is_png else wanted


def prefers_png(accept: bytes) -> bool:
    """Whether an Accept header names PNG, and nothing that JSON would fit better."""
    weights: dict[bytes, float] = {}
    for entry in accept.lower().split(b","):
        kind, _, parameter = entry.partition(b";")
        weights[kind.strip()] = quality(parameter)
    png = weights.get(b"image/png", 0.0)
    return png > 0 and png >= weights.get(b"application/json", 0.0)


def as_png(found: SegmentedPicture) -> bytes:
    """The map alone; what was found beside it is in the pixels."""
    return palette_png(found.class_map)


@dataclass(frozen=True, slots=True)
class _FailedFile:
    """One file of a form that could not be predicted, and what would be answered if it were alone."""

    message: str
    reply: Reply


_Outcome = Document | _FailedFile


class PredictionsRoute(HotRoute):
    """Images in, what is in them out."""

    protocol = "predictions"
    paths = ("/predictions/{model}", "/predictions/{model}/{version}")

    def __init__(self, core: Core, options: ServeOptions, decoder: Decoder, room: UploadRoom) -> None:
        super().__init__(core, options, decoder, room)
        self._predictor = Predictor(decoder, options.max_pixels)

    def admit(self, served: Served) -> None:
        check_takes_pictures(served)

    async def answer(self, call: Call, head: HttpHead, served: Served, body: Slot) -> Reply:
        wanted = _wanted(head, served)
        picture = EncodedPicture(body.view, (body,))
        if not picture.kind:
            content_type = head.headers.get(b"content-type", b"")
            several: Sequence[memoryview | str] | None = None
            if (boundary := boundary_of(content_type)) is not None:
                work = DecodeWork("form", body.view.nbytes, (body,))
                several = (await self.decoder.run(call, work, split_files, body.view, boundary)).result
            elif is_json(body.view, content_type):
                found = await self._split_json(call, body)
                first = found.images[0]
                if found.is_list:
                    several = found.images
                elif isinstance(first, str):
                    raise InvalidRequest(first)
                else:
                    picture = EncodedPicture(first, (body,))
            if several is not None:
                if wanted.finish is as_png:
                    raise InvalidRequest("a PNG has the class map of one image; send one alone, or ask for JSON")
                asking = [self._predict_file(call, served, body, file, wanted) for file in several]
                return _several(call, envelope(served), await _all_of(call, asking))
        seen = await self._predictor.predict(call, served, picture, Terms(), wanted, is_alone=True)
        return _single(served, wanted, seen)

    async def _split_json(self, call: Call, body: Slot) -> JsonImages:
        """Raises RequestError."""
        if body.view.nbytes <= INLINE_BYTES:
            return split_images(body.view)
        needs_bytes = needed_bytes(body.view.nbytes)
        if not call.may_ever_hold(needs_bytes):
            raise BodyTooLarge(
                f"to read JSON of {body.view.nbytes} bytes takes {needs_bytes} beside it, and there are "
                f"{call.core.slab.capacity_bytes} for all requests; send the image itself as the body, or raise "
                "--max-inflight-mb"
            )
        work = DecodeWork("form", body.view.nbytes, (body,), needs_bytes=needs_bytes)
        return (await self.decoder.run(call, work, split_images, body.view)).result

    async def _predict_file(
        self, call: Call, served: Served, body: Slot, encoded: memoryview | str, wanted: Wanted
    ) -> Document | _FailedFile:
        """`encoded` is what is wrong with it, where there are no bytes."""
        try:
            if isinstance(encoded, str):
                raise InvalidRequest(encoded)
            picture = EncodedPicture(encoded, (body,))
            seen = await self._predictor.predict(call, served, picture, Terms(), wanted, is_alone=False)
            return answer_document(wanted, seen)
        except RequestError as error:
            return _failed(error)


async def _all_of(call: Call, asking: list[Coroutine[Any, Any, _Outcome]]) -> list[_Outcome]:
    """What became of each file, in order. A deadline ends those that have no answer by then."""
    tasks, call.owed = [asyncio.ensure_future(one) for one in asking], len(asking)
    late: RequestError | None = None
    try:
        await asyncio.wait(tasks)
    except asyncio.CancelledError as raised:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)  # each gives back what it holds
        cause = call.cause_of(raised)
        if not isinstance(cause, RequestError):
            raise
        late = cause
    call.settle()
    return [_failed(late) if late is not None and task.cancelled() else task.result() for task in tasks]


def _failed(error: RequestError) -> _FailedFile:
    # The words and not the error: its traceback would keep the whole upload in memory.
    return _FailedFile(str(error), error_reply(error))


def _single(served: Served, wanted: Wanted, seen: Predicted) -> Reply:
    headers = (seen.timing.header(),)
    if wanted.finish is as_png:
        return Reply(200, (seen.found,), "image/png", headers)
    return Reply(200, (orjson.dumps({**envelope(served), **answer_document(wanted, seen)}),), headers=headers)


def _several(call: Call, head: Document, outcomes: list[_Outcome]) -> Reply:
    """One result a file, in order; an error status only when every file failed.

    Then one speaks for the form: of those that another try may help, the first, because nobody comes again for the
    others.
    """
    results: list[Document] = []
    failures: list[_FailedFile] = []
    for outcome in outcomes:
        if isinstance(outcome, _FailedFile):
            failures.append(outcome)
            results.append({"error": outcome.message})
        else:
            results.append(outcome)
    is_answered = len(failures) < len(outcomes)
    helped = [one for one in failures if one.reply.status == HTTPStatus.TOO_MANY_REQUESTS or one.reply.status >= 500]
    speaker = None if is_answered else (helped or failures)[0]
    for one in failures:
        if one is not speaker and (reason := one.reply.ending.reason):
            call.core.turned_away(reason)
    if speaker is None:
        return Reply(200, (orjson.dumps({**head, "results": results}),))
    message = f"none of the {len(failures)} files could be predicted; one of them: {speaker.message}"
    body = orjson.dumps({"error": message, "results": results})
    return replace(speaker.reply, pieces=(body,))


def _wanted(head: HttpHead, served: Served) -> Wanted:
    """What a request asks of its pictures. Raises InvalidRequest."""
    wanted = wanted_of(served, head.query.get("top_k"), head.query.get("threshold"))
    return in_form(wanted, head) if wanted.answering is CLASS_MAP else wanted
