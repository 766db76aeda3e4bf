"""The part of an engine on its private loop: one core, one decoder, and the calls of a Python program.

Makes calls as the protocols do. Knows no threads and no processes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple

import numpy as np

from convoy.app.calls.access import ServeOptions
from convoy.app.calls.call import Call, Terms, find_served
from convoy.app.config.settings import Settings
from convoy.app.core import Core
from convoy.app.lifecycle.catalog import Served
from convoy.app.pictures.answering import (
    ANSWERING,
    BOXES,
    CLASS_MAP,
    CLASSES,
    Answering,
    SegmentedPicture,
    Wanted,
    why_no_predictions,
)
from convoy.app.pictures.decoder import Decoder, DecodeWork
from convoy.app.pictures.predictor import (
    Predicted,
    Predictor,
    check_iou,
    check_masks,
    check_threshold,
    check_timeout_ms,
    check_top_k,
    wanted_classes,
)
from convoy.app.protocol.inference import InferRequest, answers_of, is_heavy, request_for, understand
from convoy.app.protocol.tensors import RawRequest
from convoy.app.python.inputs import array_of, bytes_of, picture_of
from convoy.app.python.records import ModelSummary
from convoy.app.python.values import OneImage
from convoy.app.scheduling.request import MILLISECOND_NS, ModelKey
from convoy.app.telemetry.outcomes import ANSWERED, Refusal, ending_of
from convoy.models.answers import Classification, Detections, ImageAnswer, MaskForm, Segmentation
from convoy.models.errors import DeadlineExceeded, InvalidRequest, JobError, Overloaded, RequestError

PROTOCOL = "python"
# Errors that the end of another image may resolve.
_MAY_FIT_LATER = frozenset({Refusal.QUEUE_FULL, Refusal.MEMORY, Refusal.DECODE_QUEUE})

_ASKED_BY: dict[Answering, str] = {CLASSES: "predict", CLASS_MAP: "segment", BOXES: "detect"}
_ANSWERING: dict[type[Any], Answering] = {Classification: CLASSES, Segmentation: CLASS_MAP, Detections: BOXES}


class Asked(NamedTuple):
    """The options of a call. `version` None means the highest, `timeout_ms` None the engine's default."""

    model: str
    version: str | None
    timeout_ms: float | None

    @classmethod
    def of(cls, model: str, version: int | str | None, timeout_ms: float | None) -> Asked:
        """Check a caller's options. Raises InvalidRequest."""
        if timeout_ms is not None:
            timeout_ms = check_timeout_ms(timeout_ms, timeout_ms)
        return cls(model, None if version is None else str(version), timeout_ms)


class Question(Generic[ImageAnswer]):
    """A question about every image of a call: the best `top_k` that reach `threshold`, as a `record`.

    `iou` is how much boxes of a class may overlap, `masks` the form of their masks.
    """

    def __init__(
        self,
        record: type[ImageAnswer],
        top_k: int | None = None,
        threshold: float | None = None,
        iou: float | None = None,
        masks: MaskForm | None = None,
    ) -> None:
        """Raises InvalidRequest."""
        self._record: type[Any] = record
        self._top_k = None if top_k is None else check_top_k(top_k, top_k)
        self._threshold, self._iou, self._masks = threshold, iou, masks

    def wanted(self, served: Served) -> Wanted:
        """The question for a version. Raises InvalidRequest if the version cannot answer it."""
        name, spec, threshold = served.key.model, served.spec, self._threshold
        why = why_no_predictions(spec)
        if why is not None:
            raise InvalidRequest(f"'{name}' {why}; pass tensors to infer()")
        own = ANSWERING[spec.task]
        if own is not _ANSWERING[self._record]:
            raise InvalidRequest(f"'{name}' has the task {spec.task!r}; call {_ASKED_BY[own]}()")
        if threshold is not None:
            threshold = check_threshold(threshold, threshold, served)
        if own is CLASSES:
            return wanted_classes(self._top_k, threshold)
        iou = None if self._iou is None else check_iou(self._iou, self._iou, served)
        masks = "rle" if self._masks is None else check_masks(self._masks, served)
        return Wanted(own, self._top_k, threshold, iou, masks)

    def answer(self, key: ModelKey, predicted: Predicted) -> ImageAnswer:
        """Make the record of a result."""
        found = predicted.found
        is_map = isinstance(found, SegmentedPicture)
        values = (found.class_map, tuple(found.classes), found.unseen_share) if is_map else (tuple(found),)
        answer: ImageAnswer = self._record(key.model, key.version, *values, predicted.timing)
        return answer

    def failure(self, key: ModelKey, error: RequestError) -> ImageAnswer:
        """Make the record of an image without an answer."""
        answer: ImageAnswer = self._record(key.model, key.version, error=error)
        return answer


