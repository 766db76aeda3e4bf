"""`convoy.Engine`: a server's answers inside a program, without a port.

Handles threads, event loops and arguments; `inside` does the work on a private loop.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import numpy as np
from pydantic import ValidationError

from convoy.app.config.settings import Settings
from convoy.app.config.sources import Sources
from convoy.app.engines.select import PrecisionChoice
from convoy.app.engines.table import AUTO
from convoy.app.loading.load import DEFAULT_LIMIT_S
from convoy.app.python.inputs import request_of
from convoy.app.python.inside import Asked, Inside, Question
from convoy.app.python.private_loop import PrivateLoop
from convoy.app.python.records import ModelSummary
from convoy.app.python.values import OneImage, one_or_several
from convoy.models.answers import Classification, Detections, ImageAnswer, MaskForm, Segmentation
from convoy.models.errors import UsageError
from convoy.models.images import DEFAULT_MAX_PIXELS


class PythonEngine:
    """The models of a store in this process, batched and proved as with `convoy serve`, without a port.

        with convoy.Engine("store") as engine:
            print(engine.predict("digits", "seven.png").best.label)

    The engine is ready when the constructor returns. Without a store it serves the bundled demo. Threads and event
    loops may call it concurrently; concurrent requests share batches. `infer` and `predict` block; `ainfer` and
    `apredict` are the same for `await`, on any loop. Both live in one class, unlike in httpx, because they share
    models, threads and memory, and because the blocking methods also work in a notebook, where a loop is running.

    The options are those of `convoy serve`, with the same checks; the environment is not read. An engine installs no
    signal handlers and never ends the process. If it is lost for good, its calls raise Unavailable and `failure` says
    why. It does not survive a fork and cannot be pickled: make one per process.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | None = None,
        *,
        engine: str = AUTO,
        precision: PrecisionChoice = "auto",
        threads: int = 0,
        max_batch: int = 0,
        version_policy: str = "latest",
        plan_cache: str | os.PathLike[str] | None = None,
        load_timeout_s: float = DEFAULT_LIMIT_S,
        max_queue: int = 1024,
        max_inflight_mb: int = 1024,
        max_pixels: int = DEFAULT_MAX_PIXELS,
        default_timeout_ms: float = 0,
    ) -> None:
        """Load every model of the store. Models that are refused are logged as errors.

        Raises UsageError for a wrong option or a missing store, and JobError, with the reasons, if nothing can be
        served.
        """
        settings = _settings(
            {
                "store": None if store is None else Path(store),
                "engine": engine,
                "precision": precision,
                "threads": threads,
                "max_batch": max_batch,
                "version_policy": version_policy,
                "plan_cache": None if plan_cache is None else Path(plan_cache),
                "load_timeout_s": load_timeout_s,
                "max_queue": max_queue,
                "max_inflight_mb": max_inflight_mb,
                "max_body_mb": 1,  # no body is read here, and no other limit may be below this one
                "max_pixels": max_pixels,
                "default_timeout_ms": default_timeout_ms,
            }
        )
        self._loop = loop = PrivateLoop("convoy-engine")
        try:
            self._inside = inside = loop.result(lambda: _open(settings, loop))
        except BaseException:
            loop.close()
            raise
        # Also runs if the engine is garbage collected. At the program's end there is nothing to free and no thread to
        # do it.
        self._end = weakref.finalize(self, loop.close, inside.close)
        self._end.atexit = False

    # Requests

    def infer(
        self,
        model: str,
        inputs: Mapping[str, np.ndarray],
        *,
        version: int | str | None = None,
        outputs: Sequence[str] | None = None,
        timeout_ms: float | None = None,
        priority: int = 0,
        request_id: str | None = None,
    ) -> dict[str, np.ndarray]:
        """Run a model on tensors, as `POST /v2/models/{model}/infer` does. The caller owns the returned arrays.

        `inputs` have the model's names, dtypes and shapes, with the batch first if it has one; strings are arrays of
        bytes or str. `outputs` None means all outputs, `version` None the highest, `timeout_ms` None the engine's
        default. NaN and infinity are ordinary values.

        Raises the server's errors: InvalidRequest, NotFound, Overloaded, DeadlineExceeded, Unavailable, ModelFailed;
        and UsageError in a forked process.
        """
        request = request_of(inputs, outputs, priority, request_id)
        asked = Asked.of(model, version, timeout_ms)
        return self._loop.result(lambda: self._inside.infer(asked, request))

    async def ainfer(
        self,
        model: str,
        inputs: Mapping[str, np.ndarray],
        *,
        version: int | str | None = None,
        outputs: Sequence[str] | None = None,
        timeout_ms: float | None = None,
        priority: int = 0,
        request_id: str | None = None,
    ) -> dict[str, np.ndarray]:
        """`infer` for `await`. Cancelling removes the request from the queue."""
        request = request_of(inputs, outputs, priority, request_id)
        asked = Asked.of(model, version, timeout_ms)
        return await self._loop.ask(lambda: self._inside.infer(asked, request))

    def predict(
        self,
        model: str,
        images: OneImage | Iterable[OneImage],
        *,
        version: int | str | None = None,
        top_k: int | None = None,
        threshold: float | None = None,
        timeout_ms: float | None = None,
    ) -> Any:
        """Classify images, as `POST /predictions/{model}` does.

        An image is a path, the bytes of an image file, a PIL image, or a uint8 array [height, width] or [height, width,
        channels] with 1, 3 or 4 channels: grey, RGB or RGBA. One image gives a Classification; several, in any other
        iterable, give a list in their order. `top_k` None means the best five or, with `threshold`, all that reach it.
        Only a few batches of one call are in flight at a time.

        Raises what `infer` raises, and ImageError for a single image that cannot be read. With several images, each has
        its own `error`, and only errors of the whole call are raised. A NaN score raises ModelFailed.
        """
        return self._ask(Asked.of(model, version, timeout_ms), images, Question(Classification, top_k, threshold))

    async def apredict(
        self,
        model: str,
        images: OneImage | Iterable[OneImage],
        *,
        version: int | str | None = None,
        top_k: int | None = None,
        threshold: float | None = None,
        timeout_ms: float | None = None,
    ) -> Any:
        """`predict` for `await`. Cancelling removes what waits from the queue."""
        return await self._aask(
            Asked.of(model, version, timeout_ms), images, Question(Classification, top_k, threshold)
        )

    def segment(
        self,
        model: str,
        images: OneImage | Iterable[OneImage],
        *,
        version: int | str | None = None,
        timeout_ms: float | None = None,
    ) -> Any:
        """Compute the class of each pixel of images, as `POST /predictions/{model}` does.

        Takes images and raises errors as `predict` does. With several images, each has its `class_map` or its `error`.
        """
        return self._ask(Asked.of(model, version, timeout_ms), images, Question(Segmentation))

    async def asegment(
        self,
        model: str,
        images: OneImage | Iterable[OneImage],
        *,
        version: int | str | None = None,
        timeout_ms: float | None = None,
    ) -> Any:
        """`segment` for `await`. Cancelling removes what waits from the queue."""
        return await self._aask(Asked.of(model, version, timeout_ms), images, Question(Segmentation))

    def detect(
        self,
        model: str,
        images: OneImage | Iterable[OneImage],
        *,
        version: int | str | None = None,
        top_k: int | None = None,
        threshold: float | None = None,
        iou: float | None = None,
        masks: MaskForm | None = None,
        timeout_ms: float | None = None,
    ) -> Any:
        """Find objects in images, with boxes in the image's own pixels, as `POST /predictions/{model}` does.

        Takes images and raises errors as `predict` does. With several images, each has its `detections` or its `error`.
        `top_k`, `threshold` and `iou` default to the values that the model declares. Boxes of a class that overlap by
        more than `iou` (intersection over union, above 0 and at most 1) are suppressed; InvalidRequest if the model's
        graph does that itself. If the model gives masks, each object has its `mask`, or its `polygons` with
        masks="polygons", or neither with "none"; InvalidRequest if it gives none.
        """
        question = Question(Detections, top_k, threshold, iou, masks)
        return self._ask(Asked.of(model, version, timeout_ms), images, question)

    async def adetect(
        self,
        model: str,
        images: OneImage | Iterable[OneImage],
        *,
        version: int | str | None = None,
        top_k: int | None = None,
        threshold: float | None = None,
        iou: float | None = None,
        masks: MaskForm | None = None,
        timeout_ms: float | None = None,
    ) -> Any:
        """`detect` for `await`. Cancelling removes what waits from the queue."""
        question = Question(Detections, top_k, threshold, iou, masks)
        return await self._aask(Asked.of(model, version, timeout_ms), images, question)

    def _ask(
        self, asked: Asked, images: OneImage | Iterable[OneImage], question: Question[ImageAnswer]
    ) -> ImageAnswer | list[ImageAnswer]:
        given, inside = one_or_several(images), self._inside
        return self._loop.result(lambda: inside.ask(asked, given, question))

    async def _aask(
        self, asked: Asked, images: OneImage | Iterable[OneImage], question: Question[ImageAnswer]
    ) -> ImageAnswer | list[ImageAnswer]:
        given, inside = one_or_several(images), self._inside
        return await self._loop.ask(lambda: inside.ask(asked, given, question))

    # State

    @property
    def models(self) -> tuple[ModelSummary, ...]:
        """The served models, by name and version, and the engines that run them."""
        return self._loop.result(self._inside.models)

    @property
    def failure(self) -> str | None:
        """Why this engine cannot answer any more, such as a failed GPU; None while it works.

        Only a new engine helps or, if a device is lost, a new process.
        """
        return self._loop.failure

    # Closing

    def close(self) -> None:
        """Finish calls that have begun, then free memory and threads. Can be called twice."""
        self._end()

    async def aclose(self) -> None:
        """`close` for `await`."""
        await asyncio.to_thread(self._end)

    def __enter__(self) -> PythonEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> PythonEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __reduce__(self) -> NoReturn:
        raise UsageError("an Engine cannot be pickled or sent to another process; create one there")


# Users see the imported name in tracebacks and help(); inside, an Engine is what runs one model.
PythonEngine.__name__ = PythonEngine.__qualname__ = "Engine"
PythonEngine.__module__ = "convoy"


def _settings(given: dict[str, object]) -> Settings:
    """Settings from the given options only: a library does not read its program's environment. Raises UsageError."""
    try:
        return Settings(**given)  # type: ignore[arg-type]
    except ValidationError as error:
        raise Sources().not_valid(error, Settings) from error


async def _open(settings: Settings, loop: PrivateLoop) -> Inside:
    """A function of the loop and not a method: nothing on the loop may hold the engine."""
    inside = Inside(settings, loop.fail)
    try:
        await inside.open()
    except BaseException:
        await inside.close()
        raise
    return inside
