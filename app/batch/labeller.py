"""Images to labels at full speed: threads decode a batch while the engine computes the one before.

Knows engines, batches and threads; knows nothing of files. Images come in batches, and their results leave in the
same order. Where a batch fails, its halves are tried, as on the server, until the image at fault is alone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

from convoy.app.batch.inputs import BatchImage
from convoy.app.engines.base import Engine
from convoy.app.engines.batch import EngineFailure, FailureScope
from convoy.app.engines.parts import Part
from convoy.app.pictures.answering import RankedClasses, best_classes_of_batch
from convoy.models.errors import ImageError, JobError
from convoy.models.images import decode_image_into
from convoy.models.spec import ModelSpec


class LabelledRows(NamedTuple):
    """A batch's images, their classes, and the rows of the extra output, [images, values]."""

    images: list[BatchImage]
    ranked: RankedClasses
    embeddings: np.ndarray | None


class Unreadable(NamedTuple):
    """An image that has no labels, and why."""

    image: BatchImage
    error: str


Result = LabelledRows | Unreadable


class Labeller:
    """One model, on one or several engines. `embeddings` is the index of an output."""

    def __init__(
        self,
        engines: Sequence[Engine],
        spec: ModelSpec,
        *,
        top_k: int,
        embeddings: int | None,
        max_pixels: int,
        batch_size: int,
        decode_threads: int,
    ) -> None:
        image = spec.image
        assert image is not None, "the command refuses a model without image preprocessing"
        self.batch_size = batch_size
        self._spec, self._image, self._max_pixels = spec, image, max_pixels
        self._top_k, self._embeddings = top_k, embeddings
        self._decode_threads = decode_threads
        self._row_bytes = math.prod(image.tensor_shape) * spec.inputs[0].numpy_dtype.itemsize
        self._outputs = (0,) if embeddings in (None, 0) else (0, embeddings)
        self._slots = sum(engine.info.slots for engine in engines)
        self._free_engines: SimpleQueue[Engine] = SimpleQueue()
        for engine in engines:
            for _ in range(engine.info.slots):
                self._free_engines.put(engine)

    def run(self, batches: Iterable[list[BatchImage]], on_result: Callable[[Result], None]) -> None:
        """Label all of them; `on_result` is called in one thread, which is not the caller's.

        An empty batch says that the next one may be long in coming: the results of all earlier ones come first.
        Raises JobError where the engine is lost, and what `batches` and `on_result` raise.
        """
        free: SimpleQueue[np.ndarray] = SimpleQueue()
        # For each slot a batch that is computed, one that waits for it, and one that is decoded.
        for _ in range(3 * self._slots):
            free.put(np.zeros((self.batch_size, self._row_bytes), np.uint8))
        step = self._decode_threads
        decoders, computers, collector = (ThreadPoolExecutor(threads) for threads in (step, self._slots, 1))
        begun: deque[Future[None]] = deque()

        def label(
            images: list[BatchImage], memory: np.ndarray, decoding: list[Future[list[str | None]]]
        ) -> list[Result]:
            try:
                return self._label(images, memory, decoding)
            finally:
                free.put(memory)

        def collect(labelled: Future[list[Result]]) -> None:
            for result in labelled.result():
                on_result(result)

        try:
            for images in batches:
                while begun and (begun[0].done() or not images):
                    begun.popleft().result()
                if images:
                    memory = free.get()
                    decoding = [
                        decoders.submit(self._decode, images[first::step], memory[first::step]) for first in range(step)
                    ]
                    begun.append(collector.submit(collect, computers.submit(label, images, memory, decoding)))
            while begun:
                begun.popleft().result()
        finally:
            for threads in (decoders, computers, collector):
                threads.shutdown(wait=False, cancel_futures=True)

    def _decode(self, images: list[BatchImage], rows: np.ndarray) -> list[str | None]:
        """Why each image cannot be read; None for those that are in their rows now."""
        errors: list[str | None] = []
        for image, row in zip(images, rows, strict=False):  # the last batch may have fewer
            try:
                decode_image_into(image.read(), self._image, row.data, self._max_pixels)
                errors.append(None)
            except ImageError as error:
                errors.append(str(error))
        return errors

    def _label(
        self, images: list[BatchImage], memory: np.ndarray, decoding: list[Future[list[str | None]]]
    ) -> list[Result]:
        errors: list[str | None] = [None] * len(images)
        for first, future in enumerate(decoding):
            errors[first :: len(decoding)] = future.result()
        results: list[Result] = [
            Unreadable(images[row], error) for row, error in enumerate(errors) if error is not None
        ]
        good = [row for row, error in enumerate(errors) if error is None]
        if good:
            batch = memory[: len(good)] if len(good) == len(images) else memory[good]
            engine = self._free_engines.get()
            try:
                results += self._compute(engine, batch, [images[row] for row in good])
            finally:
                self._free_engines.put(engine)
        return results

    def _compute(self, engine: Engine, batch: np.ndarray, images: list[BatchImage]) -> list[Result]:
        """One batch, [images, bytes]; halved where it fails. Raises JobError where the engine is lost."""
        try:
            return [self._labels(engine, batch, images)]
        except EngineFailure as failure:
            if failure.scope not in (FailureScope.BATCH, FailureScope.MEMORY):
                raise JobError(f"the engine was lost ({failure})") from failure
            if len(images) == 1:
                if failure.scope is FailureScope.MEMORY:
                    raise JobError(f"there is no memory for a single image ({failure}); free some") from failure
                return [Unreadable(images[0], f"the model fails on this image: {failure}")]
        half = len(images) // 2
        return [
            *self._compute(engine, batch[:half], images[:half]),
            *self._compute(engine, batch[half:], images[half:]),
        ]

    def _labels(self, engine: Engine, batch: np.ndarray, images: list[BatchImage]) -> LabelledRows:
        samples = len(images)
        part = Part(
            samples,
            (engine.whole_shape(self._spec.inputs[0], samples),),
            (batch.reshape(-1).data,),
            self._outputs,
            (None,) * len(self._outputs),
        )
        (answers,) = engine.run([part]).answers
        outputs = [
            np.frombuffer(answer.data, self._spec.outputs[index].numpy_dtype).reshape(samples, -1)
            for index, answer in zip(self._outputs, answers, strict=True)
        ]
        ranked = best_classes_of_batch(outputs[0], self._spec, self._top_k)
        return LabelledRows(images, ranked, None if self._embeddings is None else outputs[-1])
