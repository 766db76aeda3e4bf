"""One image to its answer: measured, decoded, queued, computed, read; the same wherever the image comes from.

Knows calls and slots, and of a task only where its outputs are to be read. Knows no wire, no form and no file.
"""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from functools import partial
from typing import Any, NamedTuple, SupportsFloat

from convoy.app.edge.oip.answering import CLASSES, Answering, Wanted
from convoy.app.edge.oip.call import Call, ClientGone, Terms
from convoy.app.edge.oip.decoder import Decoder, DecodeWork
from convoy.app.edge.oip.packing import Pattern
from convoy.app.edge.oip.pictures import Picture
from convoy.app.edge.oip.reading import PictureQuestion, Readings
from convoy.app.edge.oip.recent import Recent
from convoy.app.edge.timing import StagesNs
from convoy.app.lifecycle.catalog import Served
from convoy.app.scheduling.request import Done, ModelKey, Request, TensorPlace
from convoy.app.scheduling.slab import Slot
from convoy.models.errors import DeadlineExceeded, ImageTooLarge, InvalidRequest, Overloaded, RequestError
from convoy.models.geometry import Extent
from convoy.models.images import decoding_bytes, refuse_oversized
from convoy.models.spec import ImageSpec, ModelSpec

_DEFAULT_TOP_K = 5
# More than any model has; who asks for more means all.
MOST_TOP_K = 10**9


class Predicted:
    """What was found in one image, as its task says (`answering`), and where the time went."""

    __slots__ = ("found", "stages_ns")

    def __init__(self, found: Any, stages_ns: StagesNs) -> None:
        self.found, self.stages_ns = found, stages_ns


class _Form(NamedTuple):
    """What all requests with an image for one version have in common: one slot, the outputs behind the input."""

    key: ModelKey
    spec: ModelSpec
    image: ImageSpec
    answering: Answering
    pattern: Pattern
    input_bytes: int

    @classmethod
    def of(cls, served: Served, answering: Answering) -> _Form:
        key, spec, image = served.key, served.spec, _image_of(served)
        input_bytes = math.prod(image.tensor_shape) * spec.inputs[0].numpy_dtype.itemsize
        wanted = answering.outputs(spec)
        inputs = (TensorPlace(0, 0, input_bytes),)
        like = Request(0, key, 1, (image.tensor_shape,), (), inputs, wanted, (), 0)
        pattern = Pattern.of(like, inputs, input_bytes, [spec.outputs[index].sample_bytes for index in wanted])
        return cls(key, spec, image, answering, pattern, input_bytes)


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


class _Sample:
    """A decoded picture in its slot: its upright size, how long it waited for a decoder, and what that took."""

    __slots__ = ("decode_ns", "form", "size", "slot", "wait_ns")

    def __init__(self, form: _Form, slot: Slot, size: Extent, wait_ns: int, decode_ns: int) -> None:
        self.form, self.slot, self.size, self.wait_ns, self.decode_ns = form, slot, size, wait_ns, decode_ns

    def request(self, call: Call, terms: Terms) -> Request:
        """What the core is to be asked, once: the call is told what decoding took."""
        call.decoded(self.decode_ns, self.wait_ns)
        return self.form.pattern.request(call, self.slot, terms)

    def stages_ns(self, call: Call, done: Done) -> StagesNs:
        """Where the time of its call went until now."""
        return StagesNs(done, self.wait_ns, self.decode_ns, time.monotonic_ns() - call.arrival_ns)


class _Asked:
    """A picture that the core has, and who is told what comes of it."""

    def __init__(self, predictor: Predictor, call: Call, sample: _Sample, wanted: Wanted, listener: Listener) -> None:
        self.predictor, self.call, self.sample, self.wanted, self.listener = predictor, call, sample, wanted, listener
        self.done: Done | None = None

    def ended(self, end: Done | RequestError | ClientGone | None) -> None:
        """By the core, or by its call."""
        predictor, form = self.predictor, self.sample.form
        if isinstance(end, Done):
            predictor.decoder.answered(form.key, end)
            self.done = end
            question = PictureQuestion(form.spec, self.sample.size, self.wanted)
            predictor.readings.read(self.call, question, end, self.found)
        else:
            predictor.decoder.answered(form.key)
            if end is not None:
                self.listener.failed(end)

    def found(self, found: Any) -> None:
        """What its outputs say, or the error in its place."""
        if isinstance(found, Exception):
            self.listener.failed(found)
            return
        assert self.done is not None, "it was read; this is a bug"
        self.listener.predicted(Predicted(found, self.sample.stages_ns(self.call, self.done)))


