"""From one image to its answer: measure, decode, queue, compute, read; the same wherever the image comes from.

Knows calls and slots. Knows no protocols, forms or files.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from typing import Any, NamedTuple, SupportsFloat

from convoy.app.calls.call import Call, Inputs, Terms
from convoy.app.calls.timing import timing_of
from convoy.app.lifecycle.catalog import Served
from convoy.app.pictures.answering import CLASSES, Wanted
from convoy.app.pictures.decoder import Decoded, Decoder, DecodeWork
from convoy.app.scheduling.request import TensorRef
from convoy.app.scheduling.slab import Slot
from convoy.app.telemetry.outcomes import CANCELLED, ending_of
from convoy.models.answers import MASK_FORMS, MaskForm, Timing
from convoy.models.errors import DeadlineExceeded, ImageTooLarge, InvalidRequest, Overloaded, RequestError
from convoy.models.geometry import Extent
from convoy.models.headers import Header, read_header
from convoy.models.images import decode_image_into, decoding_bytes, is_tiny, refuse_oversized, sniff
from convoy.models.spec import ImageSpec


class Picture(ABC):
    """An image as it was given. `kind` is the decoder's name for its format; `slots` hold its bytes."""

    kind: str
    slots: tuple[Slot, ...]

    @abstractmethod
    def header(self) -> Header | None:
        """Its header with the size, or None if it is not an image. Raises ImageError."""

    @abstractmethod
    def is_tiny(self, image: ImageSpec) -> bool:
        """Whether decoding certainly takes less time than handing it to a thread."""

    @abstractmethod
    def decode_into(self, image: ImageSpec, out: memoryview, max_pixels: int) -> Extent:
        """Write the model's input; any thread may call it. Returns the picture's upright width and height. Raises
        ImageError.
        """


class EncodedPicture(Picture):
    """The bytes of an image file."""

    def __init__(self, encoded: memoryview, slots: tuple[Slot, ...] = ()) -> None:
        self._encoded, self.slots = encoded, slots
        self.kind = sniff(encoded) or ""

    def header(self) -> Header | None:
        return read_header(self.kind, self._encoded) if self.kind else None

    def is_tiny(self, image: ImageSpec) -> bool:
        return is_tiny(self.kind, self._encoded, image)

    def decode_into(self, image: ImageSpec, out: memoryview, max_pixels: int) -> Extent:
        return decode_image_into(self._encoded, image, out, max_pixels)


# More classes than any model has: all.
MOST_TOP_K = 10**9


class Predicted(NamedTuple):
    """The result for one image, by task (`answering`), and its timing."""

    found: Any
    timing: Timing


class Predictor:
    """Predicts on pictures. Used on one event loop, as its decoder is."""

    def __init__(self, decoder: Decoder, max_pixels: int) -> None:
        self.decoder, self._max_pixels = decoder, max_pixels

    async def predict(
        self, call: Call, served: Served, picture: Picture, terms: Terms, wanted: Wanted, *, is_alone: bool
    ) -> Predicted:
        """Decode, queue, compute and read one picture, for a version that takes pictures.

        `wanted` must belong to the version's task. `is_alone` means that no other picture comes with the same call.
        Raises RequestError or ClientGone.
        """
        answering, spec, image = wanted.answering, served.spec, _image_of(served)
        slot = call.reserve(math.prod(image.tensor_shape) * spec.inputs[0].numpy_dtype.itemsize)
        started_ns, wait_ns = time.monotonic_ns(), 0
        # Handing a tiny picture to a thread costs more than decoding it.
        is_here = is_alone and picture.is_tiny(image) and self.decoder.begin_here(served)
        if not is_here:
            size, wait_ns = await self._decode(call, served, picture, terms, slot)
        done = None
        try:
            if is_here:
                size = picture.decode_into(image, slot.view, self._max_pixels)
            decode_ns = time.monotonic_ns() - started_ns - wait_ns
            call.decoded(decode_ns, wait_ns)
            inputs = Inputs(1, (image.tensor_shape,), (TensorRef(slot.ref, 0, slot.view.nbytes),))
            request = call.build_request(served, inputs, answering.outputs(spec), terms)
            if answering.is_long:
                call.reserve(answering.working_bytes(spec, size))
            done = await call.run(request)
        finally:
            self.decoder.answered(served.key, done)
        if answering.is_long:
            found = await self.decoder.run_owed(answering.read, done.answers, spec, size, wanted)
        else:
            found = answering.read(done.answers, spec, size, wanted)
        total_ns = time.monotonic_ns() - call.arrival_ns
        return Predicted(found, timing_of(done, wait_ns, decode_ns, total_ns))

    async def _decode(self, call: Call, served: Served, picture: Picture, terms: Terms, slot: Slot) -> Decoded[Extent]:
        """Decode into the slot in a thread, in turn. Raises RequestError or ClientGone."""
        image = _image_of(served)
        pixels, needs_bytes = self._measure(call, picture, image)
        slots = (*picture.slots, slot)
        latest_start_ns = call.latest_start_ns(terms)
        work = DecodeWork(picture.kind, pixels, slots, served, needs_bytes, latest_start_ns, terms.priority)
        try:
            return await self.decoder.run(call, work, picture.decode_into, image, slot.view, self._max_pixels)
        except BaseException as error:
            # The core counts its own requests; an image that is itself wrong is not a failed request.
            if (reason := _failure(call.cause_of(error))) is not None:
                call.core.request_failed(served.key, reason, time.monotonic_ns() - call.arrival_ns)
            raise

    def _measure(self, call: Call, picture: Picture, image: ImageSpec) -> tuple[int, int]:
        """The pixels that the header announces and the memory to decode them. Raises ImageError.

        Both are 0 if it is not an image; then the decoder raises the error.
        """
        header = picture.header()
        if header is None or not header.pixels:
            return 0, 0
        advice = "send a smaller one, or raise --max-pixels"
        refuse_oversized((header.width, header.height), self._max_pixels, advice)
        needs_bytes = decoding_bytes(header, image)
        if not call.may_ever_hold(needs_bytes):
            raise ImageTooLarge(
                f"decoding an image of {header.width}x{header.height} pixels takes {needs_bytes} bytes besides its "
                f"upload, but there are only {call.core.slab.capacity_bytes} for all requests; send a smaller one, or "
                "raise --max-inflight-mb"
            )
        return header.pixels, needs_bytes


