"""The load test as a function: for programs that bring their own requests.

    endpoint = find_endpoint("http://127.0.0.1:8000")
    request_pool = RequestPool([request_bytes(endpoint, "/inference", payload, None)], AnswerCheck("plain", b"score"))
    options = LoadTestOptions(rate=500, duration_s=10, slo_ms=20)
    result = whole(options, run(options, request_pool, endpoint))  # convoy.loadtest.results
    result.verdict.void, result.summary.goodput

Knows how to start a run. Asks the server nothing beforehand and prints nothing: what a server speaks is the
caller's business.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from convoy.loadtest.arrivals import schedule_of
from convoy.loadtest.endpoint import Endpoint
from convoy.loadtest.jobs import jobs_for
from convoy.loadtest.measure import CrewRun, Measurement
from convoy.loadtest.options import LoadTestOptions
from convoy.loadtest.processes import GeneratorProcess
from convoy.loadtest.progress import RunProgress
from convoy.loadtest.request_pool import RequestPool


def run(
    options: LoadTestOptions,
    request_pool: RequestPool,
    endpoint: Endpoint,
    show: Callable[[RunProgress], None] = lambda progress: None,
) -> Measurement:
    """Sends `request_pool.requests` in turn, as `options` say, to `endpoint`; `show` is told now and then.

    Only the load's options count (rate, steps or concurrency, duration, warm-up, time-out, connections,
    processes, arrivals, seed), not the URL, model or body. Raises nothing for a server that fails: the records
    say how each request ended. `results.whole` and `results.by_step` give figures and the verdict: no figure is
    to be believed without it.
    """
    schedule = schedule_of(options) if options.rates else None
    with contextlib.ExitStack() as stack:
        jobs = stack.enter_context(jobs_for(options, request_pool, endpoint, schedule))
        crew = [stack.enter_context(GeneratorProcess(number, job)) for number, job in enumerate(jobs, start=1)]
        return CrewRun(options, crew, show, schedule.steps if schedule else ()).measure()
