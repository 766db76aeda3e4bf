"""One image to its answer: measured, decoded, queued, computed, read; the same wherever the image comes from.

Knows calls and slots, and of a task only where its outputs are to be read. Knows no wire, no form and no file.
"""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from convoy.app.edge.oip.answering import CLASSES, Answering, Wanted
from convoy.app.edge.oip.call import Call, ClientGone, Terms
from convoy.app.edge.oip.decoder import Decoder, DecodeWork
from convoy.app.edge.oip.packing import packed_behind
from convoy.app.edge.oip.pictures import Picture
from convoy.app.edge.oip.reading import PictureQuestion, Readings
from convoy.app.edge.timing import StagesNs
from convoy.app.scheduling.request import Done, ModelKey, Request, TensorPlace
from convoy.app.submission.inference import ServedLike
from convoy.models.errors import ImageTooLarge, InvalidRequest, RequestError
from convoy.models.images import decoding_bytes, refuse_oversized
from convoy.models.spec import ImageSpec, ModelSpec

_DEFAULT_TOP_K = 5
_MOST_FORMS = 256


class Predicted:
    """What was found in one image, as its task says (`answering`), and where the time went."""

    __slots__ = ("found", "stages_ns")

    def __init__(self, found: Any, stages_ns: StagesNs) -> None:
        self.found, self.stages_ns = found, stages_ns


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


class Listener(ABC):
    """Who is told, once, what was found in a picture, or why nothing was."""

    @abstractmethod
    def predicted(self, seen: Predicted) -> None: ...

    @abstractmethod
    def failed(self, error: BaseException) -> None: ...


class _Awaited(Listener):
    """Tells a future, unless whoever awaited it was cancelled."""

    def __init__(self, future: asyncio.Future[Predicted]) -> None:
        self._future = future

    def predicted(self, seen: Predicted) -> None:
        if not self._future.done():
            self._future.set_result(seen)

    def failed(self, error: BaseException) -> None:
        if not self._future.done():
            self._future.set_exception(error)


class _Asked:
    """A decoded picture that the core has, and who is told what comes of it."""

    def __init__(
        self,
        predictor: Predictor,
        call: Call,
        question: PictureQuestion,
        wait_ns: int,
        decode_ns: int,
        listener: Listener,
    ) -> None:
        self.predictor, self.call, self.question, self.listener = predictor, call, question, listener
        self.wait_ns, self.decode_ns = wait_ns, decode_ns
        self.done: Done | None = None

    def ended(self, end: Done | RequestError | ClientGone | None) -> None:
        """By the core, or by its call."""
        predictor, served = self.predictor, self.call.served
        assert served is not None, "its request is for it; this is a bug"
        if isinstance(end, Done):
            predictor.decoder.answered(served.key, end)
            self.done = end
            predictor.readings.read(self.call, self.question, end, self.found)
        else:
            predictor.decoder.answered(served.key)
            if end is not None:
                self.listener.failed(end)

    def found(self, found: Any) -> None:
        """What its outputs say, or the error in its place."""
        if isinstance(found, Exception):
            self.listener.failed(found)
            return
        assert self.done is not None, "it was read; this is a bug"
        total_ns = time.monotonic_ns() - self.call.arrival_ns
        self.listener.predicted(Predicted(found, StagesNs(self.done, self.wait_ns, self.decode_ns, total_ns)))


class Predictor:
    """Whoever has pictures asks it for what is in them. Belongs to one event loop, as its decoder does.

    What is asked of a version, which must take images, is of its task.
    """

    def __init__(self, decoder: Decoder, max_pixels: int) -> None:
        self.decoder, self._max_pixels, self.readings = decoder, max_pixels, Readings()
        self._forms: dict[ModelKey, _Form] = {}  # of the versions that were asked last

    def predict_here(
        self,
        call: Call,
        served: ServedLike,
        picture: Picture,
        terms: Terms,
        wanted: Wanted,
        listener: Listener,
    ) -> bool:
        """Decode at once what is surely short, if it may be; else False, and nothing has happened. Raises RequestError.

        The listener is told how it ends, unless the call does before. For pictures that come alone, without others of
        somebody else's with them.
        """
        spec, image, answering, key = served.spec, served.spec.image, wanted.answering, served.key
        assert image is not None, "whoever asks has seen to it; this is a bug"
        started_ns = time.monotonic_ns()
        if answering.is_long or not picture.is_quick(image) or not self.decoder.begin_here(served):
            return False
        try:
            form = self._form(served, image, answering)
            slot = call.reserve(form.room_bytes)
            size = picture.decode_into(image, slot.view[: form.input_bytes], self._max_pixels)
            decode_ns = time.monotonic_ns() - started_ns
            call.decoded(decode_ns)
            asked = _Asked(self, call, PictureQuestion(spec, size, wanted), 0, decode_ns, listener)
            call.take(call.repeat_request(form.pattern, (slot.ref,), terms), asked.ended)
        except BaseException:
            self.decoder.answered(key)
            raise
        return True

    async def predict(
        self, call: Call, served: ServedLike, picture: Picture, terms: Terms, wanted: Wanted, *, is_alone: bool
    ) -> Predicted:
        """Raises RequestError or ClientGone. `is_alone`: nobody else's image comes with it."""
        spec, image, answering, key = served.spec, served.spec.image, wanted.answering, served.key
        assert image is not None, "whoever asks has seen to it; this is a bug"
        future: asyncio.Future[Predicted] = asyncio.get_running_loop().create_future()
        heard = _Awaited(future)
        try:
            if is_alone and self.predict_here(call, served, picture, terms, wanted, heard):
                return await future
            started_ns, wait_ns, size = time.monotonic_ns(), 0, (0, 0)
            form = self._form(served, image, answering)
            slot = call.reserve(form.room_bytes)
            sample = slot.view[: form.input_bytes]
            is_here = is_alone and answering.is_long and picture.is_quick(image) and self.decoder.begin_here(served)
            if not is_here:
                pixels, needs_bytes = self._measure(call, picture, image)
                slots = (*picture.slots, slot)
                work = DecodeWork(picture.kind, pixels, slots, call.deadline_ns(terms.timeout_ms), served, needs_bytes)
                decoded = await self.decoder.run(call, work, picture.decode_into, image, sample, self._max_pixels)
                wait_ns, size = decoded.wait_ns, decoded.result
            try:
                if is_here:
                    size = picture.decode_into(image, sample, self._max_pixels)
                decode_ns = time.monotonic_ns() - started_ns - wait_ns
                call.decoded(decode_ns, wait_ns)
                request = call.repeat_request(form.pattern, (slot.ref,), terms)
                if answering.is_long:
                    call.reserve(answering.working_bytes(spec, size))  # before it is computed, as it may not be had
                    done = await call.run(request)
                else:
                    question = PictureQuestion(spec, size, wanted)
                    call.take(request, _Asked(self, call, question, wait_ns, decode_ns, heard).ended)
            except BaseException:
                self.decoder.answered(key)
                raise
            if not answering.is_long:
                return await future
            self.decoder.answered(key, done)
            found = await self.decoder.run_owed(answering.read, done.answers, spec, size, wanted)
            return Predicted(found, StagesNs(done, wait_ns, decode_ns, time.monotonic_ns() - call.arrival_ns))
        finally:
            del future, heard  # an error's traceback holds this frame, and they the error

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
