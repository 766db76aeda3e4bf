"""`POST /predictions/{model}[/{version}]`: an image in, classes out.

The body is one image, told by its bytes and not by its content type, or a multipart form with one or
more files. Each file is a request of its own: it is decoded, queued and answered by itself, and one that
fails does not harm the others.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from convoy.app.edge.http.body import Body
from convoy.app.edge.http.hot_route import HotRoute, HttpHead
from convoy.app.edge.http.multipart import boundary_of, split_files
from convoy.app.edge.http.replies import Reply, error_reply
from convoy.app.edge.oip.call import Call, Inputs, Terms
from convoy.app.edge.oip.decoder import DecodeWork
from convoy.app.edge.oip.tensors import TensorRef
from convoy.app.edge.scores import best_classes
from convoy.app.edge.timing import Timing, server_timing, timing_document, timing_ms
from convoy.app.scheduling.slab import Slot
from convoy.app.submission.inference import ServedLike
from convoy.models.errors import ImageTooLarge, InvalidRequest, RequestError
from convoy.models.headers import read_header
from convoy.models.images import decode_image_into, decoding_bytes, is_quickly_decoded, refuse_oversized, sniff
from convoy.models.spec import ImageSpec

_DEFAULT_TOP_K = 5
_Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Which classes to answer: the best `top_k`, or all for None, of those that reach `threshold`."""

    top_k: int | None
    threshold: float | None


@dataclass(frozen=True, slots=True)
class _FailedFile:
    """One file of a form that could not be predicted, and what would be answered if it were alone."""

    message: str
    reply: Reply


class PredictionsRoute(HotRoute):
    """Images in, labels out."""

    protocol = "predictions"

    def admit(self, served: ServedLike) -> None:
        if served.spec.image is None:
            name, version = served.key.model, served.key.version
            raise InvalidRequest(
                f"'{name}' has no image preprocessing, so it cannot take images; "
                f"send tensors to /v2/models/{name}/versions/{version}/infer"
            )

    async def answer(self, call: Call, head: HttpHead, served: ServedLike, body: Body) -> Reply:
        wanted = _wanted(head, served)
        terms = Terms(self.timeout_ms(head))
        boundary = boundary_of(head.headers.get(b"content-type", b""))
        name, version = served.key.model, served.key.version
        envelope: _Answer = {"model": name, "version": str(version)}
        if boundary is None or sniff(body.view) is not None:
            answer = await self._predict(call, served, body.slot, body.view, terms, wanted, is_alone=True)
            headers = (server_timing(Timing(**answer["timing_ms"])),)
            return Reply(200, (orjson.dumps({**envelope, **answer}),), headers=headers)
        work = DecodeWork("form", body.nbytes, (body.slot,), call.deadline_ns(terms.timeout_ms))
        files = (await self.decoder.run(call, work, split_files, body.view, boundary)).result
        outcomes = await asyncio.gather(
            *(self._predict_file(call, served, body.slot, file, terms, wanted) for file in files),
            return_exceptions=True,
        )
        return _several(call, envelope, outcomes)

    async def _predict_file(
        self, call: Call, served: ServedLike, body: Slot, encoded: memoryview, terms: Terms, wanted: _Wanted
    ) -> _Answer | _FailedFile:
        try:
            return await self._predict(call, served, body, encoded, terms, wanted, is_alone=False)
        except RequestError as error:
            # The words and not the error: its traceback would keep the whole upload in memory.
            return _FailedFile(str(error), error_reply(error))

    async def _predict(
        self,
        call: Call,
        served: ServedLike,
        body: Slot,
        encoded: memoryview,
        terms: Terms,
        wanted: _Wanted,
        *,
        is_alone: bool,
    ) -> _Answer:
        """One image, which lies in `body`."""
        started_ns = time.monotonic_ns()
        wait_ns = 0
        spec, image, key = served.spec, served.spec.image, served.key
        assert image is not None, "admit() has seen to it; this is a bug"
        nbytes = math.prod(image.tensor_shape) * spec.inputs[0].numpy_dtype.itemsize
        slot, done = call.reserve(nbytes), None
        is_here = is_alone and is_quickly_decoded(encoded, image) and self.decoder.begin_here(served)
        if not is_here:
            form = sniff(encoded) or ""
            pixels, needs_bytes = self._measure(call, form, encoded, image)
            deadline_ns = call.deadline_ns(terms.timeout_ms)
            work = DecodeWork(form, pixels, (body, slot), deadline_ns, served, needs_bytes)
            limit = self.options.max_pixels
            wait_ns = (await self.decoder.run(call, work, decode_image_into, encoded, image, slot.view, limit)).wait_ns
        try:
            if is_here:
                decode_image_into(encoded, image, slot.view)
            decode_ns = time.monotonic_ns() - started_ns - wait_ns
            call.decoded(decode_ns, wait_ns)
            inputs = Inputs(1, (spec.inputs[0].shape,), (TensorRef(slot.ref, 0, nbytes),))
            done = await call.run(call.build_request(served, inputs, (0,), terms))
        finally:
            self.decoder.answered(key, done)
        logits = np.frombuffer(done.answers[0].data, spec.outputs[0].numpy_dtype)
        timing = timing_ms(done, wait_ns, decode_ns, time.monotonic_ns() - call.arrival_ns)
        return {
            "predictions": best_classes(logits, spec, wanted.top_k, wanted.threshold),
            "timing_ms": timing_document(timing),
        }

    def _measure(self, call: Call, form: str, encoded: memoryview, image: ImageSpec) -> tuple[int, int]:
        """How many pixels the header announces, and how much memory they take. Raises ImageError.

        Both are 0 for what is no image: whoever decodes it says what it is.
        """
        header = read_header(form, encoded) if form else None
        if header is None or not header.pixels:
            return 0, 0
        advice = "send a smaller one, or raise --max-pixels"
        refuse_oversized((header.width, header.height), self.options.max_pixels, advice)
        needs_bytes, slab = decoding_bytes(header, image), call.core.slab
        if needs_bytes + call.held_bytes > slab.capacity_bytes:
            raise ImageTooLarge(
                f"to decode an image of {header.width}x{header.height} pixels takes {needs_bytes} bytes beside its "
                f"upload, and there are {slab.capacity_bytes} for all requests; send a smaller one, or raise "
                "--max-inflight-mb"
            )
        return header.pixels, needs_bytes


