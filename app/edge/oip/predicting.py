"""One image to its answer: measured, decoded, queued, computed, read; the same wherever the image comes from.

Knows calls and slots, and of a task only where its outputs are to be read. Knows no wire, no form and no file.
"""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

from convoy.app.edge.oip.answering import CLASSES, Answering, Wanted
from convoy.app.edge.oip.call import Call, Terms
from convoy.app.edge.oip.decoder import Decoder, DecodeWork
from convoy.app.edge.oip.packing import packed_behind
from convoy.app.edge.oip.pictures import Picture
from convoy.app.edge.oip.reading import PictureQuestion, Readings
from convoy.app.edge.timing import Timing, timing_ms
from convoy.app.scheduling.request import ModelKey, Request, TensorPlace
from convoy.app.submission.inference import ServedLike
from convoy.models.errors import ImageTooLarge, InvalidRequest
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
        wanted = answering.outputs(spec)
        outputs, room_bytes = packed_behind(input_bytes, [spec.outputs[index].sample_bytes for index in wanted])
        inputs = (TensorPlace(0, 0, input_bytes),)
        pattern = Request(0, key, 1, (image.tensor_shape,), (), inputs, wanted, outputs, 0)
        return cls(spec, answering, pattern, input_bytes, room_bytes)


class Predictor:
    """Whoever has pictures asks it for what is in them. Belongs to one event loop, as its decoder does."""

    def __init__(self, decoder: Decoder, max_pixels: int) -> None:
        self._decoder, self._max_pixels, self._readings = decoder, max_pixels, Readings()
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
                done, found = await self._readings.run(call, request, PictureQuestion(spec, size, wanted))
        except BaseException:  # and no `finally` for both: compiled, its `done` would have no room for None
            decoder.answered(key)
            raise
        decoder.answered(key, done)
        if answering.is_long:
            found = await decoder.run_owed(answering.read, done.answers, spec, size, wanted)
        elif isinstance(found, Exception):
            try:
                raise found
            finally:
                del found  # its traceback holds this frame, which would hold it
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
