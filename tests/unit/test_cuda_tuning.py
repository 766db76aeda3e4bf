"""How the convolutions' tuning is found and remembered, by the fake device's own clock."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from convoy.app.engines.batch import EngineFailure
from convoy.app.engines.cuda.engine import CudaEngine
from convoy.app.engines.onnxruntime_cuda import ConvolutionTuning
from convoy.app.engines.onnxruntime_tuned import tuned
from tests.support.gpu_bench import TwoEngines

Options = Mapping[str, str]


@pytest.fixture
def bench(tmp_path: Path) -> TwoEngines:
    return TwoEngines(tmp_path)


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    return tmp_path / "plans" / "digest" / "ort.json"


def tune(bench: TwoEngines, memory: Path | None = None, largest: int = 8) -> ConvolutionTuning:
    def open_trial(tuning: ConvolutionTuning, sizes: tuple[int, ...]) -> CudaEngine:
        assert bench.cuda.live.total() == 0, "one engine at a time: the device may have no room for two"
        return bench.open_onnxruntime(tuning=tuning, batch_sizes=sizes, slots=1)

    return tuned(open_trial, largest, memory)


def way(options: Options) -> tuple[str, bool]:
    return options["cudnn_conv_algo_search"], options["prefer_nhwc"] == "1"


WAYS = [(search, nhwc) for search in ("HEURISTIC", "EXHAUSTIVE") for nhwc in (True, False)]


@pytest.mark.parametrize("fastest", WAYS)
def test_the_fastest_way_is_chosen(bench: TwoEngines, fastest: tuple[str, bool]) -> None:
    bench.onnxruntime.takes_ns = lambda samples, options: 1e6 if way(options) == fastest else 2e6
    chosen = tune(bench)
    assert (chosen.search, chosen.nhwc) == fastest
    assert {way(options) for options in bench.onnxruntime.opened} == set(WAYS)


def test_the_smallest_batch_counts_as_much_as_the_largest(bench: TwoEngines) -> None:
    def takes_ns(samples: int, options: Options) -> float:
        if way(options) == ("HEURISTIC", False):
            return 0.5e6 if samples == 1 else 8.8e6  # half, for a tenth more
        return 1e6 if samples == 1 else 8e6

    bench.onnxruntime.takes_ns = takes_ns
    assert way(vars_of(tune(bench))) == ("HEURISTIC", False)


def vars_of(tuning: ConvolutionTuning) -> Options:
    return {"cudnn_conv_algo_search": tuning.search, "prefer_nhwc": str(int(tuning.nhwc))}


def test_a_model_that_cannot_be_captured_is_served_without_graphs(
    bench: TwoEngines, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise RuntimeError("a node synchronises")

    caplog.set_level("INFO", "convoy")
    bench.onnxruntime.while_capturing = refuse
    assert tune(bench).graphs is False
    assert "no CUDA graphs for this model: a node synchronises" in caplog.text


def test_a_way_that_cannot_be_captured_gives_way_to_one_that_can(bench: TwoEngines) -> None:
    def refuse() -> None:
        if way(bench.onnxruntime.opened[-1])[1]:
            raise RuntimeError("a node synchronises")

    bench.onnxruntime.while_capturing = refuse
    chosen = tune(bench)
    assert (chosen.nhwc, chosen.graphs) == (False, True)


def test_what_was_found_is_remembered(bench: TwoEngines, memory: Path) -> None:
    bench.onnxruntime.takes_ns = lambda samples, options: 1e6 if way(options) == ("EXHAUSTIVE", False) else 2e6
    chosen = tune(bench, memory)
    trials = len(bench.onnxruntime.opened)
    assert tune(bench, memory) == chosen
    assert len(bench.onnxruntime.opened) == trials
    body = json.loads(memory.read_bytes())
    assert body["tried_ms"] == {
        "HEURISTIC NHWC": {"1": 2.0, "8": 2.0},
        "HEURISTIC NCHW": {"1": 2.0, "8": 2.0},
        "EXHAUSTIVE NHWC": {"1": 2.0, "8": 2.0},
        "EXHAUSTIVE NCHW": {"1": 1.0, "8": 1.0},
    }
    assert [path.name for path in memory.parent.iterdir()] == [memory.name]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'{"schema_version": 2}',
        # From when one size was tried.
        b'{"schema_version": 1, "chosen": {"search": "HEURISTIC", "nhwc": true, "graphs": true}, "tried_ms": {"": 1}}',
        b'{"schema_version": 99, "chosen": {"search": "HEURISTIC", "nhwc": true, "graphs": true}, "tried_ms": {}}',
        b'{"schema_version": 2, "chosen": {"search": "DEFAULT", "nhwc": true, "graphs": true}, "tried_ms": {}}',
    ],
)
def test_a_file_that_is_broken_or_of_another_version_is_written_anew(
    bench: TwoEngines, memory: Path, content: bytes
) -> None:
    memory.parent.mkdir(parents=True)
    memory.write_bytes(content)
    bench.onnxruntime.takes_ns = lambda samples, options: 1e6 if way(options) == ("EXHAUSTIVE", True) else 2e6
    assert tune(bench, memory).search == "EXHAUSTIVE"
    trials = len(bench.onnxruntime.opened)
    assert trials > 0
    assert tune(bench, memory).search == "EXHAUSTIVE"
    assert len(bench.onnxruntime.opened) == trials


def test_a_folder_that_cannot_be_written_costs_only_the_memory(bench: TwoEngines, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for _ in range(2):
        assert tune(bench, tmp_path / "file" / "ort.json")


def test_ways_that_fail_in_the_warm_up_hold_no_memory_while_others_are_tried(bench: TwoEngines) -> None:
    """`tune` itself looks before each trial."""

    def refuse(arrays: object) -> None:
        raise RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")

    bench.onnxruntime.spoils = refuse
    with pytest.raises(EngineFailure, match="CUDNN_STATUS_EXECUTION_FAILED"):
        tune(bench)
    assert len(bench.onnxruntime.opened) == 3 * len(WAYS), "with graphs, and a session for each of two sizes without"
    assert bench.cuda.live.total() == 0
