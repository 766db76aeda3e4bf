"""`POST /predictions/{model}[/{version}]`: an image in; classes, boxes or a class map out.

The body is one image, recognised by its bytes and not by its content type, or a multipart form with files, or JSON with
images in base64. Each file is a request of its own: it is decoded, queued and answered by itself, and one that fails
does not affect the others.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from http import HTTPStatus
from typing import Any

import orjson

from convoy.app.calls.access import ServeOptions
from convoy.app.calls.call import Call, Terms
from convoy.app.core import Core
from convoy.app.http.body import UploadRoom
from convoy.app.http.gate import HotRoute, RequestContext
from convoy.app.http.replies import Reply, error_reply, quality
from convoy.app.http.uploads import FormFile, boundary_of, is_json, split_files, split_images
from convoy.app.lifecycle.catalog import Served
from convoy.app.pictures.answering import BOXES, CLASS_MAP, Answering, SegmentedPicture, Wanted, palette_png
from convoy.app.pictures.coco import coco_records, image_id_of
from convoy.app.pictures.decoder import Decoder, DecodeWork
from convoy.app.pictures.documents import OPTIONS, Document, answer_document, check_takes_pictures, envelope, wanted_of
from convoy.app.pictures.predictor import EncodedPicture, Predictor
from convoy.app.protocol.inference import INLINE_BYTES
from convoy.app.scheduling.slab import Slot
from convoy.models.answers import Detection
from convoy.models.errors import BodyTooLarge, InvalidRequest, RequestError, UnknownParameter

PARAMETERS = frozenset((*OPTIONS, "format", "timeout_ms"))


def _wanted(request: RequestContext, served: Served) -> Wanted:
    """The request's options for its pictures, with the requested form of class maps. Raises InvalidRequest."""
    if not request.query.keys() <= PARAMETERS:
        raise _unknown(min(request.query.keys() - PARAMETERS))
    wanted = wanted_of(served, request.query)
    form = request.query.get("format", "")
    _check_form(form, wanted.answering, served)
    if form == "coco":
        return wanted._replace(finish=as_coco)
    if wanted.answering is not CLASS_MAP:
        return wanted
    is_png = form == "png" or (not form and prefers_png(request.headers.get(b"accept", b"")))
    return wanted._replace(finish=as_png) if is_png else wanted


# The forms of answers other than JSON, and what they are for.
_FORMS: dict[str, Answering] = {"png": CLASS_MAP, "coco": BOXES}
_WORDS: dict[Answering, str] = {CLASS_MAP: "class maps", BOXES: "boxes"}


def _check_form(form: str, answering: Answering, served: Served) -> None:
    """Raises InvalidRequest."""
    if form in ("", "json") or _FORMS.get(form) is answering:
        return
    offered = " or ".join(["json", *(name for name, own in _FORMS.items() if own is answering)])
    if form in _FORMS:
        raise InvalidRequest(
            f"format={form} is for {_WORDS[_FORMS[form]]}, but '{served.key.model}' has the task "
            f"'{served.spec.task}'; use {offered}"
        )
    raise InvalidRequest(f"format must be {offered}, got {form[:40]!r}")


def _unknown(parameter: str) -> UnknownParameter:
    near = get_close_matches(parameter[:40].lower(), PARAMETERS, 1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(PARAMETERS))}"
    return UnknownParameter(f"unknown query parameter {parameter[:40]!r}; {hint}")


def prefers_png(accept: bytes) -> bool:
    """Whether an Accept header prefers PNG to JSON."""
    weights: dict[bytes, float] = {}
    for entry in accept.lower().split(b","):
        kind, _, parameter = entry.partition(b";")
        weights[kind.strip()] = quality(parameter)
    png = weights.get(b"image/png", 0.0)
    return png > 0 and png >= weights.get(b"application/json", 0.0)


def as_png(found: SegmentedPicture) -> bytes:
    """Only the map; the classes are in its pixels."""
    return palette_png(found.class_map)