class Asking:
    """The calls of a Python program to a core, on the core's event loop."""

    def __init__(self, core: Core, decoder: Decoder, options: ServeOptions, max_queue: int) -> None:
        self._core, self._decoder = core, decoder
        self._predictor = Predictor(decoder, options.max_pixels)
        self._options = options
        # Single calls find room beside calls with thousands of images.
        self._many = asyncio.Semaphore(max(1, max_queue // 2))
        self._ended = asyncio.Event()

    async def models(self) -> tuple[ModelSummary, ...]:
        found = []
        for served in self._core.catalog.served():
            info = served.first.info
            key, spec = served.key, served.spec
            found.append(
                ModelSummary(
                    *(key.model, key.version, spec, info.engine, info.precision, info.device, served.first.reason)
                )
            )
        return tuple(found)

    async def infer(self, asked: Asked, request: RawRequest) -> dict[str, np.ndarray]:
        """Return output arrays, owned by the caller, by name. Raises RequestError."""
        with self._call() as call:
            call.begin()
            served = call.find(asked.model, asked.version)
            call.limit(self._timeout_ms(asked))
            meaning = await self._understood(call, served, request)
            done = await call.run(request_for(meaning, served, call))
            return {answer.spec.name: array_of(answer) for answer in answers_of(meaning, served, done)}

    async def ask(
        self, asked: Asked, images: OneImage | list[OneImage], question: Question[ImageAnswer]
    ) -> ImageAnswer | list[ImageAnswer]:
        """Answer for one image, or for several in their order, each with a result or an error.

        Raises RequestError for one image, and for several if none could have an answer.
        """
        timeout_ms = self._timeout_ms(asked)
        deadline_ns = None if timeout_ms is None else time.monotonic_ns() + int(timeout_ms * MILLISECOND_NS)
        if not isinstance(images, list):
            return await self._ask(asked, deadline_ns, images, question, is_alone=True)
        served = find_served(self._core.catalog, asked.model, asked.version)
        question.wanted(served)
        results: list[ImageAnswer | None] = [None] * len(images)
        left = iter(range(len(images)))
        # How many images of one call are in flight: enough for full batches, not all of a million.
        window = 2 * max(1, served.spec.max_batch_size) * max(1, served.engines) + self._options.decode_threads

        async def work() -> None:
            for index in left:
                async with self._many:
                    results[index] = await self._one_of_many(asked, deadline_ns, served, images[index], question)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(len(images), window)):
                group.create_task(work())
        return [result for result in results if result is not None]

    async def _one_of_many(
        self,
        asked: Asked,
        deadline_ns: int | None,
        served: Served,
        given: OneImage,
        question: Question[ImageAnswer],
    ) -> ImageAnswer:
        while True:
            try:
                if deadline_ns is not None and time.monotonic_ns() >= deadline_ns:
                    raise DeadlineExceeded("Request timeout expired before the image was decoded")
                return await self._ask(asked, deadline_ns, given, question, is_alone=False)
            except RequestError as error:
                may_fit_later = isinstance(error, Overloaded) and error.reason in _MAY_FIT_LATER
                if not may_fit_later or not self._core.open_calls:
                    return question.failure(served.key, error)
            await self._ended.wait()

    async def _ask(
        self,
        asked: Asked,
        deadline_ns: int | None,
        given: OneImage,
        question: Question[ImageAnswer],
        *,
        is_alone: bool,
    ) -> ImageAnswer:
        with self._call() as call:
            call.begin()
            served = call.find(asked.model, asked.version)
            call.deadline_ns = deadline_ns
            wanted = question.wanted(served)
            picture = await picture_of(given)
            found = await self._predictor.predict(call, served, picture, Terms(), wanted, is_alone=is_alone)
            return question.answer(served.key, found)

    async def _understood(self, call: Call, served: Served, request: RawRequest) -> InferRequest:
        nbytes = bytes_of(request)
        if not is_heavy(nbytes, served):
            return understand(request, served)
        work = DecodeWork("tensors", nbytes)
        return (await self._decoder.run(call, work, understand, request, served)).result

    def _timeout_ms(self, asked: Asked) -> float | None:
        return self._options.timeout_ms(asked.model) if asked.timeout_ms is None else asked.timeout_ms

    @contextmanager
    def _call(self) -> Iterator[Call]:
        """Count the call once, however it ends."""
        call = Call(self._core, PROTOCOL)
        try:
            yield call
            call.end(ANSWERED)
        except BaseException as raised:
            call.fail(raised, ending_of)
        finally:
            self._ended.set()
            self._ended = asyncio.Event()


class Inside(Asking):
    """A core on one event loop, which creates it."""

    def __init__(self, settings: Settings, on_fatal: Callable[[str], None]) -> None:
        self._on_fatal = on_fatal
        self._loaded = asyncio.Event()
        core = Core(settings.core_options(), on_loaded=self._loaded.set, on_fatal=self._fatal)
        options = settings.serve_options()
        decoder = Decoder(options.decode_threads, options.max_decoding)
        core.waiting_to_decode = lambda: decoder.waiting
        super().__init__(core, decoder, options, settings.max_queue)

    async def open(self) -> None:
        """Load everything that can be loaded. Raises JobError if that is nothing."""
        await self._core.start()
        await self._loaded.wait()
        failure = self._core.load_failure
        if failure is not None:
            refused = [f"{one.name} version {one.version}: {one.reason}" for one in self._core.catalog.refused()]
            raise JobError("; ".join([failure, *refused]))

    async def close(self) -> None:
        """Finish what has begun and free the engines."""
        await self._core.drain(30.0)
        self._decoder.close()
        await self._core.stop()

    def _fatal(self, reason: str) -> None:
        """Called from any thread. `open` reports what could not be loaded."""
        if self._core.load_failure is None:
            self._on_fatal(reason)
