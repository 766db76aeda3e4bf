from __future__ import annotations

from convoy.loadtest.server_side import BatchCount, difference, snapshot

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
    before, after = snapshot(statistics(10, 1, {1: 10}), "", "m"), snapshot(statistics(2, 1, {1: 2}), "", "m")
    assert difference(before, after).stages == ()
    assert difference(before, after).batches == ()


def test_documents_of_another_kind_are_no_statistics():
    for document in ({}, {"model_stats": None}, {"model_stats": [3]}, {"model_stats": [{"name": "m"}]}):
        assert snapshot(document, "# nothing here\n", "m").stages == ()
