"""The same parts on a Ray cluster: Ray Data gives them to actors that hold an engine.

A part is a row of Ray Data. The actors read images and write results themselves, so that only names go through Ray's
memory; when an actor is killed, another does its part again. Inputs and --out must lie where every node finds them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import msgspec
import numpy as np
from msgspec.json import decode, encode

from convoy.app.batch.records import BatchJob, BatchPart, Fatal, Labelled, PartDone, Ready, Report
from convoy.app.engines.table import may_use_gpus
from convoy.models.errors import ConvoyError, JobError, UsageError


class RayLabeller:
    """An actor: opened once, then a part a call."""

    def __init__(self, job: BatchJob) -> None:
        from convoy.app.batch.worker import open_model

        self._job, self._fatal = job, ""
        try:
            self._opened = open_model(job)
        except ConvoyError as error:
            self._fatal = str(error)

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        """`rows["part"]` are parts in JSON; the answers are what a local worker would report of them."""
        return {"done": np.array([encode(self._label(decode(one, type=BatchPart))) for one in rows["part"]], object)}

    def _label(self, part: BatchPart) -> PartDone | Fatal:
        from convoy.app.batch.worker import PartsWorker

        if self._fatal:
            return Fatal(self._fatal)
        reports: list[Report] = []
        parts: SimpleQueue[BatchPart | None] = SimpleQueue()
        parts.put(part)
        parts.put(None)
        try:
            PartsWorker(self._job, self._opened, reports.append).label(parts)
        except ConvoyError as error:
            return Fatal(str(error))
        return next(one for one in reports if isinstance(one, PartDone))


def run_on_ray(address: str, job: BatchJob, parts: Sequence[BatchPart], workers: int) -> Iterator[Ready | Labelled]:
    """What happens until every part is done. Raises JobError or UsageError."""
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise UsageError(f"--ray needs Ray ({error}); pip install 'convoy-serve[ray]'") from error
    if not ray.is_initialized():
        try:
            ray.init(address=address or None, logging_level=logging.WARNING, log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UsageError(f"--ray: there is no cluster at {address or 'the default address'} ({error})") from error
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    cluster = ray.cluster_resources()
    gpus = int(cluster.get("GPU", 0)) if may_use_gpus(job.run.identity.engine) else 0
    cpus = max(1, int(cluster.get("CPU", 1)))
    # More than four CPUs of a worker would wait for each other within one network.
    cpus_each = max(1, min(4, cpus // (workers or gpus or 1)))
    workers = min(workers or gpus or max(1, cpus // cpus_each), len(parts))
    resources: dict[str, Any] = {"num_cpus": cpus_each} | ({"num_gpus": 1} if gpus else {})
    job = msgspec.structs.replace(job, threads=cpus_each)
    if job.run.runner is None:
        found: Ready | Fatal = ray.get(ray.remote(**resources)(_prove).remote(job))
        if isinstance(found, Fatal):
            raise JobError(found.message)
        yield found
        job = msgspec.structs.replace(job, run=job.run.labelled_by(found.runner))
    rows = [{"part": encode(part)} for part in parts]
    done = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
        RayLabeller,
        fn_constructor_args=(job,),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=workers),
        **resources,
    )
    for row in done.iter_rows():
        one = decode(row["done"], type=PartDone | Fatal)
        if isinstance(one, Fatal):
            raise JobError(one.message)
        yield Labelled(one.images, one.errors)


def _prove(job: BatchJob) -> Ready | Fatal:
    """Find out which engine labels, on a node that will label."""
    from convoy.app.batch.worker import open_model

    try:
        return open_model(job).ready
    except ConvoyError as error:
        return Fatal(str(error))
