"""Requests that are almost right, in large numbers: no crash, no hang, no undocumented answer, no leak.

A failure names its seed and number; `FUZZ_SEED=n pytest ...` fires the same shots again.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from collections.abc import Iterator

import psutil
import pytest
import tritonclient.http as triton

from convoy.models.spec import NUMPY_DTYPES
from tests.support.fuzz import Fuzzer, Range
from tests.support.servers import Server, start_server, wait_until
from tests.support.stores import StoreFolder
from tests.support.wire_forms import region

FAST_SHOTS, SLOW_SHOTS, SLOW_LIMIT_S = 5_000, 100_000, 225.0
SETTLED_SHOTS = 10_000
LEAK_BYTES = 20 << 20


@pytest.fixture(scope="module")
def server(shared_store: StoreFolder) -> Iterator[Server]:
    shared_store.add_digits()
    for dtype in NUMPY_DTYPES:
        shared_store.add_identity(dtype)
    options = ("--allow-shared-memory", "--access-log", "off", "--max-body-mb", "4", "--max-inflight-mb", "64")
    with start_server(*options, store=shared_store.root) as server:
        yield server
        assert server.is_ready()
        wait_until(server.is_at_rest, "nothing is held after all these requests")


def bombard(server: Server, seed: int, first: int, last: int, *, until_s: float = float("inf")) -> int:
    """Fire the shots from `first` to `last`, or until the time is up; the number of the next one."""
    print(f"fuzzing: seed {seed}, shots {first} to {last}")
    with (
        contextlib.closing(Range(server.port)) as own,
        triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client,
        region(client, bytes(4096)) as place,
    ):
        fuzzer = Fuzzer(seed, place.name)
        number = first
        while number < last and time.monotonic() < until_s:
            shot = fuzzer.shot(number)
            try:
                own.fire(shot)
                if number % 100 == 0:
                    own.fire_good()
            except Exception as error:
                shown = shot.data[:600]
                raise AssertionError(f"seed {seed}, shot {number} ({shot.what}): {error!r}\n{shown!r}") from error
            number += 1
            if number % 2000 == 0:
                _register_again(client, place)
        client.unregister_system_shared_memory()
    print(f"answers: {json.dumps({str(status): count for status, count in sorted(own.statuses.items(), key=str)})}")
    assert own.statuses[200] > (number - first) // 20, "hardly any shot got past the first check"
    return number


def _register_again(client: triton.InferenceServerClient, place: object) -> None:
    """Shots may have forgotten the region."""
    if not any(row["name"] == place.name for row in client.get_system_shared_memory_status()):  # type: ignore[attr-defined]
        client.register_system_shared_memory(place.name, place.key, place.nbytes)  # type: ignore[attr-defined]


def test_five_thousand_requests_that_are_almost_right(server: Server) -> None:
    bombard(server, int(os.environ.get("FUZZ_SEED", "1")), 0, FAST_SHOTS)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_hundred_thousand_leave_nothing_behind(server: Server) -> None:
    """At most so many; a machine that is too busy for them says how many it managed."""
    seed = int(os.environ.get("FUZZ_SEED", random.SystemRandom().randrange(1 << 32)))
    until_s = time.monotonic() + SLOW_LIMIT_S
    process = psutil.Process(server.process.pid)
    fired = bombard(server, seed, 0, SETTLED_SHOTS)
    rss_before, files_before = server.rss_bytes, process.num_fds()
    fired = bombard(server, seed, fired, SLOW_SHOTS, until_s=until_s)
    print(f"fired {fired} of {SLOW_SHOTS} shots; memory grew by {(server.rss_bytes - rss_before) / (1 << 20):.1f} MiB")
    assert server.rss_bytes - rss_before <= LEAK_BYTES
    wait_until(lambda: process.num_fds() <= files_before + 4, "the connections are closed")
    assert fired > 2 * SETTLED_SHOTS