class Predictor:
    """Whoever has pictures asks it for what is in them. Belongs to one event loop, as its decoder does.

    What is asked of a version, which must take images, is of its task.
    """

    def __init__(self, decoder: Decoder, max_pixels: int) -> None:
        self.decoder, self._max_pixels, self.readings = decoder, max_pixels, Readings()
        self._forms = Recent[ModelKey, _Form]()

    def predict_here(
        self,
        call: Call,
        served: Served,
        picture: Picture,
        terms: Terms,
        wanted: Wanted,
        listener: Listener,
    ) -> bool:
        """Decode at once what is surely short, if it may be; else False, and nothing has happened. Raises RequestError.

        The listener is told how it ends, unless the call does before. For pictures that come alone, without others of
        somebody else's with them.
        """
        if wanted.answering.is_long:
            return False
        form = self._form(served, wanted)
        if not self._begin_here(served, picture):
            return False
        self._ask(call, self._decode_here(call, form, picture), terms, wanted, listener)
        return True

    async def predict(
        self, call: Call, served: Served, picture: Picture, terms: Terms, wanted: Wanted, *, is_alone: bool
    ) -> Predicted:
        """Raises RequestError or ClientGone. `is_alone`: nobody else's image comes with it."""
        if wanted.answering.is_long:
            return await self._predict_long(call, served, picture, terms, wanted, is_alone=is_alone)
        future: asyncio.Future[Predicted] = asyncio.get_running_loop().create_future()
        heard = _Awaited(future)
        try:
            if not (is_alone and self.predict_here(call, served, picture, terms, wanted, heard)):
                sample = await self._decode(call, served, self._form(served, wanted), picture, terms)
                self._ask(call, sample, terms, wanted, heard)
            return await future
        finally:
            del future, heard  # an error's traceback holds this frame, and they the error

    async def _predict_long(
        self, call: Call, served: Served, picture: Picture, terms: Terms, wanted: Wanted, *, is_alone: bool
    ) -> Predicted:
        """The same where an answer takes long to read: a thread does it, and the memory for that is had before."""
        answering, spec, key = wanted.answering, served.spec, served.key
        form = self._form(served, wanted)
        if is_alone and self._begin_here(served, picture):
            sample = self._decode_here(call, form, picture)
        else:
            sample = await self._decode(call, served, form, picture, terms)
        try:
            request = sample.request(call, terms)
            call.reserve(answering.working_bytes(spec, sample.size))
            done = await call.run(request)
        except BaseException:
            self.decoder.answered(key)
            raise
        self.decoder.answered(key, done)
        found = await self.decoder.run_owed(answering.read, done.answers, spec, sample.size, wanted)
        return Predicted(found, sample.stages_ns(call, done))

    def _begin_here(self, served: Served, picture: Picture) -> bool:
        """Whether it is to be decoded at once, on the event loop; the decoder is to hear that it is answered, if so."""
        return self.decoder.begin_here(served, partial(picture.is_quick, _image_of(served)))

    def _decode_here(self, call: Call, form: _Form, picture: Picture) -> _Sample:
        started_ns = time.monotonic_ns()
        try:
            slot = call.reserve(form.pattern.nbytes)
            size = picture.decode_into(form.image, slot.view[: form.input_bytes], self._max_pixels)
        except BaseException:
            self.decoder.answered(form.key)
            raise
        return _Sample(form, slot, size, 0, time.monotonic_ns() - started_ns)

    async def _decode(self, call: Call, served: Served, form: _Form, picture: Picture, terms: Terms) -> _Sample:
        """In a thread, in its turn. Raises RequestError or ClientGone."""
        started_ns, image = time.monotonic_ns(), form.image
        slot = call.reserve(form.pattern.nbytes)
        pixels, needs_bytes = self._measure(call, picture, image)
        slots = (*picture.slots, slot)
        deadline_ns, latest_start_ns = call.deadline_ns(terms.timeout_ms), call.latest_start_ns(terms.latest_start_us)
        work = DecodeWork(
            picture.kind, pixels, slots, deadline_ns, served, needs_bytes, latest_start_ns, terms.priority
        )
        sample = slot.view[: form.input_bytes]
        try:
            size, wait_ns = await self.decoder.run(call, work, picture.decode_into, image, sample, self._max_pixels)
        except BaseException as error:
            # The core counts those that it has; what is wrong itself is no request that failed.
            if (reason := _failure(error)) is not None:
                call.core.request_failed(form.key, reason, time.monotonic_ns() - call.arrival_ns)
            raise
        return _Sample(form, slot, size, wait_ns, time.monotonic_ns() - started_ns - wait_ns)

    def _ask(self, call: Call, sample: _Sample, terms: Terms, wanted: Wanted, listener: Listener) -> None:
        """Queue what is decoded; the listener is told how it ends, unless the call does before. Raises RequestError."""
        try:
            call.take(sample.request(call, terms), _Asked(self, call, sample, wanted, listener).ended)
        except BaseException:
            self.decoder.answered(sample.form.key)
            raise

    def _form(self, served: Served, wanted: Wanted) -> _Form:
        form, answering = self._forms.find(served.key), wanted.answering
        if form is None or form.spec is not served.spec or form.answering is not answering:
            form = _Form.of(served, answering)
            self._forms.keep(served.key, form)
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
        needs_bytes = decoding_bytes(header, image)
        if not call.may_ever_hold(needs_bytes):
            raise ImageTooLarge(
                f"to decode an image of {header.width}x{header.height} pixels takes {needs_bytes} bytes beside its "
                f"upload, and there are {call.core.slab.capacity_bytes} for all requests; send a smaller one, or "
                "raise --max-inflight-mb"
            )
        return header.pixels, needs_bytes


