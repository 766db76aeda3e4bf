from __future__ import annotations

import numpy as np
import pytest

from convoy.loadtest.records import Records
from convoy.loadtest.server_side import ProcessReading, UseReading, read_processes, server_use
from convoy.loadtest.statistics import Window
from convoy.loadtest.units import BYTES_PER_MIB, NS_PER_S

OF_ONE = """# TYPE process_resident_memory_bytes gauge
process_resident_memory_bytes 2.0e+08
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.5e+09
# TYPE process_cpu_seconds_total counter
process_cpu_seconds_total 1.28
process_open_fds 29.0
"""
OF_EACH = """# TYPE convoy_process_resident_memory_bytes gauge
convoy_process_resident_memory_bytes{process="core"} 2.0e+08
convoy_process_resident_memory_bytes{process="edge_0"} 5.0e+07
convoy_process_start_time_seconds{process="core"} 1.5e+09
convoy_process_start_time_seconds{process="edge_0"} 1.6e+09
# TYPE convoy_process_cpu_seconds_total counter
convoy_process_cpu_seconds_total{process="core"} 1.28
convoy_process_cpu_seconds_total{process="edge_0"} 0.3
"""


def readings(*cpu_s: float, name: str = "core", began_s: float = 1.0, mib: float = 100) -> list[UseReading]:
    """One a second, the first at one second."""
    return [
        UseReading((at + 1) * NS_PER_S, (ProcessReading(name, used, mib * BYTES_PER_MIB, began_s),))
        for at, used in enumerate(cpu_s)
    ]


def answers(per_second: int, seconds: int) -> Records:
    finished_ns = np.linspace(0, seconds * NS_PER_S, per_second * seconds, endpoint=False).astype(np.int64)
    return Records(finished_ns, finished_ns, finished_ns, np.zeros(len(finished_ns), dtype=np.int16), ())


WINDOW = Window(0, NS_PER_S, 30 * NS_PER_S)


def test_the_process_that_answers_is_read_where_there_is_no_other() -> None:
    assert read_processes(OF_ONE) == (ProcessReading("server", 1.28, 2e8, 1.5e9),)


def test_every_process_is_read_where_all_are_told() -> None:
    assert read_processes(OF_ONE + OF_EACH) == (
        ProcessReading("core", 1.28, 2e8, 1.5e9),
        ProcessReading("edge_0", 0.3, 5e7, 1.6e9),
    )


@pytest.mark.parametrize("metrics", ["", "# nothing\n", "http_requests_total 3\n"])
def test_a_server_that_tells_nothing_of_processes_has_none(metrics: str) -> None:
    assert read_processes(metrics) == ()


def test_cpu_is_over_time_and_over_answers() -> None:
    use = server_use(readings(5.0, 5.5, 6.0), answers(100, 30), WINDOW)
    assert (use.cpu_s, use.cores) == (pytest.approx(1.0), pytest.approx(0.5))
    assert use.cpu_ms_per_answer == pytest.approx(5)
    assert use.peak_mib == pytest.approx(100)
    assert [(one.name, one.cpu_s) for one in use.processes] == [("core", pytest.approx(1.0))]
    assert [(one.start_s, one.end_s, one.cores) for one in use.samples] == [(1, 2, 0.5), (2, 3, 0.5)]
    assert use.cores_interval is None  # two samples tell nothing of how they vary


def test_only_the_measured_time_counts() -> None:
    window = Window(0, 2 * NS_PER_S, 4 * NS_PER_S)
    use = server_use(readings(0, 100, 101, 102, 900), answers(100, 30), window)
    assert use.cpu_s == pytest.approx(2)
    assert server_use(readings(0, 1, 2), answers(1, 30), Window(0, 3 * NS_PER_S, 4 * NS_PER_S)) is None


def test_processes_are_added_and_one_in_the_place_of_another_begins_anew() -> None:
    first = UseReading(NS_PER_S, (ProcessReading("core", 10, 1, 1), ProcessReading("edge_0", 7, 1, 1)))
    second = UseReading(2 * NS_PER_S, (ProcessReading("core", 11, 1, 1), ProcessReading("edge_0", 0.25, 1, 2)))
    use = server_use([first, second], answers(100, 30), WINDOW)
    assert {one.name: one.cpu_s for one in use.processes} == {"core": 1, "edge_0": 0.25}
    assert use.cpu_s == pytest.approx(1.25)
