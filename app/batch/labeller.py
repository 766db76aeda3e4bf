"""From images to labels at full speed: threads decode a batch while the engine computes the one before.

Batches are filled with readable images, and results leave in the order of the images. If a batch fails, its halves are
tried, as on the server, until the image at fault is alone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import NamedTuple, TypeVar

import numpy as np

from convoy.app.batch.inputs import BatchImage
from convoy.app.engines.base import Engine
from convoy.app.engines.batch import Answer, EngineFailure, FailureScope
from convoy.app.engines.parts import Part
from convoy.app.pictures.answering import ANSWERING, BOXES, RankedClasses, Wanted, best_classes_of_batch
from convoy.models.answers import Detection
from convoy.models.errors import ImageError, JobError, ModelFailed
from convoy.models.geometry import Extent
from convoy.models.images import decode_image_into
from convoy.models.spec import ModelSpec


class LabelledRows(NamedTuple):
    """A batch's images, what was found in them, and the rows of the extra output, [images, values].

    `found` is the classes, or for a detector each image's objects, best first, or why it has none.
    """

    images: list[BatchImage]
    found: RankedClasses | list[list[Detection] | str]
    embeddings: np.ndarray | None


class Unreadable(NamedTuple):
    """An image without labels, and why."""

    image: BatchImage
    error: str


Result = LabelledRows | Unreadable


class _Decoded(NamedTuple):
    """An image as the model's input, and its width and height; or why it cannot be read."""

    image: BatchImage
    row: np.ndarray
    size: Extent
    error: str | None


class _Answer(NamedTuple):
    """One sample's output: its shape and its bytes."""

    shape: tuple[int, ...]
    data: memoryview


_Item = TypeVar("_Item")
_Made = TypeVar("_Made")


def _in_order(
    threads: Executor, make: Callable[[list[_Item]], list[_Made]], items: Iterable[list[_Item]], ahead: int
) -> Iterator[list[_Made]]:
    """Map a function over lists in threads, in order, with some begun ahead. An empty list waits for all before it."""
    begun: deque[Future[list[_Made]]] = deque()
    for item in items:
        if item:
            begun.append(threads.submit(make, item))
        while len(begun) > (ahead if item else 0):
            yield begun.popleft().result()
        if not item:
            yield []
    while begun:
        yield begun.popleft().result()