def _image_of(served: Served) -> ImageSpec:
    image = served.spec.image
    assert image is not None, "whoever asks has seen to it; this is a bug"
    return image


def _failure(error: BaseException) -> str | None:
    """As what the statistics count a picture that was not decoded; None where it was wrong itself."""
    if isinstance(error, Overloaded | DeadlineExceeded):
        return "REJECTED"
    if isinstance(error, RequestError):
        return None
    return "OTHER" if isinstance(error, Exception) and not isinstance(error, ClientGone) else "CANCELED"


def wanted_classes(top_k: int | None, threshold: float | None) -> Wanted:
    """Who asks for all that reach a threshold gets all of them; who asks for nothing gets the best five."""
    return Wanted(CLASSES, _DEFAULT_TOP_K if top_k is None and threshold is None else top_k, threshold)


def check_top_k(top_k: object, given: object) -> int:
    """The number itself. Raises InvalidRequest; `given` is how it came."""
    if type(top_k) is not int or top_k < 1:
        raise InvalidRequest(f"top_k must be a whole number of classes, at least 1, got {str(given)[:40]!r}")
    return min(top_k, MOST_TOP_K)


def check_threshold(threshold: SupportsFloat, given: object, served: Served) -> float:
    """The number itself, of whatever type. Raises InvalidRequest; `given` is how it came."""
    score = _number(threshold)
    # What a model of its own scores gives need not be a share.
    lowest, highest = (-math.inf, math.inf) if served.spec.activation == "none" else (0.0, 1.0)
    if not (math.isfinite(score) and lowest <= score <= highest):
        expected = "a number" if served.spec.activation == "none" else "a score from 0 to 1"
        raise InvalidRequest(f"threshold must be {expected}, got {_brief(given)}")
    return score


def check_timeout_ms(timeout_ms: SupportsFloat, given: object) -> float:
    """The number itself, of whatever type. Raises InvalidRequest; `given` is how it came."""
    milliseconds = _number(timeout_ms)
    if not 0 < milliseconds < 1e9:
        raise InvalidRequest(
            f"timeout_ms must be a number of milliseconds above 0 and below 1000000000, got {_brief(given)}"
        )
    return milliseconds


def _number(value: SupportsFloat) -> float:
    """NaN where it is none, or too large for one."""
    try:
        return math.nan if isinstance(value, str | bytes) else float(value)
    except (OverflowError, TypeError, ValueError):
        return math.nan


def _brief(given: object) -> str:
    try:
        return repr(str(given)[:40])
    except ValueError:  # Python writes no number of thousands of digits
        return "one of too many digits"
