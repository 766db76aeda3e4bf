"""How many processes label, by devices, cores and memory; and what a worker does with batches that fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

import numpy as np
import pytest

from convoy.app.batch import job
from convoy.app.batch.inputs import BatchImage
from convoy.app.batch.labeller import LabelledRows, Labeller, Result, Unreadable
from convoy.app.batch.records import BatchPart
from convoy.app.engines.base import Engine
from convoy.app.engines.batch import BatchResult, EngineFailure, FailureScope
from convoy.app.engines.parts import Part
from convoy.models.bundle import open_bundle
from convoy.models.errors import JobError
from convoy.models.store import DEMO_STORE, Store
from tests.support.stores import digit

GIB = 1 << 30


@pytest.mark.parametrize(
    ("gpus", "cores", "free", "workers", "threads"),
    [
        (0, 1, 64 * GIB, 1, 1),
        (0, 8, 64 * GIB, 8, 1),
        (0, 8, 7 * GIB, 3, 2),
        (0, 8, GIB // 2, 1, 8),
        (0, 64, 512 * GIB, 16, 4),
        (0, 4, None, 4, 1),
        (3, 64, 512 * GIB, 3, 21),
    ],
)
def test_workers_are_as_many_as_gpus_or_as_cores_with_memory(
    monkeypatch: pytest.MonkeyPatch, gpus: int, cores: int, free: int | None, workers: int, threads: int
) -> None:
    monkeypatch.setattr(job, "cpu_budget", lambda: cores)
    monkeypatch.setattr(job, "available_bytes", lambda: free)
    assert job.workers_for(gpus) == workers
    assert job.share_of_cpus(workers) == threads


def labelled(run: Callable[[Sequence[Part]], BatchResult]) -> list[Result]:
    """A hundred images, of which every seventh is broken, labelled by an engine that runs so."""
    part = BatchPart(0, 100, "/", [])
    contents = [digit("seven") if number % 7 else b"broken" for number in range(100)]
    images = [BatchImage(part, place, str(place), partial(bytes, one)) for place, one in enumerate(contents)]
    engine = SimpleNamespace(info=SimpleNamespace(slots=2), run=run, whole_shape=lambda spec, samples: (samples,))
    spec = open_bundle(Store.at(DEMO_STORE).versions("digits")[0].folder).manifest.spec
    found: list[Result] = []
    labeller = Labeller(
        [cast(Engine, engine)],
        spec,
        top_k=1,
        threshold=None,
        embeddings=None,
        max_pixels=10_000,
        batch_size=16,
        decode_threads=3,
    )
    labeller.run((images[start : start + 16] for start in range(0, 100, 16)), found.append)
    return found


def test_images_that_cannot_be_read_leave_no_gap_in_a_batch() -> None:
    samples: list[int] = []

    def run(parts: Sequence[Part]) -> BatchResult:
        samples.append(parts[0].samples)
        answer = SimpleNamespace(data=np.zeros((parts[0].samples, 10), np.float32).data)
        return cast(BatchResult, SimpleNamespace(answers=[[answer]]))

    found = labelled(run)
    assert sorted(samples) == [5, 16, 16, 16, 16, 16]
    rows = [image.place for one in found if isinstance(one, LabelledRows) for image in one.images]
    assert rows == [number for number in range(100) if number % 7]
    assert [one.image.place for one in found if isinstance(one, Unreadable)] == list(range(0, 100, 7))


def test_a_batch_that_fails_is_halved_until_what_is_to_blame_is_alone() -> None:
    def run(parts: Sequence[Part]) -> BatchResult:
        if parts[0].samples > 1:
            raise EngineFailure("one of them")
        raise EngineFailure("this one")

    found = labelled(run)
    assert len(found) == 100
    assert sum("the model fails on this image: this one" in cast(Unreadable, one).error for one in found) == 85


@pytest.mark.parametrize(
    ("scope", "words"),
    [
        (FailureScope.ENGINE, "the engine failed"),
        (FailureScope.MEMORY, "there is not enough memory for a single image"),
    ],
)
def test_a_lost_engine_or_one_without_memory_ends_the_run(scope: FailureScope, words: str) -> None:
    with pytest.raises(JobError, match=words):
        labelled(Mock(side_effect=EngineFailure("gone", scope)))
