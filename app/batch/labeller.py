"""Images to labels at full speed: threads decode into a batch's memory while the engine computes the batch before.

Knows engines, batches and threads; knows nothing of files of results, and of inputs only that they come one by one. An
image that cannot be read leaves its row to the next one, so that batches are full. One that makes a batch fail is found
by halving, as on the server.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import numpy as np

from convoy.app.batch.reading import BatchImage
from convoy.app.engines.base import Engine
from convoy.app.engines.batch import EngineFailure, FailureScope
from convoy.app.engines.parts import Part
from convoy.app.pictures.scores import RankedClasses, best_classes_of_batch
from convoy.models.errors import ImageError, JobError
from convoy.models.images import decode_image_into
from convoy.models.spec import ModelSpec

NAN = "the model produced NaN"
# For each engine's slot: one that is computed, one that waits for it, one that is decoded into.
_BATCHES = 3


class Images(Protocol):
    """Where images come from, in one thread at a time."""

    def next(self, *, wait: bool) -> BatchImage | None:
        """The next; None at the end, or where `wait` is False and none is there yet."""


class LabelledRows(NamedTuple):
    """What became of a batch: the images in it, their classes, and the rows of the extra output, [images, values]."""

    images: list[BatchImage]
    ranked: RankedClasses
    embeddings: np.ndarray | None


class Unreadable(NamedTuple):
    """An image that has no labels, and why."""

    image: BatchImage
    error: str


class LabelWishes(NamedTuple):
    """`embeddings` is the index of an output."""

    top_k: int
    embeddings: int | None
    max_pixels: int


class _Batch:
    """Memory for so many samples, and which images lie in it. Its decoders' until the last of them gives it on."""

    def __init__(self, size: int, row_bytes: int) -> None:
        self.memory = np.zeros((size, row_bytes), np.uint8)
        self._lock, self._size = threading.Lock(), size
        self.begin()

    def begin(self) -> None:
        self._images: list[BatchImage | None] = []
        self._in_work, self.is_closed = 0, False

    def take_row(self) -> int:
        """For an image that is decoded now. The last row closes it."""
        with self._lock:
            self._in_work += 1
            self._images.append(None)
            self.is_closed = len(self._images) == self._size
            return len(self._images) - 1

    def close(self) -> bool:
        """No row more; whether it is to be given on at once, because nobody works on one."""
        with self._lock:
            self.is_closed = True
            return not self._in_work

    def put(self, row: int, image: BatchImage | None) -> bool:
        """A row is filled, or stays empty; whether this was the last, and the batch is to be given on."""
        with self._lock:
            self._in_work -= 1
            self._images[row] = image
            return self.is_closed and not self._in_work

    def packed(self) -> list[BatchImage]:
        """The images, their rows moved to the front."""
        found = [(row, image) for row, image in enumerate(self._images) if image is not None]
        for to, (row, _) in enumerate(found):
            if to != row:
                self.memory[to] = self.memory[row]
        return [image for _, image in found]


class Labeller:
    """One model, on one or several engines, until `run` returns. `run` may be called again."""

    def __init__(
        self, engines: Sequence[Engine], spec: ModelSpec, wishes: LabelWishes, *, batch_size: int, decode_threads: int
    ) -> None:
        image = spec.image
        assert image is not None, "whoever makes it has seen to it; this is a bug"
        self._engines, self._spec, self._wishes, self._image = engines, spec, wishes, image
        self._decode_threads, self._batch_size = decode_threads, batch_size
        self._row_bytes = math.prod(image.tensor_shape) * spec.inputs[0].numpy_dtype.itemsize
        wanted = [0] if wishes.embeddings in (None, 0) else [0, wishes.embeddings]
        self._wanted = tuple(wanted)

    def run(self, images: Images, on_result: Callable[[LabelledRows | Unreadable], None]) -> None:
        """Label all of them; `on_result` is called in this thread, in no order of images.

        Raises JobError where the engine is lost, and what `images` raises.
        """
        _Run(self, images, on_result).to_end()

    def compute(self, engine: Engine, batch: np.ndarray, images: list[BatchImage]) -> list[LabelledRows | Unreadable]:
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
            *self.compute(engine, batch[:half], images[:half]),
            *self.compute(engine, batch[half:], images[half:]),
        ]

    def _labels(self, engine: Engine, batch: np.ndarray, images: list[BatchImage]) -> LabelledRows:
        samples = len(images)
        part = Part(
            samples,
            (engine.whole_shape(self._spec.inputs[0], samples),),
            (batch.reshape(-1).data,),
            self._wanted,
            (None,) * len(self._wanted),
        )
        (answers,) = engine.run([part]).answers
        outputs = [
            np.frombuffer(answer.data, self._spec.outputs[index].numpy_dtype).reshape(samples, -1)
            for index, answer in zip(self._wanted, answers, strict=True)
        ]
        ranked = best_classes_of_batch(outputs[0], self._spec, self._wishes.top_k)
        return LabelledRows(images, ranked, None if self._wishes.embeddings is None else outputs[-1])

    def batches(self) -> list[_Batch]:
        slots = sum(engine.info.slots for engine in self._engines)
        return [_Batch(self._batch_size, self._row_bytes) for _ in range(_BATCHES * slots)]

    def decode(self, image: BatchImage, row: np.ndarray) -> None:
        """Raises ImageError."""
        decode_image_into(image.read(), self._image, row.data, self._wishes.max_pixels)

    @property
    def workplaces(self) -> list[Engine]:
        """An engine for each thread that computes."""
        return [engine for engine in self._engines for _ in range(engine.info.slots)]

    @property
    def decode_threads(self) -> int:
        return self._decode_threads


