"""What a load test reads of the server: stages, batches, and what its processes use."""

from __future__ import annotations

import numpy as np
import pytest

from convoy.loadtest.records import Records
from convoy.loadtest.server_side import (
    BatchCount,
    ProcessReading,
    ServerSide,
    UseReading,
    difference,
    read_processes,
    server_use,
    snapshot,
)
from convoy.loadtest.statistics import Window
from convoy.loadtest.units import BYTES_PER_MIB, NS_PER_S

METRICS = """# HELP convoy_stage_duration_seconds Time in one stage
# TYPE convoy_stage_duration_seconds histogram
convoy_stage_duration_seconds_bucket{{le="+Inf",model="m",stage="decode",version="1"}} {count}
convoy_stage_duration_seconds_count{{model="m",stage="decode",version="1"}} {count}
convoy_stage_duration_seconds_sum{{model="m",stage="decode",version="1"}} {seconds}
convoy_stage_duration_seconds_count{{model="other",stage="decode",version="1"}} 77
convoy_stage_duration_seconds_sum{{model="other",stage="decode",version="1"}} 77
convoy_stage_duration_seconds_count{{model="m",stage="compute",version="1"}} 3
convoy_stage_duration_seconds_sum{{model="m",stage="compute",version="1"}} 3
"""


def statistics(requests: int, queue_ms: float, batches: dict[int, int], model: str = "m") -> dict:
    durations = {"queue": {"count": requests, "ns": int(requests * queue_ms * 1e6)}}
    rows = [{"batch_size": size, "compute_infer": {"count": count}} for size, count in batches.items()]
    return {"model_stats": [{"name": model, "inference_stats": durations, "batch_stats": rows}]}


def test_what_happened_between_two_readings():
    before = snapshot(statistics(10, 100, {1: 10}), METRICS.format(count=10, seconds=5), "m")
    grown = statistics(30, 40, {1: 10, 4: 5})
    after = snapshot(grown, METRICS.format(count=30, seconds=5.04), "m")
    found = difference(before, after)
    assert [(stage.name, round(stage.mean_ms, 6), stage.count) for stage in found.stages] == [
        ("decode", 2, 20),
        ("queue", 10, 20),
    ]
    assert found.batches == (BatchCount(4, 5),)
    assert found.mean_batch == 4


def test_versions_of_a_model_are_added_and_other_models_left_out():
    document = {
        "model_stats": [
            *statistics(1, 1, {2: 1})["model_stats"],
            *statistics(3, 1, {2: 2})["model_stats"],
            *statistics(9, 9, {9: 9}, "other")["model_stats"],
        ]
    }
    found = difference(snapshot({}, "", "m"), snapshot(document, "", "m"))
    assert [(stage.name, stage.count) for stage in found.stages] == [("queue", 4)]
    assert found.batches == (BatchCount(2, 3),)


def test_a_server_that_was_started_anew_meanwhile_gives_nothing():
    before, after = (snapshot(statistics(count, 1, {1: count}), "", "m") for count in (10, 2))
    assert difference(before, after) == ServerSide((), ())


def test_documents_of_another_kind_are_no_statistics():
    for document in ({}, {"model_stats": None}, {"model_stats": [3]}, {"model_stats": [{"name": "m"}]}):
        assert snapshot(document, "# nothing here\n", "m").stages == ()


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


@pytest.mark.parametrize(
    ("metrics", "processes"),
    [
        (OF_ONE, [ProcessReading("server", 1.28, 2e8, 1.5e9)]),  # the one that answers, where no others are told
        (OF_ONE + OF_EACH, [ProcessReading("core", 1.28, 2e8, 1.5e9), ProcessReading("edge_0", 0.3, 5e7, 1.6e9)]),
        ("", []),
        ("# nothing\n", []),
        ("http_requests_total 3\n", []),
    ],
)
def test_the_processes_that_are_told_are_read(metrics: str, processes: list[ProcessReading]) -> None:
    assert read_processes(metrics) == tuple(processes)


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
