"""How many processes label: by devices, cores and memory."""

from __future__ import annotations

import pytest

from convoy.app.batch import job

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
