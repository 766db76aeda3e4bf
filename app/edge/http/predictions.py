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
from convoy.app.edge.http.calls import Call, HotRoute
from convoy.app.edge.http.multipart import boundary_of, split_files
from convoy.app.edge.http.replies import Reply, error_reply
from convoy.app.edge.oip.exchange import Exchange, Inputs, Terms
from convoy.app.edge.oip.tensors import TensorRef
from convoy.app.edge.scores import best_classes
from convoy.app.edge.timing import Timing, server_timing, timing_document, timing_ms
from convoy.app.submission.inference import ServedLike
from convoy.models.errors import InvalidRequest, RequestError
from convoy.models.images import decode_image_into, sniff

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

    async def answer(self, call: Call, served: ServedLike, body: Body) -> Reply:
        wanted = _wanted(call, served)
        terms = Terms(self.timeout_ms(call))
        boundary = boundary_of(call.headers.get(b"content-type", b""))
        name, version = served.key.model, served.key.version
        envelope: _Answer = {"model": name, "version": str(version)}
        if boundary is None or sniff(body.view) is not None:
            answer = await self._predict(call.exchange, served, body.view, terms, wanted)
            headers = (server_timing(Timing(**answer["timing_ms"])),)
            return Reply(200, (orjson.dumps({**envelope, **answer}),), headers=headers)
        files = await self.pool.run(split_files, body.view, boundary)
        outcomes = await asyncio.gather(
            *(self._predict_file(call.exchange, served, file, terms, wanted) for file in files),
            return_exceptions=True,
        )
        return _several(envelope, outcomes)

    async def _predict_file(
        self, exchange: Exchange, served: ServedLike, encoded: memoryview, terms: Terms, wanted: _Wanted
    ) -> _Answer | _FailedFile:
        try:
            return await self._predict(exchange, served, encoded, terms, wanted)
        except RequestError as error:
            # The words and not the error: its traceback would keep the whole upload in memory.
            return _FailedFile(str(error), error_reply(error))

    async def _predict(
        self, exchange: Exchange, served: ServedLike, encoded: memoryview, terms: Terms, wanted: _Wanted
    ) -> _Answer:
        started_ns = time.monotonic_ns()
        spec, image = served.spec, served.spec.image
        assert image is not None, "admit() has seen to it; this is a bug"
        nbytes = math.prod(image.tensor_shape) * spec.inputs[0].numpy_dtype.itemsize
        slot = exchange.reserve(nbytes)
        await self.pool.run(decode_image_into, encoded, image, slot.view)
        decode_ns = time.monotonic_ns() - started_ns
        self.core.stage_took(served.key, "decode", decode_ns)
        inputs = Inputs(1, (spec.inputs[0].shape,), (TensorRef(slot.ref, 0, nbytes),))
        done = await exchange.run(exchange.build_request(served, inputs, (0,), terms))
        logits = np.frombuffer(done.answers[0].data, spec.outputs[0].numpy_dtype)
        return {
            "predictions": best_classes(logits, spec, wanted.top_k, wanted.threshold),
            "timing_ms": timing_document(timing_ms(done, decode_ns, time.monotonic_ns() - exchange.arrival_ns)),
        }


def _several(envelope: _Answer, outcomes: list[_Answer | _FailedFile | BaseException]) -> Reply:
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
    if len(failures) < len(outcomes):
        return Reply(200, (orjson.dumps({**envelope, "results": results}),))
    first = failures[0]
    message = f"none of the {len(failures)} files could be predicted; the first: {first.message}"
    body = orjson.dumps({"error": message, "results": results})
    return Reply(first.reply.status, (body,), headers=first.reply.headers)


def _wanted(call: Call, served: ServedLike) -> _Wanted:
    """Raises InvalidRequest. Who asks for all that reach a threshold gets all of them."""
    threshold = _threshold(call, served)
    top_k = _top_k(call)
    return _Wanted(_DEFAULT_TOP_K if top_k is None and threshold is None else top_k, threshold)


def _threshold(call: Call, served: ServedLike) -> float | None:
    values = call.query().get("threshold")
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


def _top_k(call: Call) -> int | None:
    values = call.query().get("top_k")
    if values is None:
        return None
    raw = values[-1]
    if not (raw.isascii() and raw.isdigit() and 0 < len(raw) < 10 and int(raw) >= 1):
        raise InvalidRequest(f"top_k must be a whole number of classes, at least 1, got {raw[:40]!r}")
    return int(raw)