class Labeller:
    """One model, on one or several engines. `embeddings` is the index of an output.

    `top_k` is the most classes or objects per image, and objects reach `threshold`.

    `piece_images` is how many images a thread decodes at a time.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        spec: ModelSpec,
        *,
        top_k: int,
        threshold: float | None,
        embeddings: int | None,
        max_pixels: int,
        batch_size: int,
        decode_threads: int,
    ) -> None:
        image = spec.image
        assert image is not None, "the command refuses a model without image preprocessing"
        self.batch_size = batch_size
        self.piece_images = -(-batch_size // decode_threads)
        self._spec, self._image, self._max_pixels = spec, image, max_pixels
        self._wanted, self._embeddings = Wanted(ANSWERING[spec.task], top_k, threshold, masks="none"), embeddings
        self._decode_threads = decode_threads
        self._row_bytes = math.prod(image.tensor_shape) * spec.inputs[0].numpy_dtype.itemsize
        needed = self._wanted.answering.outputs(spec)
        self._outputs = needed if embeddings is None or embeddings in needed else (*needed, embeddings)
        self._slots = sum(engine.info.slots for engine in engines)
        self._free_engines: SimpleQueue[Engine] = SimpleQueue()
        for engine in engines:
            for _ in range(engine.info.slots):
                self._free_engines.put(engine)

    def run(self, pieces: Iterable[list[BatchImage]], on_result: Callable[[Result], None]) -> None:
        """Label the images of all pieces; `on_result` is called in the caller's thread.

        An empty piece means that the next one may take a while, so all earlier results are delivered first. Raises
        JobError if the engine is lost, and what `pieces` and `on_result` raise.
        """
        decoders, computers = ThreadPoolExecutor(self._decode_threads), ThreadPoolExecutor(self._slots)
        try:
            # Two batches are decoded ahead, and each slot has one batch waiting while another computes.
            decoded = _in_order(decoders, self._decode, pieces, 2 * self._decode_threads)
            for results in _in_order(computers, self._label, self._batches(decoded), 2 * self._slots):
                for result in results:
                    on_result(result)
        finally:
            for threads in (decoders, computers):
                threads.shutdown(wait=False, cancel_futures=True)

    def _decode(self, images: list[BatchImage]) -> list[_Decoded]:
        decoded = []
        for image in images:
            row, error, size = np.empty(self._row_bytes, np.uint8), None, (0, 0)
            try:
                size = decode_image_into(image.read(), self._image, row.data, self._max_pixels)
            except ImageError as unreadable:
                error = str(unreadable)
            decoded.append(_Decoded(image, row, size, error))
        return decoded

    def _batches(self, decoded: Iterable[list[_Decoded]]) -> Iterator[list[_Decoded]]:
        """Batches of one part each, filled with readable images; unreadable ones are passed along."""
        batch: list[_Decoded] = []
        room = self.batch_size
        for piece in decoded:
            for one in piece:
                if batch and (not room or one.image.part is not batch[0].image.part):
                    yield batch
                    batch, room = [], self.batch_size
                batch.append(one)
                room -= one.error is None
            if not piece:
                yield from (batch, piece)
                batch, room = [], self.batch_size
        yield batch

    def _label(self, batch: list[_Decoded]) -> list[Result]:
        results: list[Result] = [Unreadable(one.image, one.error) for one in batch if one.error is not None]
        good = [one for one in batch if one.error is None]
        if good:
            engine = self._free_engines.get()
            try:
                batch_rows = np.concatenate([one.row for one in good]).reshape(len(good), -1)
                results += self._compute(engine, batch_rows, good)
            finally:
                self._free_engines.put(engine)
        return results

    def _compute(self, engine: Engine, batch: np.ndarray, images: list[_Decoded]) -> list[Result]:
        """Compute one batch, [images, bytes], in halves if it fails. Raises JobError if the engine is lost."""
        try:
            return [self._labels(engine, batch, images)]
        except EngineFailure as failure:
            if failure.scope not in (FailureScope.BATCH, FailureScope.MEMORY):
                raise JobError(f"the engine failed ({failure})") from failure
            if len(images) == 1:
                if failure.scope is FailureScope.MEMORY:
                    raise JobError(f"there is not enough memory for a single image ({failure}); free some") from failure
                return [Unreadable(images[0].image, f"the model fails on this image: {failure}")]
        half = len(images) // 2
        return [
            *self._compute(engine, batch[:half], images[:half]),
            *self._compute(engine, batch[half:], images[half:]),
        ]

    def _labels(self, engine: Engine, batch: np.ndarray, images: list[_Decoded]) -> LabelledRows:
        samples = len(images)
        part = Part(
            samples,
            (engine.whole_shape(self._spec.inputs[0], samples),),
            (batch.reshape(-1).data,),
            self._outputs,
            (None,) * len(self._outputs),
        )
        (answers,) = engine.run([part]).answers
        by_output = dict(zip(self._outputs, answers, strict=True))

        def rows_of(index: int) -> np.ndarray:
            return np.frombuffer(by_output[index].data, self._spec.outputs[index].numpy_dtype).reshape(samples, -1)

        found: RankedClasses | list[list[Detection] | str]
        if self._wanted.answering is BOXES:
            found = [self._boxes(by_output, number, samples, one.size) for number, one in enumerate(images)]
        else:
            found = best_classes_of_batch(rows_of(0), self._spec, self._wanted.top_k or 1)
        embeddings = None if self._embeddings is None else rows_of(self._embeddings)
        return LabelledRows([one.image for one in images], found, embeddings)

    def _boxes(self, answers: Mapping[int, Answer], number: int, samples: int, size: Extent) -> list[Detection] | str:
        """The objects in one image of a batch of `samples`, or why its outputs cannot be read."""
        own = []
        for index in self._wanted.answering.outputs(self._spec):
            whole, dimensions = answers[index], len(self._spec.outputs[index].shape)
            data = memoryview(whole.data).cast("B")
            sample_bytes = len(data) // samples
            shape = whole.shape[len(whole.shape) - dimensions :]
            own.append(_Answer(shape, data[number * sample_bytes : (number + 1) * sample_bytes]))
        try:
            found: list[Detection] = self._wanted.answering.read(own, self._spec, size, self._wanted)
        except ModelFailed as error:
            return str(error)
        return found
