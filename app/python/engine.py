"""`convoy.Engine`: a server's answers inside a program, without a port.

Handles threads, event loops and arguments; `inside` does the work, on a private loop.
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
from convoy.app.python.inputs import OneImage, one_or_several, request_of
from convoy.app.python.inside import Asked, Inside, Question
from convoy.app.python.private_loop import PrivateLoop
from convoy.app.python.records import Classification, Detections, ImageAnswer, ModelSummary, Segmentation
from convoy.models.errors import UsageError
from convoy.models.images import DEFAULT_MAX_PIXELS


class PythonEngine:
    """The models of a store in this process: batched, proved and answered as `convoy serve` does, without a port.

        with convoy.Engine("store") as engine:
            print(engine.predict("digits", "seven.png").best.label)

    It is ready when it has been made; without a store it is the bundled demo. Any number of threads and event loops
    may ask at once, and what they ask at the same time is computed together. `infer` and `predict` wait; `ainfer` and
    `apredict` are the same for `await`, from any loop. They are methods of one class, and not two classes as in httpx:
    what an engine holds is its models, threads and memory, which both ways share, and in a notebook, where a loop runs
    already, the waiting ones work as well.

    The options are those of `convoy serve`, checked in the same words; the environment is not read. An engine installs
    no signal handler and never ends the process: where it is lost for good its calls raise Unavailable and `failure`
    says why. It does not survive a fork and cannot be pickled: make one in each process.
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
        """Returns when every model of the store is loaded, or refused with an error in the log.

        Raises UsageError for an option that is wrong or a store that is not there, and JobError, with the reasons,
        where the store has nothing that can be served.
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
                "max_body_mb": 1,  # no body is read here, and none of the limits may be below it
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
        # Also where it is forgotten. When the program ends there is nothing to give back, nor a thread to do it.
        self._end = weakref.finalize(self, loop.close, inside.close)
        self._end.atexit = False

    # Asking

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
        """Tensors in, tensors out: `POST /v2/models/{model}/infer`. The arrays that come back are the caller's.

        `inputs` have the model's names, dtypes and shapes, the batch first where it has one; strings are arrays of
        bytes or str. `outputs` None: all of them. `version` None: the highest. `timeout_ms` None: the engine's default.
        NaN and infinity are values like others.

        Raises the server's errors with its words: InvalidRequest, NotFound, Overloaded, DeadlineExceeded, Unavailable,
        ModelFailed; and UsageError in a forked process.
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
        """`infer` for `await`. Cancelling takes the request out of the queue."""
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
        """Images in, labels with scores out: `POST /predictions/{model}`.

        An image is a path, the bytes of an image file, a PIL image, or a uint8 array [height, width] or
        [height, width, channels] of 1, 3 or 4 channels, grey, RGB or RGBA. One gives a Classification, and several,
        in any other iterable, a list of them in their order. `top_k` None: the best five, or with `threshold` all
        that reach it. Of the images of one call only some batches are on their way at a time.

        Raises what `infer` raises, and ImageError for one image that cannot be read. Of several each has its own
        `error` instead, and raised is only what is wrong with the call. A score that is NaN is ModelFailed.
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
        """`predict` for `await`. Cancelling takes what waits out of the queue."""
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
        """Images in, the class of each pixel out, on the image's own pixels: `POST /predictions/{model}`.

        Images are as for `predict`, and so is what is raised; of several, each has its `class_map` or its `error`.
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
        """`segment` for `await`. Cancelling takes what waits out of the queue."""
        return await self._aask(Asked.of(model, version, timeout_ms), images, Question(Segmentation))

    def detect(
        self,
        model: str,
        images: OneImage | Iterable[OneImage],
        *,
        version: int | str | None = None,
        top_k: int | None = None,
        threshold: float | None = None,
        timeout_ms: float | None = None,
    ) -> Any:
        """Images in, the objects in them out, boxes in the image's own pixels: `POST /predictions/{model}`.

        Images are as for `predict`, and so is what is raised; of several, each has its `detections` or its `error`.
        `top_k` None: at most as many as the model declares, and `threshold` None: from the score that it declares.
        """
        return self._ask(Asked.of(model, version, timeout_ms), images, Question(Detections, top_k, threshold))

    async def adetect(
        self,
        model: str,
        images: OneImage | Iterable[OneImage],
        *,
        version: int | str | None = None,
        top_k: int | None = None,
        threshold: float | None = None,
        timeout_ms: float | None = None,
    ) -> Any:
        """`detect` for `await`. Cancelling takes what waits out of the queue."""
        return await self._aask(Asked.of(model, version, timeout_ms), images, Question(Detections, top_k, threshold))

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

    # Knowing

    @property
    def models(self) -> tuple[ModelSummary, ...]:
        """What answers, by name and version, and what runs it."""
        return self._loop.result(self._inside.models)

    @property
    def failure(self) -> str | None:
        """Why this engine answers nothing any more: one was lost, such as by a GPU's failure, and cannot be replaced.

        None while it is well. Only a new engine helps, and where a device is lost only a new process.
        """
        return self._loop.failure

    # Ending

    def close(self) -> None:
        """Let calls that have begun end, and give memory and threads back. A second time it does nothing."""
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


# What people see in tracebacks and in help() is the name that they import; inside, an Engine is what runs one model.
PythonEngine.__name__ = PythonEngine.__qualname__ = "Engine"
PythonEngine.__module__ = "convoy"


def _settings(given: dict[str, object]) -> Settings:
    """Of what is given alone: a library does not look into its program's environment. Raises UsageError."""
    try:
        return Settings(**given)  # type: ignore[arg-type]
    except ValidationError as error:
        raise Sources().not_valid(error, Settings) from error


async def _open(settings: Settings, loop: PrivateLoop) -> Inside:
    """Knows the loop and not the engine, which nothing on its loop may hold."""
    inside = Inside(settings, loop.fail)
    try:
        await inside.open()
    except BaseException:
        await inside.close()
        raise
    return inside
