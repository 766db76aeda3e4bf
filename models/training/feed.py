"""Images in batches, in a given order, for training and evaluation.

Pixels are uint8 [n, H, W, C], labels int64 [n], both on the host.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from torch.utils.data import Dataset as TorchDataset

from convoy.models.errors import ImageError, JobError
from convoy.models.images import preprocess
from convoy.models.samples import DecodedPart, Pixels, Sample
from convoy.models.spec import ImageSpec

Batch = tuple[Tensor, Tensor]


class Feed(Protocol):
    """`labels` are those of all images, in the order that a batch's indices refer to."""

    @property
    def labels(self) -> Tensor: ...

    def batches(self, order: Sequence[Tensor]) -> Iterator[Batch]:
        """Yield one batch for each tensor of indices."""
        ...


class MemoryFeed:
    """Images that were decoded once and are kept in memory."""

    def __init__(self, part: DecodedPart) -> None:
        self._images = torch.from_numpy(part.images)
        self.labels = torch.from_numpy(part.labels)

    def batches(self, order: Sequence[Tensor]) -> Iterator[Batch]:
        for chosen in order:
            yield self._images[chosen], self.labels[chosen]


class Survey(NamedTuple):
    """Statistics of a decoded image: per channel, the mean of its values from 0 to 255 and of their squares."""

    mean: npt.NDArray[np.float64]
    square: npt.NDArray[np.float64]


class WorkerFeed:
    """Images that worker processes decode when they are needed, so that memory holds only a few batches.

    The pixels are those of `MemoryFeed`. Raises JobError if an image is gone or broken meanwhile.
    """

    def __init__(self, samples: Sequence[Sample], image: ImageSpec, workers: int) -> None:
        self.labels = torch.tensor([sample.label for sample in samples], dtype=torch.int64)
        self._order = _Order()
        self._loader = _loader(_Decoding(samples, image), workers, batch_sampler=self._order)

    def batches(self, order: Sequence[Tensor]) -> Iterator[Batch]:
        self._order.batches = order
        with _told_in_one_line():
            yield from self._loader


def survey(samples: Sequence[Sample], image: ImageSpec, workers: int) -> Iterator[Survey | None]:
    """The statistics of each image, in order; None for a broken one."""
    loader = _loader(_Surveying(samples, image), workers, batch_size=None)
    with _told_in_one_line():
        yield from loader


class _Order(Sampler[list[int]]):
    """The batches of the next pass."""

    def __init__(self) -> None:
        self.batches: Sequence[Tensor] = ()

    def __iter__(self) -> Iterator[list[int]]:
        return (chosen.tolist() for chosen in self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class _Decoding(TorchDataset[tuple[npt.NDArray[np.uint8], int]]):
    def __init__(self, samples: Sequence[Sample], image: ImageSpec) -> None:
        self._samples, self._image = samples, image

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.uint8], int]:
        sample = self._samples[index]
        try:
            return preprocess(sample.encoded(), self._image).astype(np.uint8, copy=False), sample.label
        except ImageError as error:
            raise ImageError(f"{sample.name}: {error}") from error


class _Surveying(TorchDataset[Survey | None]):
    def __init__(self, samples: Sequence[Sample], image: ImageSpec) -> None:
        self._samples, self._image = samples, image

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Survey | None:
        try:
            pixels = preprocess(self._samples[index].encoded(), self._image)
        except ImageError:
            return None
        return surveyed(pixels.astype(np.uint8, copy=False))


def surveyed(pixels: Pixels) -> Survey:
    """The statistics of one image, [H, W, C]."""
    return Survey(pixels.mean(axis=(0, 1)), np.square(pixels, dtype=np.float64).mean(axis=(0, 1)))


def _loader(dataset: TorchDataset[Any], workers: int, **how: Any) -> DataLoader[Any]:
    # Spawned, not forked: this process has threads. A separate generator leaves torch's random state alone.
    return DataLoader(
        dataset,
        num_workers=workers,
        multiprocessing_context="spawn",
        persistent_workers=True,
        generator=torch.Generator(),
        collate_fn=None if "batch_sampler" in how else _as_it_is,
        worker_init_fn=_begin_worker,
        **how,
    )


def _as_it_is(one: Any) -> Any:
    return one


def _begin_worker(number: int) -> None:
    # Ctrl-C reaches every process of the terminal; only the training process handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def _told_in_one_line() -> Iterator[None]:
    try:
        yield
    except ImageError as error:
        last = str(error).strip().splitlines()[-1]
        raise JobError(f"an image can no longer be read: {last}") from error
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        why = str(error).splitlines()[0]
        raise JobError(f"a decoding process died ({why}); lower --loader-workers") from error