class _Stop(Exception):
    """Another thread has failed; nothing that this one does is needed."""


class _Run:
    """One pass over some images."""

    def __init__(
        self, labeller: Labeller, images: Images, on_result: Callable[[LabelledRows | Unreadable], None]
    ) -> None:
        self._labeller, self._images, self._on_result = labeller, images, on_result
        self._lock = threading.Lock()  # of whoever takes the next image
        self._open: _Batch | None = None
        self._free: SimpleQueue[_Batch | None] = SimpleQueue()
        self._full: SimpleQueue[_Batch | None] = SimpleQueue()
        self._results: SimpleQueue[LabelledRows | Unreadable | BaseException | None] = SimpleQueue()
        self._is_over = False

    def to_end(self) -> None:
        for batch in self._labeller.batches():
            self._free.put(batch)
        decoders = self._start(self._labeller.decode_threads, lambda _: self._decode())
        places = self._labeller.workplaces
        computers = self._start(len(places), lambda number: self._compute(places[number]))
        try:
            self._collect(decoders, computers)
        finally:
            self._is_over = True
            for _ in decoders:
                self._free.put(None)
            for _ in computers:
                self._full.put(None)

    def _start(self, count: int, work: Callable[[int], None]) -> list[threading.Thread]:
        def safely(number: int) -> None:
            try:
                work(number)
            except _Stop:
                pass
            except BaseException as error:
                self._results.put(error)
            finally:
                self._results.put(None)

        threads = [threading.Thread(target=safely, args=(number,), daemon=True) for number in range(count)]
        for thread in threads:
            thread.start()
        return threads

    def _collect(self, decoders: list[threading.Thread], computers: list[threading.Thread]) -> None:
        ended = 0
        while ended < len(decoders) + len(computers):
            result = self._results.get()
            if isinstance(result, BaseException):
                raise result
            if result is None:
                ended += 1
                if ended == len(decoders):  # those that compute end only when they are told
                    for _ in computers:
                        self._full.put(None)
                continue
            self._on_result(result)

    # Decoding

    def _decode(self) -> None:
        while (taken := self._take()) is not None:
            batch, row, first = taken
            image: BatchImage | None = first
            while image is not None and not self._is_decoded(image, batch.memory[row]):
                with self._lock:  # the row is for the next one
                    image = self._next(wait=False)
            if batch.put(row, image):
                self._full.put(batch)

    def _is_decoded(self, image: BatchImage, row: np.ndarray) -> bool:
        try:
            self._labeller.decode(image, row)
        except ImageError as error:
            self._results.put(Unreadable(image, str(error)))
            return False
        return True

    def _take(self) -> tuple[_Batch, int, BatchImage] | None:
        """The next image and a row for it; None at the end."""
        with self._lock:
            image = self._next(wait=False)
            if image is None:
                # What is there is computed, before somebody waits, perhaps for what is made of it.
                self._give_on()
                image = self._next(wait=True)
            if image is None:
                return None
            if self._open is None:
                self._open = self._free.get()
                if self._open is None:
                    raise _Stop
                self._open.begin()
            batch = self._open
            row = batch.take_row()
            if batch.is_closed:
                self._open = None
            return batch, row, image

    def _next(self, *, wait: bool) -> BatchImage | None:
        """While the lock is held."""
        return None if self._is_over else self._images.next(wait=wait)

    def _give_on(self) -> None:
        batch, self._open = self._open, None
        if batch is not None and batch.close():
            self._full.put(batch)

    # Computing

    def _compute(self, engine: Engine) -> None:
        while (batch := self._full.get()) is not None:
            images = batch.packed()
            if images:
                for result in self._labeller.compute(engine, batch.memory[: len(images)], images):
                    self._results.put(result)
            self._free.put(batch)
