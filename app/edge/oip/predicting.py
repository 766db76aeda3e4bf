"""One image to its answer: measured, decoded, queued, computed, read; the same wherever the image comes from.

Knows calls and slots, and of a task only where its outputs are to be read. Knows no wire, no form and no file.
"""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

from convoy.app.edge.oip.answering import CLASSES, Wanted
from convoy.app.edge.oip.call import Call, Inputs, Terms
from convoy.app.edge.oip.decoder import Decoder, DecodeWork
from convoy.app.edge.oip.pictures import Picture
from convoy.app.edge.oip.tensors import TensorRef
from convoy.app.edge.timing import Timing, timing_ms
from convoy.app.submission.inference import ServedLike
from convoy.models.errors import ImageTooLarge, InvalidRequest
from convoy.models.images import decoding_bytes, refuse_oversized
from convoy.models.spec import ImageSpec

_DEFAULT_TOP_K = 5


class Predicted(NamedTuple):
    """What was found in one image, as its task says (`answering`), and where the time went."""

    found: Any
    timing: Timing


class Predictor:
    """Whoever has pictures asks it for what is in them. Belongs to one event loop, as its decoder does."""

    def __init__(self, decoder: Decoder, max_pixels: int) -> None:
        self._decoder, self._max_pixels = decoder, max_pixels

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
        nbytes = math.prod(image.tensor_shape) * spec.inputs[0].numpy_dtype.itemsize
        slot, answering = call.reserve(nbytes), wanted.answering
        is_here = is_alone and picture.is_quick(image) and decoder.begin_here(served)
        if not is_here:
            pixels, needs_bytes = self._measure(call, picture, image)
            slots = (*picture.slots, slot)
            work = DecodeWork(picture.kind, pixels, slots, call.deadline_ns(terms.timeout_ms), served, needs_bytes)
            decoded = await decoder.run(call, work, picture.decode_into, image, slot.view, self._max_pixels)
            wait_ns, size = decoded.wait_ns, decoded.result
        try:
            if is_here:
                size = picture.decode_into(image, slot.view, self._max_pixels)
            decode_ns = time.monotonic_ns() - started_ns - wait_ns
            call.decoded(decode_ns, wait_ns)
            inputs = Inputs(1, (image.tensor_shape,), (TensorRef(slot.ref, 0, nbytes),))
            if answering.is_long:
                call.reserve(answering.working_bytes(spec, size))  # before it is computed, as it may not be had
            done = await call.run(call.build_request(served, inputs, answering.outputs(spec), terms))
        except BaseException:  # and no `finally` for both: compiled, its `done` would have no room for None
            decoder.answered(key)
            raise
        decoder.answered(key, done)
        if answering.is_long:
            found = await decoder.run_owed(answering.read, done.answers, spec, size, wanted)
        else:
            found = answering.read(done.answers, spec, size, wanted)
        return Predicted(found, timing_ms(done, wait_ns, decode_ns, time.monotonic_ns() - call.arrival_ns))

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
