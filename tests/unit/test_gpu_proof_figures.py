"""What the proof makes of its figures: targets, the grid, pytest's report, the page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from convoy.models.bundle import Precision
from tests.gpu.proof.grid import Extent, courses, request_sizes
from tests.gpu.proof.page import render, write_page
from tests.gpu.proof.records import (
    SCHEMA_VERSION,
    Agreement,
    BareRow,
    CoreRow,
    Dropped,
    Environment,
    GpuState,
    HttpRow,
    Proof,
    Setting,
    Target,
    file_name,
    read_proof,
    write_proof,
)
from tests.gpu.proof.run_tests import read_report
from tests.gpu.proof.subjects import make_digits
from tests.gpu.proof.targets import DIGITS, RESNET, TENSORRT, TORCH, judge

STATES = (GpuState(1.0, 1980, 3201, 650.0, 60, ()), GpuState(9.0, 1700, 3201, 700.0, 70, ("software power cap",)))
WHERE = Environment(
    *("2026-01-01T00:00:00+00:00", "NVIDIA H200", "9.0", 139.8, "580", "13.0", "a CPU", 16, "3.12"),
    libraries={"torch": "2.11", "tensorrt": "none"},
    states=STATES,
)


def bare(
    precision: Precision = "fp16", size: int = 32, graphs: bool = True, slots: int = 2, **given: object
) -> BareRow:
    figures = {"images_per_s": 1000.0, "period_ms": 10.0, "compute_ms": 8.0, "network": RESNET} | given
    setting = Setting(str(figures.pop("network")), TORCH, precision, size, graphs, slots)
    return BareRow(setting, copy_in_ms=1.0, waited_ms=0.0, copy_out_ms=0.1, **figures)  # type: ignore[arg-type]


def verdicts(**found: object) -> dict[str, Target]:
    proof = Proof(SCHEMA_VERSION, WHERE, **found)  # type: ignore[arg-type]
    return {target.name: target for target in judge(proof) if target.engine == TORCH}


def test_nothing_measured_is_unproved_with_the_engines_own_reason() -> None:
    targets = judge(Proof(SCHEMA_VERSION, WHERE, dropped=(Dropped(TENSORRT, "not installed"),)))
    assert {target.verdict for target in targets} == {"unproved"}
    assert {target.how for target in targets if target.engine == TENSORRT} == {"not installed"}
    assert {target.how for target in targets if target.engine == TORCH} == {"its rows were not measured"}


def test_the_core_is_held_against_the_best_of_the_bare_engine() -> None:
    slow, fast = bare(images_per_s=500.0), bare(size=128, images_per_s=1000.0)
    core = CoreRow(fast.setting, 32, 960.0, 128.0, 1.0, 2.0)
    target = verdicts(bare=(slow, fast), core=(core,))["ResNet-50: in-process core / bare engine"]
    assert (target.measured, target.verdict) == (0.96, "pass")


def test_what_two_slots_hide_is_the_worst_of_the_large_batches() -> None:
    # Of 2 ms beyond computing, 1.9 and then 1.5 are gone with a second slot.
    rows = (bare(slots=1, period_ms=10.0), bare(period_ms=8.1), bare(size=128, slots=1), bare(size=128, period_ms=8.5))
    name = "ResNet-50 fp16, batch >= 32: copy and launch time hidden by two slots"
    target = verdicts(bare=(*rows, bare(size=1, slots=1), bare(size=1, period_ms=10.0)))[name]
    assert target.measured == pytest.approx(0.75)
    assert target.verdict == "FAIL"
    assert target.how == "batch 32: 0.95, batch 128: 0.75"


def test_half_precision_is_held_against_the_same_setting() -> None:
    rows = (bare(images_per_s=2500.0), bare("fp32"), bare("fp32", graphs=False, images_per_s=9999.0))
    target = verdicts(bare=rows)["ResNet-50, batch >= 32: fp16 / fp32 without TF32"]
    assert (target.measured, target.verdict) == (2.5, "pass")


def test_graphs_are_judged_where_launches_weigh_most() -> None:
    rows = (bare(size=1, network=DIGITS, images_per_s=1300.0), bare(size=1, network=DIGITS, graphs=False))
    assert verdicts(bare=rows)["digits, batch 1: CUDA graphs / plain launches"].measured == pytest.approx(1.3)


@pytest.mark.parametrize(
    ("edges", "measured", "how"),
    [((4, 1), 0.9, "4 edges: 0.90, one edge: 0.50"), ((None,), None, "no edge process: 0.90")],
)
def test_http_counts_with_several_edge_processes(edges: tuple[int | None, ...], measured: float, how: str) -> None:
    rates = (900.0, 500.0)
    rows = tuple(
        HttpRow(RESNET, TORCH, "fp16", count, 32, rate, 1.0, 2.0, 0) for count, rate in zip(edges, rates, strict=False)
    )
    target = verdicts(bare=(bare(),), http=rows)["ResNet-50: HTTP with edge processes / bare engine"]
    assert target.measured == measured
    assert how in target.how


def test_answers_are_judged_by_the_worst_error_and_by_all_pictures() -> None:
    rows = (
        Agreement(DIGITS, TORCH, "fp16", "random", 300, 1e-3, 1.0),
        Agreement(RESNET, TORCH, "fp16", "real", 100, 2e-2, 0.98),
        Agreement(RESNET, TORCH, "fp32", "real", 100, 9.0, 0.0),
    )
    found = verdicts(agreements=rows)
    assert found["fp16: largest relative error"].verdict == "FAIL"
    assert found["fp16: top-1 agreement"].measured == pytest.approx(0.995)
    assert found["fp16: top-1 agreement"].verdict == "pass"


def test_the_grid_is_whole_for_one_network_and_a_cross_for_the_others() -> None:
    found = courses([Extent(RESNET, 32, True), Extent(DIGITS, 1, False)], TORCH, ("fp16", "fp32"), (1, 8, 32))
    whole = [course for course in found if course.opening.network == RESNET]
    assert len(whole) == 2 * 2 * 2
    assert {course.sizes for course in whole} == {(1, 8, 32)}
    cross = [course for course in found if course.opening.network == DIGITS]
    assert [(course.opening.deviations, course.sizes) for course in cross] == [(0, (1, 8, 32)), *[(1, (1,))] * 3]
    # What a target needs comes before the corners of the grid.
    assert [course.opening.deviations for course in found] == sorted(course.opening.deviations for course in found)


def test_requests_are_as_large_as_clients_send_them_and_single() -> None:
    assert [request_sizes(size) for size in (1, 8, 32, 128)] == [(1,), (8, 1), (32, 1), (32, 1)]


def test_pytests_last_line_is_read() -> None:
    said = (
        "...s\nSKIPPED [1] tests/gpu/a.py:3: no TensorRT\nFAILED tests/b.py::c - boom\n"
        "1 failed, 12 passed, 3 skipped in 2s"
    )
    run = read_report(said, 2.0)
    assert (run.passed, run.failed, run.skipped) == (12, 1, 3)
    assert run.notes == ("SKIPPED [1] tests/gpu/a.py:3: no TensorRT", "FAILED tests/b.py::c - boom")
    assert read_report("ImportError: no such thing", 1.0).notes == ("pytest said: ImportError: no such thing",)


def test_a_file_comes_back_as_it_was_and_the_page_tells_of_it(tmp_path: Path) -> None:
    found = Proof(SCHEMA_VERSION, WHERE, bare=(bare(),), dropped=(Dropped("tensorrt", "a | b"),))
    path = write_proof(found, tmp_path / "results")
    assert path.name == "nvidia-h200.json"
    assert read_proof(path) == found
    (tmp_path / "results" / "zoo-table.json").write_text("{}")
    write_page(tmp_path)
    page = (tmp_path / "gpu-proof.md").read_text()
    assert "## NVIDIA H200" in page
    assert "| resnet50 | torch on Convoy's slots | fp16 | 32 | on | 2 | 1000 |" in page
    assert "1700 to 1980 MHz, at most 700 W and 70 °C; slowed down by software power cap" in page
    assert "a / b" in page
    assert "Not there: tensorrt." in page
    assert "the program was stopped before its end" in page


def test_without_results_the_page_says_so() -> None:
    assert "No results yet." in render([])


def test_names_of_devices_become_names_of_files() -> None:
    assert [file_name(name) for name in ("NVIDIA H200", "NVIDIA A100-SXM4-80GB", "")] == [
        *("nvidia-h200.json", "nvidia-a100-sxm4-80gb.json"),
        "gpu.json",
    ]


@pytest.mark.slow
def test_torch_with_the_exact_front_answers_as_the_graph_does(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import onnxruntime as ort

    from tests.gpu.proof.torch_engine import with_front

    digits = make_digits(tmp_path, with_int8=False)
    session = ort.InferenceSession(digits.files["fp32"], providers=["CPUExecutionProvider"])
    expected = session.run(None, {"images": digits.real})[0]
    for precision, tolerance in (("fp32", 1e-4), ("fp16", 2e-2)):
        network = with_front(torch, digits.make_network(), digits.spec, precision)
        with torch.inference_mode():
            answers = network(torch.from_numpy(digits.real)).numpy()
        assert answers.dtype == np.float32
        np.testing.assert_allclose(answers, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())