def _several(call: Call, envelope: _Answer, outcomes: list[_Answer | _FailedFile | BaseException]) -> Reply:
    """One result a file, in order; an error status only when every file failed."""
    results: list[_Answer] = []
    failures: list[_FailedFile] = []
    for outcome in outcomes:
        if isinstance(outcome, _FailedFile):
            failures.append(outcome)
            results.append({"error": outcome.message})
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            results.append(outcome)
    # One that failed first speaks for a form of which nothing was answered.
    is_answered = len(failures) < len(outcomes)
    for one in failures if is_answered else failures[1:]:
        if reason := one.reply.ending.reason:
            call.core.turned_away(reason)
    if is_answered:
        return Reply(200, (orjson.dumps({**envelope, "results": results}),))
    first = failures[0]
    message = f"none of the {len(failures)} files could be predicted; the first: {first.message}"
    body = orjson.dumps({"error": message, "results": results})
    return first.reply._replace(pieces=(body,))


def _wanted(head: HttpHead, served: ServedLike) -> _Wanted:
    """Raises InvalidRequest. Who asks for all that reach a threshold gets all of them."""
    threshold = _threshold(head, served)
    top_k = _top_k(head)
    return _Wanted(_DEFAULT_TOP_K if top_k is None and threshold is None else top_k, threshold)


def _threshold(head: HttpHead, served: ServedLike) -> float | None:
    values = head.query().get("threshold")
    if values is None:
        return None
    try:
        threshold = float(values[-1])
    except ValueError:
        threshold = math.nan
    # What a model of its own scores gives need not be a share.
    lowest, highest = (-math.inf, math.inf) if served.spec.activation == "none" else (0.0, 1.0)
    if not (math.isfinite(threshold) and lowest <= threshold <= highest):
        expected = "a number" if served.spec.activation == "none" else "a score from 0 to 1"
        raise InvalidRequest(f"threshold must be {expected}, got {values[-1][:40]!r}")
    return threshold


def _top_k(head: HttpHead) -> int | None:
    values = head.query().get("top_k")
    if values is None:
        return None
    raw = values[-1]
    if not (raw.isascii() and raw.isdigit() and 0 < len(raw) < 10 and int(raw) >= 1):
        raise InvalidRequest(f"top_k must be a whole number of classes, at least 1, got {raw[:40]!r}")
    return int(raw)
