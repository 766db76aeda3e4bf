"""What a runtime makes of a graph answers as the graph itself: small graphs optimised and not, in all that serves."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from convoy.app.engines.base import run_arrays
from convoy.app.engines.onnx_session import WRONG_OPTIMIZERS, Level, new_session, session_options, unoptimised_session
from convoy.app.engines.onnxruntime import OnnxRuntimeCpuEngine
from convoy.app.engines.openvino import OpenVinoEngine
from convoy.app.engines.staged import StagedEngine
from convoy.export.variants.onnx_graph import prepare
from convoy.models.errors import BundleError
from convoy.models.spec import OIP_NAMES, TensorSpec
from tests.support.optimised_graphs import GRAPHS, SmallGraph

LEVELS = (Level.ORT_ENABLE_BASIC, Level.ORT_ENABLE_EXTENDED, Level.ORT_ENABLE_LAYOUT, Level.ORT_ENABLE_ALL)
# OpenVINO's reader knows no Pad that goes around.
NOT_IN_OPENVINO = ("pad around, conv",)
GRAPH = {graph.name: graph for graph in GRAPHS}
each = pytest.mark.parametrize("graph", GRAPHS, ids=[graph.name for graph in GRAPHS])


def error(answers: np.ndarray, expected: np.ndarray) -> float:
    """||a - b|| / ||b||; infinite where shapes, infinities or what is no number differ."""
    if answers.shape != expected.shape:
        return np.inf
    a, b = answers.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(b)
    if not np.array_equal(np.where(finite, 0, b), np.where(np.isfinite(a), 0, a), equal_nan=True):
        return np.inf
    return float(np.linalg.norm((a - b)[finite]) / max(float(np.linalg.norm(b[finite])), 1e-3))


def worst(session: onnxruntime.InferenceSession, expected: list[list[np.ndarray]], graph: SmallGraph) -> float:
    found = [session.run(None, {"x": x}) for x in graph.inputs()]
    pairs = [pair for own, right in zip(found, expected, strict=True) for pair in zip(own, right, strict=True)]
    return max(error(*pair) for pair in pairs)


def meant(graph: SmallGraph) -> list[list[np.ndarray]]:
    """What the graph's nodes compute one after the other."""
    session = unoptimised_session(graph.model().SerializeToString(), threads=1)
    return [session.run(None, {"x": x}) for x in graph.inputs()]


def spec_of(name: str, array: np.ndarray) -> TensorSpec:
    return TensorSpec(name, OIP_NAMES[array.dtype], array.shape)


def opened(engine: type[StagedEngine], path: Path, x: np.ndarray, outputs: list[np.ndarray]) -> StagedEngine:
    names = [output.name for output in onnx.load(str(path)).graph.output]
    return engine(
        path,
        inputs=(spec_of("x", x),),
        outputs=tuple(map(spec_of, names, outputs)),
        max_batch_size=0,
        precision="fp32",
        threads=1,
    )


@each
def test_a_graph_answers_the_same_at_every_level_of_optimisation(graph: SmallGraph, tmp_path: Path) -> None:
    serialised, expected = graph.model().SerializeToString(), meant(graph)
    for level in LEVELS:
        options = session_options(threads=1, level=level)
        assert worst(new_session(serialised, options), expected, graph) <= graph.tolerance, level
    # What is saved as optimised is what others will run, however they do.
    options = session_options(threads=1, level=Level.ORT_ENABLE_EXTENDED)
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    new_session(serialised, options)
    saved = unoptimised_session((tmp_path / "optimised.onnx").read_bytes(), threads=1)
    assert worst(saved, expected, graph) <= graph.tolerance


@each
@pytest.mark.parametrize("engine", [OnnxRuntimeCpuEngine, OpenVinoEngine])
def test_an_engine_answers_as_the_graph_means_it(engine: type[StagedEngine], graph: SmallGraph, tmp_path: Path) -> None:
    if engine is OpenVinoEngine and importlib.util.find_spec("openvino") is None:  # importing it would send telemetry
        pytest.skip("OpenVINO is not installed")
    expected, inputs = meant(graph), graph.inputs()
    onnx.save(graph.model(), str(tmp_path / "model.onnx"))
    try:
        serving = opened(engine, tmp_path / "model.onnx", inputs[0], expected[0])
    except BundleError:
        assert (engine, graph.name) in [(OpenVinoEngine, name) for name in NOT_IN_OPENVINO]
        return
    try:
        serving.warm_up()
        for x, right in zip(inputs, expected, strict=True):
            answers = run_arrays(serving, {"x": x})
            for own, exact in zip(answers.values(), right, strict=True):
                assert error(own, exact) <= graph.tolerance
    finally:
        serving.close()


@each
def test_what_variants_are_made_of_is_still_the_graph(graph: SmallGraph, tmp_path: Path) -> None:
    """The prepared graph, from which ranges are taken and which is quantised."""
    onnx.save(graph.model(), str(tmp_path / "fp32.onnx"))
    prepared = prepare(tmp_path / "fp32.onnx", tmp_path / "prepared.onnx")
    session = unoptimised_session(prepared, threads=1)
    assert worst(session, meant(graph), graph) <= graph.tolerance


def test_every_optimizer_that_is_left_out_is_wrong_and_is_known_by_its_name() -> None:
    """ONNX Runtime ignores a name that it does not know; where it has been mended, the name can go."""
    assert WRONG_OPTIMIZERS == ("Pad_Fusion",), "add a graph that shows what is wrong with the new one"
    graph = GRAPH["pad 0, max pool"]
    left_alone = onnxruntime.InferenceSession(graph.model().SerializeToString(), providers=["CPUExecutionProvider"])
    assert worst(left_alone, meant(graph), graph) > graph.tolerance
