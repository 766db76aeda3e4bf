"""The table of hard networks: what reaches the goal, what its page says, and that it goes on where it stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from convoy.export.hard_networks import __main__ as program
from convoy.export.hard_networks import trial
from convoy.export.hard_networks.page import BEGIN, END, write_page
from convoy.export.hard_networks.rows import HardRow, HardTable, read_table, write_table
from convoy.export.hard_networks.trial import NETWORKS, HardNetwork, TrialPlace, try_network
from convoy.export.profiling.work import int8_share
from convoy.models import zoo
from convoy.models.bundle import Interval
from convoy.models.errors import JobError, UsageError
from convoy.models.spec import TensorSpec
from convoy.models.train import TrainResult

GOOD = HardRow(
    network="ghostnet",
    epochs=3,
    training_minutes=12.0,
    accuracy=0.93,
    images=10_168,
    loss_points=0.2,
    loss_bound_points=0.45,
    int8_share=0.97,
    speedup=Interval(1.4, 1.3, 1.5),
    file="int8-openvino.onnx",
    engine="openvino",
    fp32_engine="onnxruntime-cpu",
    machine="CPU, 2 cores, with VNNI",
    has_vnni=True,
    versions={"convoy": "0.1.0"},
)


def test_ten_networks_of_the_zoo_are_tried() -> None:
    assert len({network.name for network in NETWORKS}) == 10
    assert {network.name for network in NETWORKS} <= set(zoo.names())


@pytest.mark.parametrize(
    ("changes", "misses"),
    [
        ({}, ()),
        ({"loss_points": 0.9, "loss_bound_points": 1.0}, ()),
        ({"loss_bound_points": 1.2}, ("loses up to 1.20 points",)),
        ({"int8_share": 0.79}, ("79 % in INT8",)),
        ({"speedup": Interval(0.9, 0.8, 1.1)}, ("0.90 times as fast",)),
        ({"speedup": None}, ("not faster",)),
        ({"speedup": Interval(0.9, 0.8, 1.1), "has_vnni": False}, ()),
        ({"training_minutes": 31.0}, ("trained for 31 minutes",)),
        ({"loss_bound_points": 92.0, "int8_share": 0.5}, ("loses up to 92.00 points", "50 % in INT8")),
        ({"loss_bound_points": None, "why": "cannot be quantised"}, ("cannot be quantised",)),
    ],
)
def test_a_row_says_what_of_the_goal_it_misses(changes: dict[str, object], misses: tuple[str, ...]) -> None:
    assert replace(GOOD, **changes).misses() == misses


def test_the_page_is_written_between_its_marks_and_names_what_was_not_run(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# By hand\n\n{BEGIN}\nold\n{END}\n\nmore words\n")
    bad = replace(GOOD, network="convnext", loss_bound_points=3.0, why="loses 2.9 points")
    write_page(HardTable((GOOD, bad)), ["ghostnet", "convnext", "repvgg"], page)
    text = page.read_text()
    assert text.startswith("# By hand\n\n")
    assert text.endswith(f"{END}\n\nmore words\n")
    assert "old" not in text
    assert "1 of 3 reach the goal, 9 are to." in text
    assert (
        "| ghostnet | 3 | 12.0 | 93.00 % | 0.20 | 0.45 | 97 % | 0 | 1.40 (1.30 to 1.50) "
        "| openvino | onnxruntime-cpu | reached |" in text
    )
    assert "| no: loses up to 3.00 points |" in text
    assert "- convnext: loses 2.9 points." in text
    assert "| repvgg | - | - | - | - | - | - | - | - | - | - | not run yet |" in text
    assert "Machine: CPU, 2 cores, with VNNI; convoy 0.1.0." in text


def test_a_table_is_what_was_written(tmp_path: Path) -> None:
    assert read_table(tmp_path / "none.json") == HardTable()
    table = HardTable((GOOD,)).with_row(replace(GOOD, network="repvgg")).with_row(replace(GOOD, epochs=9))
    write_table(table, tmp_path / "results" / "table.json")
    assert read_table(tmp_path / "results" / "table.json") == table
    assert [row.epochs for row in table.rows] == [9, 3]


def test_a_second_call_goes_on_where_the_first_one_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def one(network: HardNetwork, place: TrialPlace, report: object) -> HardRow:
        tried.append(network.name)
        if len(tried) == 3:
            raise KeyboardInterrupt
        return replace(GOOD, network=network.name)

    monkeypatch.setattr(program, "try_network", one)
    command = ["--docs", str(tmp_path), "--work", str(tmp_path / "work")]
    assert program.main(command) == 130
    assert program.main(command) == 0
    names = [network.name for network in NETWORKS]
    assert tried == [*names[:3], *names[2:]]
    assert "10 of 10 reach the goal" in (tmp_path / "hard-networks.md").read_text()
    del tried[:]
    assert program.main([*command, "--networks", "repvgg,regnet"]) == 0
    assert tried == ["regnet", "repvgg"]
    assert program.main([*command, "--networks", "resnet18"]) == 1
    with pytest.raises(UsageError, match="no hard network 'resnet18'; choose from mobilenet_v2"):
        list(program.make_rows(tmp_path, TrialPlace(tmp_path), ["resnet18"]))


def test_an_export_that_fails_is_a_row_that_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise JobError("no room\nleft")

    (tmp_path / "ghostnet.safetensors").touch()
    (tmp_path / "ghostnet.training.csv").write_text("epoch,epoch_s\n1,90\n2,30\n")
    monkeypatch.setattr(trial, "export_bundle", fail)
    row = try_network(HardNetwork("ghostnet", 2), TrialPlace(tmp_path), lambda progress: None)
    assert row == HardRow("ghostnet", 2, 2.0, why="no room left")


def test_weights_of_an_interrupted_training_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        is_interrupted = True

    def interrupted(options: object, report: object) -> TrainResult:
        (tmp_path / "ghostnet.safetensors").touch()
        return Interrupted()  # type: ignore[return-value]

    monkeypatch.setattr(trial, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        try_network(HardNetwork("ghostnet", 2), TrialPlace(tmp_path), lambda progress: None)
    assert not (tmp_path / "ghostnet.safetensors").exists()


# --- the share of multiply-adds


def quantised(path: Path, *, first_in_int8: bool) -> Path:
    """Two convolutions of 1x1 on [N, 8, 4, 4]: of 8 and then of 24 outputs, the second in INT8 by QDQ."""
    draw = np.random.default_rng(0)
    tensors = {"w1": draw.normal(size=(8, 8, 1, 1)), "w2": draw.normal(size=(24, 8, 1, 1))}
    constants = [
        numpy_helper.from_array(np.float32(0.05), "scale"),
        numpy_helper.from_array(np.uint8(128), "zero"),
        numpy_helper.from_array(np.int8(0), "middle"),
    ]
    nodes = []

    def pair(name: str) -> str:
        nodes.append(helper.make_node("QuantizeLinear", [name, "scale", "zero"], [f"{name}.q"]))
        nodes.append(helper.make_node("DequantizeLinear", [f"{name}.q", "scale", "zero"], [f"{name}.d"]))
        return f"{name}.d"

    def weight(name: str, *, in_int8: bool) -> str:
        if not in_int8:
            constants.append(numpy_helper.from_array(tensors[name].astype(np.float32), name))
            return name
        constants.append(numpy_helper.from_array(np.clip(tensors[name] * 20, -127, 127).astype(np.int8), f"{name}.q"))
        nodes.append(helper.make_node("DequantizeLinear", [f"{name}.q", "scale", "middle"], [f"{name}.d"]))
        return f"{name}.d"

    source = pair("x") if first_in_int8 else "x"
    nodes.append(helper.make_node("Conv", [source, weight("w1", in_int8=first_in_int8)], ["h"]))
    nodes.append(helper.make_node("Conv", [pair("h"), weight("w2", in_int8=True)], ["y"]))
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", count, 4, 4])
        for name, count in (("x", 8), (pair("y"), 24))
    ]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


@pytest.mark.parametrize(("first_in_int8", "share"), [(True, 1.0), (False, 0.75)])
def test_the_share_of_int8_is_of_multiply_adds_and_not_of_layers(
    tmp_path: Path, first_in_int8: bool, share: float
) -> None:
    path = quantised(tmp_path / "int8.onnx", first_in_int8=first_in_int8)
    assert int8_share(path, (TensorSpec("x", "FP32", (8, 4, 4)),)) == pytest.approx(share)


def test_a_file_that_multiplies_nothing_has_no_share(tmp_path: Path) -> None:
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", ends[:1], ends[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tmp_path / "r.onnx")
    with pytest.raises(JobError, match=r"r.onnx has no convolution and no matrix product"):
        int8_share(tmp_path / "r.onnx", (TensorSpec("x", "FP32", (2,)),))
