"""Convoy's builder with TensorRT for RTX as it is installed: what is built, what is refused and why, and what stops it.

Neither a GPU nor a driver is needed.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tensorrt_rtx
from export_fixtures import save_graph
from onnx import TensorProto, helper, numpy_helper

from convoy.export.tensorrt.engine import Tuned, tune
from convoy.export.tensorrt.watch import BuildWatch
from convoy.models.errors import JobError
from convoy.models.plans import BuildEvent, BuildOptions
from tests.support.stores import DEMO

# Of no use to RTX, and it says so each time.
pytestmark = pytest.mark.filterwarnings("ignore:.*Timing cache operations are no-ops:DeprecationWarning")
PRECISIONS = {"fp32.onnx": "fp32", "fp16.onnx": "fp16", "int8-trt.onnx": "int8"}


class Builds:
    """The builder under a watch whose clock goes on by a second whenever it is read."""

    def __init__(self, limit_s: float | None = None, tell: Callable[[BuildEvent], None] = lambda event: None) -> None:
        self.events: list[BuildEvent] = []
        self._tell = tell
        self.watch = BuildWatch(self._told, limit_s, itertools.count(0.0).__next__)

    def tune(self, path: Path, precision: str = "fp32", batch_sizes: tuple[int, ...] = (1, 4)) -> Tuned:
        options = BuildOptions(precision, batch_sizes)  # type: ignore[arg-type]
        # Freed while the library makes another one, the builder of a build that was stopped waits for itself for ever.
        # A server's builds have a process each.
        gc.collect()
        return tune(tensorrt_rtx, path, options, (), None, self.watch)

    def _told(self, event: BuildEvent) -> None:
        self.events.append(event)
        self._tell(event)


def refusal(path: Path) -> list[str]:
    """The lines of the error that a graph is refused with."""
    with pytest.raises(JobError) as caught:
        Builds().tune(path)
    return str(caught.value).splitlines()


def write(path: Path, *nodes: Any, dtype: int = TensorProto.FLOAT, constants: Sequence[Any] = ()) -> Path:
    """A graph from x [batch, 3, 8, 8] to y."""
    x = helper.make_tensor_value_info("x", dtype, ["batch", 3, 8, 8])
    y = helper.make_tensor_value_info("y", dtype, ["batch", "a", "b", "c"])
    return save_graph(path, nodes, [x], [y], constants)


def constant(name: str, *shape: int) -> Any:
    return numpy_helper.from_array(np.ones(shape, np.float32), name)


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    return tmp_path / "graph.onnx"


# What is built


@pytest.mark.parametrize("file", PRECISIONS)
def test_every_variant_of_the_demo_is_built(file: str) -> None:
    builds = Builds()
    tuned = builds.tune(DEMO / file, PRECISIONS[file])
    assert tuned.data is not None
    # The weights are in it, in the types of the graph.
    assert len(tuned.data) > (DEMO / file).stat().st_size
    assert tuned.shapes == {"images": (-1, 32, 32, 3)}
    steps = [event for event in builds.events if event.text == "Building engine"]
    assert steps[0].parent is None
    assert 0 < steps[-1].step == steps[-1].total


# What is refused


def test_a_truncated_or_empty_file_is_refused(graph: Path) -> None:
    whole = (DEMO / "fp32.onnx").read_bytes()
    graph.write_bytes(whole[: len(whole) // 2])
    (line,) = refusal(graph)
    assert str(graph) in line
    assert "damaged" in line
    assert "Failed to parse the ONNX model" in line
    assert line.endswith("export it again")
    graph.write_bytes(b"")  # a network without outputs
    tuned = Builds().tune(graph)
    assert tuned.data is None
    assert "must have at least one output" in tuned.problem


@pytest.mark.parametrize("operator", ["Frobnicate", "StringNormalizer"])
def test_unknown_operators_are_named_with_their_nodes(graph: Path, operator: str) -> None:
    write(graph, helper.make_node("Relu", ["x"], ["r"], "relu"), helper.make_node(operator, ["r"], ["y"], "odd"))
    assert refusal(graph)[1:] == [f"  node odd ({operator}): TensorRT has no such operator"]


def test_each_unknown_operator_has_a_line_and_a_node_without_a_name_its_number(graph: Path) -> None:
    write(graph, helper.make_node("First", ["x"], ["r"], "one"), helper.make_node("Second", ["r"], ["y"]))
    assert refusal(graph)[1:] == [
        "  node one (First): TensorRT has no such operator",
        "  node 1 (Second): TensorRT has no such operator",
    ]


@pytest.mark.parametrize(
    ("operator", "shape", "reason"),
    [
        ("Conv", (4, 5, 3, 3), "Kernel weight dimension failed to broadcast"),
        ("Add", (1, 7, 8, 8), "broadcast dimensions must be conformable"),
    ],
)
def test_shapes_that_do_not_fit_are_told_with_the_node(
    graph: Path, operator: str, shape: tuple[int, ...], reason: str
) -> None:
    write(graph, helper.make_node(operator, ["x", "w"], ["y"], "wrong"), constants=[constant("w", *shape)])
    _, problem = refusal(graph)
    assert problem.startswith(f"  node wrong ({operator}): ")
    assert reason in problem


def test_a_uint8_input_that_is_not_cast_first_comes_with_advice(graph: Path) -> None:
    write(graph, helper.make_node("Transpose", ["x"], ["y"], "turn", perm=[0, 2, 3, 1]), dtype=TensorProto.UINT8)
    _, problem = refusal(graph)
    assert problem.startswith("  node turn (Transpose): ")
    assert problem.endswith("directly into a Cast; export the model with the cast first")


def test_weights_whose_file_is_missing_are_named(graph: Path) -> None:
    write(graph, helper.make_node("Conv", ["x", "w"], ["y"], "conv"), constants=[constant("w", 4, 3, 3, 3)])
    data = graph.with_suffix(".data")
    onnx.save(onnx.load(graph), graph, save_as_external_data=True, location=data.name, size_threshold=0)
    assert Builds().tune(graph).data is not None
    data.unlink()
    (line,) = refusal(graph)
    assert "Failed to import initializer: w): it is damaged or lacks a file of its own" in line


# What stops a build


def test_the_time_limit_stops_a_build_at_its_next_step(graph: Path) -> None:
    builds = Builds(limit_s=150)
    tuned = builds.tune(DEMO / "fp32.onnx")
    assert tuned.data is None
    assert "BuildCanceled" in tuned.problem
    assert any(event.text == "Building engine" for event in builds.events)
    with pytest.raises(JobError, match=r"the build exceeded 150 s; raise --time-limit-s"):
        builds.watch.check()


def test_a_build_is_stopped_when_nobody_reads_its_progress() -> None:
    def tell(event: BuildEvent) -> None:
        if event.text == "Building engine":
            raise BrokenPipeError(32, "Broken pipe")

    builds = Builds(tell=tell)
    assert builds.tune(DEMO / "fp32.onnx").data is None
    with pytest.raises(JobError, match="the progress is not read any more"):
        builds.watch.check()