def as_coco(found: list[Detection]) -> list[Document]:
    """The boxes of a single image, whose name is not known."""
    return coco_records(found, 0)


def _in_file(wanted: Wanted, image_id: int | str) -> Wanted:
    """What is asked about one of several files."""
    if wanted.finish is not as_coco:
        return wanted
    return wanted._replace(finish=partial(coco_records, image_id=image_id))


# The result for one file of a form, or the error reply that it would get alone.
_Outcome = Document | Reply


class PredictionsRoute(HotRoute):
    """Answers images."""

    protocol = "predictions"
    paths = ("/predictions/{model}", "/predictions/{model}/{version}")
    pattern = re.compile(r"/predictions/(?P<model>[^/]+)(?:/(?P<version>[^/]*))?")

    def __init__(self, core: Core, options: ServeOptions, decoder: Decoder, room: UploadRoom) -> None:
        super().__init__(core, options, decoder, room)
        self._predictor = Predictor(decoder, options.max_pixels)

    def admit(self, served: Served) -> None:
        check_takes_pictures(served)

    async def answer(self, call: Call, request: RequestContext, served: Served, body: Slot) -> Reply:
        wanted = _wanted(request, served)
        picture = EncodedPicture(body.view, (body,))
        if not picture.kind:
            content_type = request.headers.get(b"content-type", b"")
            files: memoryview | list[FormFile] | list[memoryview | str] = body.view
            if (boundary := boundary_of(content_type)) is not None:
                work = DecodeWork("form", body.view.nbytes, (body,))
                files = (await self.decoder.run(call, work, split_files, body.view, boundary)).result
            elif is_json(body.view, content_type):
                files = await self._split_json(call, body)
            if not isinstance(files, memoryview):
                return await self._answer_files(call, served, body, files, wanted)
            picture = EncodedPicture(files, (body,))
        seen = await self._predictor.predict(call, served, picture, Terms(), wanted, is_alone=True)
        headers = (seen.timing.header(),)
        if wanted.finish is as_png:
            return Reply(200, (seen.found,), "image/png", headers)
        if wanted.finish is as_coco:
            return Reply(200, (orjson.dumps(seen.found),), headers=headers)
        return Reply(200, (orjson.dumps({**envelope(served), **answer_document(wanted, seen)}),), headers=headers)

    async def _answer_files(
        self, call: Call, served: Served, body: Slot, files: list[FormFile] | list[memoryview | str], wanted: Wanted
    ) -> Reply:
        """Raises RequestError for what no file can have."""
        if wanted.finish is as_png:
            raise InvalidRequest("a PNG has the class map of one image; send one alone, or ask for JSON")
        image_ids = [
            image_id_of(file.name, position) if isinstance(file, FormFile) else position
            for position, file in enumerate(files)
        ]
        if wanted.finish is as_coco:
            _check_distinct(image_ids)
        asking = [
            self._predict_file(call, served, body, file, _in_file(wanted, image_id))
            for file, image_id in zip(files, image_ids, strict=True)
        ]
        outcomes = await _all_of(call, asking)
        if wanted.finish is as_coco:
            return _all_records(call, image_ids, outcomes)
        return _several(call, envelope(served), outcomes)

    async def _split_json(self, call: Call, body: Slot) -> memoryview | list[memoryview | str]:
        """Raises RequestError."""
        if body.view.nbytes <= INLINE_BYTES:
            return split_images(body.view)
        needs_bytes = 2 * body.view.nbytes  # its text, and the strings that are made of it
        if not call.may_ever_hold(needs_bytes):
            raise BodyTooLarge(
                f"to read JSON of {body.view.nbytes} bytes takes {needs_bytes} beside it, and there are "
                f"{call.core.slab.capacity_bytes} for all requests; send the image itself as the body, or raise "
                "--max-inflight-mb"
            )
        work = DecodeWork("form", body.view.nbytes, (body,), needs_bytes=needs_bytes)
        return (await self.decoder.run(call, work, split_images, body.view)).result

    async def _predict_file(
        self, call: Call, served: Served, body: Slot, file: FormFile | memoryview | str, wanted: Wanted
    ) -> _Outcome:
        """`file` is an error if there are no bytes."""
        try:
            if isinstance(file, str):
                raise InvalidRequest(file)
            picture = EncodedPicture(file.content if isinstance(file, FormFile) else file, (body,))
            seen = await self._predictor.predict(call, served, picture, Terms(), wanted, is_alone=False)
            return answer_document(wanted, seen)
        except RequestError as error:
            # The message and not the error: its traceback would keep the whole upload in memory.
            return error_reply(error)


