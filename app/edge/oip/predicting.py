"""One image to its answer: measured, decoded, queued, computed, read; the same wherever the image comes from.

Knows calls and slots, and of a task only where its outputs are to be read. Knows no wire, no form and no file.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from convoy.app.batch import Answer
from convoy.app.edge.oip.answering import CLASSES, Answering, Wanted
from convoy.app.edge.oip.call import Call, Terms
from convoy.app.edge.oip.decoder import Decoder, DecodeWork
from convoy.app.edge.oip.pictures import Picture
from convoy.app.edge.timing import Timing, timing_ms
from convoy.app.scheduling.request import Done, ModelKey, Request, TensorPlace
from convoy.app.scheduling.slab import aligned
from convoy.app.submission.inference import ServedLike
from convoy.models.errors import ImageTooLarge, InvalidRequest
from convoy.models.geometry import Extent
from convoy.models.images import decoding_bytes, refuse_oversized
from convoy.models.spec import ImageSpec, ModelSpec

_DEFAULT_TOP_K = 5
_MOST_FORMS = 256


class Predicted(NamedTuple):
    """What was found in one image, as its task says (`answering`), and where the time went."""

    found: Any
    timing: Timing


class _Form(NamedTuple):
    """What all requests with an image for one version have in common: one slot, the outputs behind the input."""

    spec: ModelSpec
    answering: Answering
    pattern: Request
    input_bytes: int
    room_bytes: int

    @classmethod
    def of(cls, key: ModelKey, spec: ModelSpec, image: ImageSpec, answering: Answering) -> _Form:
        input_bytes = math.prod(image.tensor_shape) * spec.inputs[0].numpy_dtype.itemsize
        room_bytes, wanted = input_bytes, answering.outputs(spec)
        outputs: list[TensorPlace | None] = []
        for index in wanted:
            nbytes, start = spec.outputs[index].sample_bytes, aligned(room_bytes)
            outputs.append(None if nbytes is None else TensorPlace(0, start, nbytes))
            room_bytes = room_bytes if nbytes is None else start + nbytes
        inputs = (TensorPlace(0, 0, input_bytes),)
        pattern = Request(0, key, 1, (image.tensor_shape,), (), inputs, wanted, tuple(outputs), 0)
        return cls(spec, answering, pattern, input_bytes, room_bytes)


class _Question(NamedTuple):
    """What outputs are to be read for: a picture of this upright size."""

    spec: ModelSpec
    size: Extent
    wanted: Wanted


class _Unread(NamedTuple):
    question: _Question
    done: Done
    future: asyncio.Future[Any]


class _Readings:
    """Outputs that come in one turn of the event loop are read together, as a batch's do: a few calls of numpy for all.

    Only those that are short to read. What was found, or the error, stands beside the answer that it was found in.
    """

    def __init__(self) -> None:
        self._due: list[_Unread] = []

    def run(self, call: Call, request: Request, question: _Question) -> asyncio.Future[tuple[Done, Any]]:
        """`Call.run`, and what its answer says."""

        def read(done: Done, future: asyncio.Future[Any]) -> None:
            if call.core.open_calls < 2:  # there is nobody to wait for
                future.set_result((done, _found([done.answers], question.spec, [question.size], question.wanted)[0]))
                return
            self._due.append(_Unread(question, done, future))
            if len(self._due) == 1:
                asyncio.get_running_loop().call_soon(self._read_due)

        return call.run(request, read)

    def _read_due(self) -> None:
        due, self._due = self._due, []
        alike: dict[tuple[int, Wanted], list[_Unread]] = {}
        for one in due:
            if not one.future.done():  # of one that was cancelled the memory is another's
                alike.setdefault((id(one.question.spec), one.question.wanted), []).append(one)
        for several in alike.values():
            spec, _, wanted = several[0].question
            answers, sizes = [one.done.answers for one in several], [one.question.size for one in several]
            for one, found in zip(several, _found(answers, spec, sizes, wanted), strict=True):
                one.future.set_result((one.done, found))


def _found(answers: Sequence[Sequence[Answer]], spec: ModelSpec, sizes: Sequence[Extent], wanted: Wanted) -> list[Any]:
    try:
        return wanted.answering.read_each(answers, spec, sizes, wanted)
    except Exception as error:  # a bug, which nobody may wait for without an end
        return [error] * len(answers)


class Predictor:
    """Whoever has pictures asks it for what is in them. Belongs to one event loop, as its decoder does."""

    def __init__(self, decoder: Decoder, max_pixels: int) -> None:
        self._decoder, self._max_pixels, self._readings = decoder, max_pixels, _Readings()
        self._forms: dict[ModelKey, _Form] = {}  # of the versions that were asked last

    async def predict(
        self, call: Call, served: ServedLike, picture: Picture, terms: Terms, wanted: Wanted, *, is_alone: bool
    ) -> Predicted:
        """Raises RequestError or ClientGone. `is_alone`: nobody else's image comes with it.

        The version must take images, and have the task that `wanted` is of.
        """
        started_ns = time.monotonic_ns()
        wait_ns = 0
        spec, image, key, decoder = served.spec, served.spec.image, served.key, self._decoder
        assert image is not None, "whoever asks has seen to it; this is a bug"
        answering = wanted.answering
        form = self._form(served, image, answering)
        slot = call.reserve(form.room_bytes)
        sample = slot.view[: form.input_bytes]
        is_here = is_alone and picture.is_quick(image) and decoder.begin_here(served)
        if not is_here:
            pixels, needs_bytes = self._measure(call, picture, image)
            slots = (*picture.slots, slot)
            work = DecodeWork(picture.kind, pixels, slots, call.deadline_ns(terms.timeout_ms), served, needs_bytes)
            decoded = await decoder.run(call, work, picture.decode_into, image, sample, self._max_pixels)
            wait_ns, size = decoded.wait_ns, decoded.result
        try:
            if is_here:
                size = picture.decode_into(image, sample, self._max_pixels)
            decode_ns = time.monotonic_ns() - started_ns - wait_ns
            call.decoded(decode_ns, wait_ns)
            if answering.is_long:
                call.reserve(answering.working_bytes(spec, size))  # before it is computed, as it may not be had
            request = call.repeat_request(form.pattern, (slot.ref,), terms)
            if answering.is_long:
                done, found = await call.run(request), None
            else:
                done, found = await self._readings.run(call, request, _Question(spec, size, wanted))
        except BaseException:  # and no `finally` for both: compiled, its `done` would have no room for None
            decoder.answered(key)
            raise
        decoder.answered(key, done)
        if answering.is_long:
            found = await decoder.run_owed(answering.read, done.answers, spec, size, wanted)
        elif isinstance(found, Exception):
            raise found
        return Predicted(found, timing_ms(done, wait_ns, decode_ns, time.monotonic_ns() - call.arrival_ns))

    def _form(self, served: ServedLike, image: ImageSpec, answering: Answering) -> _Form:
        form = self._forms.get(served.key)
        if form is None or form.spec is not served.spec or form.answering is not answering:
            if len(self._forms) >= _MOST_FORMS:
                self._forms.clear()
            form = self._forms[served.key] = _Form.of(served.key, served.spec, image, answering)
        return form

    def _measure(self, call: Call, picture: Picture, image: ImageSpec) -> tuple[int, int]:
        """How many pixels the header announces, and how much memory they take. Raises ImageError.

        Both are 0 for what is no image: whoever decodes it says what it is.
        """
        header = picture.header()
        if header is None or not header.pixels:
            return 0, 0
        advice = "send a smaller one, or raise --max-pixels"
        refuse_oversized((header.width, header.height), self._max_pixels, advice)
        needs_bytes, slab = decoding_bytes(header, image), call.core.slab
        if needs_bytes + call.held_bytes > slab.capacity_bytes:
            raise ImageTooLarge(
                f"to decode an image of {header.width}x{header.height} pixels takes {needs_bytes} bytes beside its "
                f"upload, and there are {slab.capacity_bytes} for all requests; send a smaller one, or raise "
                "--max-inflight-mb"
            )
        return header.pixels, needs_bytes


def wanted_classes(top_k: int | None, threshold: float | None) -> Wanted:
    """Who asks for all that reach a threshold gets all of them; who asks for nothing gets the best five."""
    return Wanted(CLASSES, _DEFAULT_TOP_K if top_k is None and threshold is None else top_k, threshold)


def check_top_k(top_k: object, given: object) -> int:
    """The number itself. Raises InvalidRequest; `given` is how it came."""
    if type(top_k) is not int or not 1 <= top_k < 10**9:
        raise InvalidRequest(f"top_k must be a whole number of classes, at least 1, got {str(given)[:40]!r}")
    return top_k


def check_threshold(threshold: float, given: object, served: ServedLike) -> float:
    """The number itself. Raises InvalidRequest; `given` is how it came."""
    # What a model of its own scores gives need not be a share.
    lowest, highest = (-math.inf, math.inf) if served.spec.activation == "none" else (0.0, 1.0)
    if not (math.isfinite(threshold) and lowest <= threshold <= highest):
        expected = "a number" if served.spec.activation == "none" else "a score from 0 to 1"
        raise InvalidRequest(f"threshold must be {expected}, got {str(given)[:40]!r}")
    return threshold


def check_timeout_ms(timeout_ms: float, given: object) -> float:
    """The number itself. Raises InvalidRequest; `given` is how it came."""
    if not 0 < timeout_ms < 1e9:
        raise InvalidRequest(f"timeout_ms must be a number of milliseconds above 0, got {str(given)[:40]!r}")
    return timeout_ms
