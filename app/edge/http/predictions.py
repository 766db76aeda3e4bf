"""`POST /predictions/{model}[/{version}]`: an image in, what is in it out: classes, boxes, or a class of each pixel.

The body is one image, told by its bytes and not by its content type, a multipart form with one or more files, or JSON
with images in base64. Each file is a request of its own: it is decoded, queued and answered by itself, and one that
fails does not harm the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus

import orjson

from convoy.app.core import Core
from convoy.app.edge.http.body import Body, UploadRoom
from convoy.app.edge.http.class_maps import as_png, in_form
from convoy.app.edge.http.hot_route import HotRoute, HttpHead
from convoy.app.edge.http.json_images import JsonImages, is_json, needed_bytes, split_images
from convoy.app.edge.http.multipart import boundary_of, split_files
from convoy.app.edge.http.replies import Reply, error_reply
from convoy.app.edge.oip.answering import CLASS_MAP, Wanted
from convoy.app.edge.oip.call import Call, Terms
from convoy.app.edge.oip.decoder import Decoder, DecodeWork
from convoy.app.edge.oip.inference import INLINE_BYTES
from convoy.app.edge.oip.picture_answers import Document, answer_document, check_takes_pictures, envelope, wanted_of
from convoy.app.edge.oip.pictures import EncodedPicture
from convoy.app.edge.oip.predicting import Predicted, Predictor
from convoy.app.edge.options import EdgeOptions
from convoy.app.edge.timing import server_timing
from convoy.app.lifecycle.catalog import Served
from convoy.app.scheduling.slab import Slot
from convoy.models.errors import BodyTooLarge, InvalidRequest, RequestError


@dataclass(frozen=True, slots=True)
class _FailedFile:
    """One file of a form that could not be predicted, and what would be answered if it were alone."""

    message: str
    reply: Reply


class PredictionsRoute(HotRoute):
    """Images in, what is in them out."""

    protocol = "predictions"

    def __init__(self, core: Core, options: EdgeOptions, decoder: Decoder, room: UploadRoom) -> None:
        super().__init__(core, options, decoder, room)
        self._predictor = Predictor(decoder, options.max_pixels)

    def admit(self, served: Served) -> None:
        check_takes_pictures(served)

    async def answer(self, call: Call, head: HttpHead, served: Served, body: Body) -> Reply:
        wanted, terms = _wanted(head, served), Terms(head.timeout_ms)
        picture = EncodedPicture(body.view, (body.slot,))
        if not picture.kind:
            content_type = head.headers.get(b"content-type", b"")
            several: Sequence[memoryview | str] | None = None
            if (boundary := boundary_of(content_type)) is not None:
                work = DecodeWork("form", body.nbytes, (body.slot,), call.deadline_ns(terms.timeout_ms))
                several = (await self.decoder.run(call, work, split_files, body.view, boundary)).result
            elif is_json(body.view, content_type):
                found = await self._split_json(call, body, terms)
                first = found.images[0]
                if found.is_list:
                    several = found.images
                elif isinstance(first, str):
                    raise InvalidRequest(first)
                else:
                    picture = EncodedPicture(first, (body.slot,))
            if several is not None:
                if wanted.finish is as_png:
                    raise InvalidRequest("a PNG has the class map of one image; send one alone, or ask for JSON")
                outcomes = await asyncio.gather(
                    *(self._predict_file(call, served, body.slot, file, terms, wanted) for file in several),
                    return_exceptions=True,
                )
                return _several(call, envelope(served), outcomes)
        seen = await self._predictor.predict(call, served, picture, terms, wanted, is_alone=True)
        return _single(served, wanted, seen)

    async def _split_json(self, call: Call, body: Body, terms: Terms) -> JsonImages:
        """Raises RequestError or ClientGone."""
        if body.nbytes <= INLINE_BYTES:
            return split_images(body.view)
        needs_bytes = needed_bytes(body.nbytes)
        if not call.may_ever_hold(needs_bytes):
            raise BodyTooLarge(
                f"to read JSON of {body.nbytes} bytes takes {needs_bytes} beside it, and there are "
                f"{call.core.slab.capacity_bytes} for all requests; send the image itself as the body, or raise "
                "--max-inflight-mb"
            )
        deadline_ns = call.deadline_ns(terms.timeout_ms)
        work = DecodeWork("form", body.nbytes, (body.slot,), deadline_ns, needs_bytes=needs_bytes)
        return (await self.decoder.run(call, work, split_images, body.view)).result

    async def _predict_file(
        self, call: Call, served: Served, body: Slot, encoded: memoryview | str, terms: Terms, wanted: Wanted
    ) -> Document | _FailedFile:
        """`encoded` is what is wrong with it, where there are no bytes."""
        try:
            if isinstance(encoded, str):
                raise InvalidRequest(encoded)
            picture = EncodedPicture(encoded, (body,))
            seen = await self._predictor.predict(call, served, picture, terms, wanted, is_alone=False)
            return answer_document(wanted, seen)
        except RequestError as error:
            # The words and not the error: its traceback would keep the whole upload in memory.
            return _FailedFile(str(error), error_reply(error))


def _single(served: Served, wanted: Wanted, seen: Predicted) -> Reply:
    headers = (server_timing(seen.stages_ns),)
    if wanted.finish is as_png:
        return Reply(200, (seen.found,), "image/png", headers)
    return Reply(200, (orjson.dumps({**envelope(served), **answer_document(wanted, seen)}),), headers=headers)


def _several(call: Call, head: Document, outcomes: list[Document | _FailedFile | BaseException]) -> Reply:
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
        elif isinstance(outcome, BaseException):
            raise outcome
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