async def _all_of(call: Call, asking: list[Coroutine[Any, Any, _Outcome]]) -> list[_Outcome]:
    """The results of all files, in order. A deadline ends those that have none by then."""
    tasks, call.owed = [asyncio.ensure_future(one) for one in asking], len(asking)
    late: RequestError | None = None
    try:
        await asyncio.wait(tasks)
    except asyncio.CancelledError as raised:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)  # each frees its own slots
        cause = call.cause_of(raised)
        if not isinstance(cause, RequestError):
            raise
        late = cause
    call.settle()
    return [error_reply(late) if late is not None and task.cancelled() else task.result() for task in tasks]


def _check_distinct(image_ids: list[int | str]) -> None:
    """Raise InvalidRequest if the records of two files could not be told apart."""
    again = sorted({str(one) for one in image_ids if image_ids.count(one) > 1})
    if again:
        raise InvalidRequest(
            f"format=coco tells files apart by their names without suffix, and several are named {again[0][:100]!r}; "
            "rename them, or send one per request"
        )


def _all_records(call: Call, image_ids: list[int | str], outcomes: list[_Outcome]) -> Reply:
    """The records of all files in one array. It has no place for errors, so one failed file fails the request."""
    failures = [(image_id, one) for image_id, one in zip(image_ids, outcomes, strict=True) if isinstance(one, Reply)]
    if not failures:
        return Reply(200, (orjson.dumps([row for one in outcomes for row in one[BOXES.key]]),))  # type: ignore[index]
    speaker = _speaker([one for _, one in failures])
    image_id = next(name for name, one in failures if one is speaker)
    document = orjson.loads(speaker.pieces[0])
    document["error"] = (
        f"the file {str(image_id)[:100]!r} failed: {document['error']}; format=coco answers all files or none"
    )
    _count_failures(call, [one for _, one in failures], speaker)
    return replace(speaker, pieces=(orjson.dumps(document),))


def _speaker(failures: list[Reply]) -> Reply:
    """The failure whose status and headers stand for all: the first of those that a retry may help."""
    helped = [one for one in failures if one.status == HTTPStatus.TOO_MANY_REQUESTS or one.status >= 500]
    return (helped or failures)[0]


def _count_failures(call: Call, failures: list[Reply], speaker: Reply | None) -> None:
    """Count those that do not end the call."""
    for one in failures:
        if one is not speaker and (reason := one.ending.reason):
            call.core.turned_away(reason)


def _several(call: Call, head: Document, outcomes: list[_Outcome]) -> Reply:
    """One result per file, in order; an error status only if every file failed.

    Status and headers are those of one file: the first of those that a retry may help.
    """
    failures = [outcome for outcome in outcomes if isinstance(outcome, Reply)]
    results = [orjson.Fragment(one.pieces[0]) if isinstance(one, Reply) else one for one in outcomes]
    if len(failures) < len(outcomes):
        speaker, body = None, {**head, "results": results}
    else:
        speaker = _speaker(failures)
        body = orjson.loads(speaker.pieces[0])
        body["error"] = f"none of the {len(failures)} files could be predicted; one of them: {body['error']}"
        body["results"] = results
    _count_failures(call, failures, speaker)
    return replace(speaker or Reply(200, ()), pieces=(orjson.dumps(body),))
