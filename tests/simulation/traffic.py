"""Requests and true latencies for the simulator's tests."""

from __future__ import annotations

import random
from collections.abc import Iterator

from convoy.app.scheduling.request import MILLISECOND_NS, SECOND_NS, ModelKey, Request, Shape
from convoy.loadtest.simulation.simulator import TrueLatency


def affine_ns(fixed_ms: float, per_sample_ms: float) -> TrueLatency:
    """Batches of b samples take `fixed + per_sample * b`."""
    return lambda samples, now_ns: (fixed_ms + per_sample_ms * samples) * MILLISECOND_NS


def disturbed_ns(truth: TrueLatency, factor: float, since_ns: int, until_ns: int) -> TrueLatency:
    """Batches that start between two times take `factor` times as long."""
    return lambda samples, now_ns: truth(samples, now_ns) * (factor if since_ns <= now_ns < until_ns else 1.0)


def make_request(
    number: int,
    key: ModelKey,
    arrival_ns: int,
    *,
    samples: int = 1,
    shape: Shape = (1,),
    priority: int = 0,
    deadline_ns: int | None = None,
    latest_start_ns: int | None = None,
) -> Request:
    """A request without memory: the policy never looks at it."""
    return Request(
        id=number,
        key=key,
        samples=samples,
        shapes=(shape,),
        slots=(),
        inputs=(),
        wanted=(),
        outputs=(),
        arrival_ns=arrival_ns,
        priority=priority,
        deadline_ns=deadline_ns,
        latest_start_ns=latest_start_ns,
    )


def poisson_stream(
    key: ModelKey,
    *,
    per_second: float,
    until_ns: int,
    seed: int,
    within_ns: int | None = None,
    first_id: int = 0,
) -> Iterator[Request]:
    """Single samples that come at random; each wants its answer `within_ns` of its arrival."""
    chance = random.Random(seed)
    now_s, number = 0.0, first_id
    while True:
        now_s += chance.expovariate(per_second)
        arrival_ns = round(now_s * SECOND_NS)
        if arrival_ns >= until_ns:
            return
        yield make_request(number, key, arrival_ns, deadline_ns=None if within_ns is None else arrival_ns + within_ns)
        number += 1