def _image_of(served: Served) -> ImageSpec:
    image = served.spec.image
    assert image is not None, "the route has checked it; this is a bug"
    return image


def _failure(error: BaseException) -> str | None:
    """How the statistics count a picture that was not decoded; None if the picture itself is wrong."""
    if isinstance(error, Overloaded | DeadlineExceeded):
        return "REJECTED"
    if isinstance(error, RequestError):
        return None
    return "CANCELED" if ending_of(error) is CANCELLED else "OTHER"


def wanted_classes(top_k: int | None, threshold: float | None) -> Wanted:
    """The classes to answer with: all that reach a threshold if there is one, otherwise the best five."""
    return Wanted(CLASSES, 5 if top_k is None and threshold is None else top_k, threshold)


def check_top_k(top_k: object, given: object) -> int:
    """Check a `top_k`; `given` is its form in the request. Raises InvalidRequest."""
    if type(top_k) is not int or top_k < 1:
        raise InvalidRequest(f"top_k must be a whole number of classes, at least 1, got {str(given)[:40]!r}")
    return min(top_k, MOST_TOP_K)


def check_threshold(threshold: SupportsFloat, given: object, served: Served) -> float:
    """Check a threshold of any type; `given` is its form in the request. Raises InvalidRequest."""
    score = _number(threshold)
    # Scores that a model computes itself need not be between 0 and 1.
    lowest, highest = (-math.inf, math.inf) if served.spec.activation == "none" else (0.0, 1.0)
    if not (math.isfinite(score) and lowest <= score <= highest):
        expected = "a number" if served.spec.activation == "none" else "a score from 0 to 1"
        raise InvalidRequest(f"threshold must be {expected}, got {_brief(given)}")
    return score


def check_iou(iou: SupportsFloat, given: object, served: Served) -> float:
    """Check how much boxes may overlap; `given` is its form in the request. Raises InvalidRequest."""
    name, detection = served.key.model, served.spec.detection
    if detection is None:
        raise InvalidRequest(f"iou is for boxes, but '{name}' has the task '{served.spec.task}'; remove it")
    if detection.iou_threshold is None:
        raise InvalidRequest(
            f"iou is for models whose overlapping boxes Convoy suppresses, but the boxes of '{name}' leave its graph "
            "final; remove iou, or filter by threshold"
        )
    share = _number(iou)
    if not 0 < share <= 1:
        raise InvalidRequest(f"iou must be a number above 0 and at most 1, got {_brief(given)}")
    return share


def check_masks(given: object, served: Served) -> MaskForm:
    """Check the form of masks that a request asks for. Raises InvalidRequest."""
    name, detection = served.key.model, served.spec.detection
    if detection is None or detection.prototypes is None:
        what = "boxes without masks" if detection is not None else f"the task '{served.spec.task}'"
        raise InvalidRequest(f"masks is for models that give a mask of each object, but '{name}' has {what}; remove it")
    for form in MASK_FORMS:
        if given == form:
            return form
    raise InvalidRequest(f"masks must be {', '.join(MASK_FORMS[:-1])} or {MASK_FORMS[-1]}, got {_brief(given)}")


def check_timeout_ms(timeout_ms: SupportsFloat, given: object) -> float:
    """Check a `timeout_ms` of any type; `given` is its form in the request. Raises InvalidRequest."""
    milliseconds = _number(timeout_ms)
    if not 0 < milliseconds < 1e9:
        raise InvalidRequest(
            f"timeout_ms must be a number of milliseconds above 0 and below 1000000000, got {_brief(given)}"
        )
    return milliseconds


def _number(value: SupportsFloat) -> float:
    """Convert to a number; NaN if that is not possible."""
    try:
        return math.nan if isinstance(value, str | bytes) else float(value)
    except (OverflowError, TypeError, ValueError):
        return math.nan


def _brief(given: object) -> str:
    try:
        return repr(str(given)[:40])
    except ValueError:  # Python does not convert numbers with thousands of digits
        return "a number with too many digits"
