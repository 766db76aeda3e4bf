"""Which nodes of an ONNX file see values and which only sizes, read without the onnx library."""

from __future__ import annotations

import contextlib
from pathlib import Path

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.models.errors import BundleError
from convoy.models.onnx_nodes import has_half_weights, read_nodes
from convoy.models.store import DEMO_STORE
from tests.support import onnx_models


def test_what_is_computed_from_sizes_sees_no_values(tmp_path: Path) -> None:
    nodes = read_nodes(onnx_models.resized(tmp_path / "model.onnx"))
    assert {node.name: node.sees_values for node in nodes} == {
        "shape": False,
        "slice": False,
        "concat": False,
        "resize": True,
    }


def test_constants_see_nothing_and_what_they_are_added_to_does(tmp_path: Path) -> None:
    nodes = read_nodes(onnx_models.shift(tmp_path / "model.onnx", 1.0))
    assert [(node.op_type, node.sees_values) for node in nodes] == [("Constant", False), ("Add", True)]


@pytest.mark.parametrize("file", sorted(DEMO_STORE.rglob("*.onnx")), ids=lambda path: path.name)
def test_a_whole_network_is_read_as_the_library_reads_it(file: Path) -> None:
    expected = [(node.name, node.op_type) for node in onnx.load(file).graph.node]
    assert [(node.name, node.op_type) for node in read_nodes(file)] == expected


@pytest.mark.parametrize("file", sorted(DEMO_STORE.rglob("*.onnx")), ids=lambda path: path.name)
def test_half_precision_is_known_by_the_weights(file: Path) -> None:
    types = {weight.data_type for weight in onnx.load(file).graph.initializer}
    assert has_half_weights(file) is (onnx.TensorProto.FLOAT16 in types)


@given(data=st.binary(max_size=200))
def test_anything_else_is_refused_or_has_some_nodes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("files") / "model.onnx"
    path.write_bytes(data)
    with contextlib.suppress(BundleError):
        assert all(isinstance(node.name, str) for node in read_nodes(path))


@pytest.mark.parametrize("cut", [1, 2, 10, 100])
def test_a_file_that_was_cut_off_is_refused(tmp_path: Path, cut: int) -> None:
    path = onnx_models.resized(tmp_path / "model.onnx")
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(BundleError, match="is no ONNX file"):
        read_nodes(path)
