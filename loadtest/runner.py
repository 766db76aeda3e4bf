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

from collections.abc import Callable

from convoy.loadtest.endpoint import Endpoint
from convoy.loadtest.measure import Measurement, measure
from convoy.loadtest.options import LoadTestOptions
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
    return measure(options, request_pool, endpoint, show)
