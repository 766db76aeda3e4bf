"""ONNX files read without onnx: what lies beside them, and which nodes they have."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import onnx
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.internal.encoder import _VarintBytes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import external_data_helper

from convoy.models.errors import BundleError
from convoy.models.onnx_digest import check_onnx_files, external_data
from convoy.models.onnx_nodes import has_half_weights, read_nodes
from convoy.models.store import DEMO_STORE
from tests.support import onnx_models

_VARINT, _LENGTH, _GROUP, _GROUP_END = 0, 2, 3, 4
UNKNOWN = 4000  # a field's number that ONNX does not have


def field(number: int, content: bytes) -> bytes:
    return _VarintBytes(number << 3 | _LENGTH) + _VarintBytes(len(content)) + content


def shuffled(message: Any, chance: random.Random, unknown: list[bytes]) -> bytes:
    """The message, encoded with its fields in any order, and with some that nobody knows between them."""
    pieces: dict[int, list[bytes]] = {}
    for descriptor, value in message.ListFields():
        values = value if descriptor.is_repeated else [value]
        if descriptor.type == FieldDescriptor.TYPE_MESSAGE:
            pieces[descriptor.number] = [field(descriptor.number, shuffled(one, chance, unknown)) for one in values]
        else:
            alone = type(message)()
            if descriptor.is_repeated:
                getattr(alone, descriptor.name).extend(value)
            else:
                setattr(alone, descriptor.name, value)
            pieces[descriptor.number] = [alone.SerializePartialToString()]
    noise = [chance.choice(unknown)] if chance.random() < 0.3 else []
    own: list[list[bytes]] = [*pieces.values(), noise]
    order = [index for index, some in enumerate(own) for _ in some]
    chance.shuffle(order)
    queues = [iter(some) for some in own]
    return b"".join(next(queues[index]) for index in order)


def group(content: bytes) -> bytes:
    return _VarintBytes(UNKNOWN << 3 | _GROUP) + content + _VarintBytes(UNKNOWN << 3 | _GROUP_END)


class Places:
    """A model with tensors in every place that ONNX has for them; `names` are their external data's."""

    def __init__(self, chance: random.Random) -> None:
        self._chance, self.names = chance, set[str]()

    def model(self) -> onnx.ModelProto:
        model = onnx.ModelProto(ir_version=9, producer_name="test")
        self._graph(model.graph, 0)
        if self._chance.random() < 0.5:
            training = model.training_info.add()
            self._graph(training.initialization, 1)
            self._graph(training.algorithm, 1)
        if self._chance.random() < 0.5:
            function = model.functions.add(name="f", domain="d")
            self._node(function.node.add(), 1)
            self._attribute(function.attribute_proto.add(), 1)
        return model

    def _graph(self, graph: onnx.GraphProto, depth: int) -> None:
        graph.name = "g"
        for _ in range(self._chance.randrange(3)):
            self._tensor(graph.initializer.add())
        if self._chance.random() < 0.3:
            self._sparse(graph.sparse_initializer.add())
        for _ in range(self._chance.randrange(3)):
            self._node(graph.node.add(), depth + 1)

    def _node(self, node: onnx.NodeProto, depth: int) -> None:
        node.op_type = "If"
        for _ in range(self._chance.randrange(3)):
            self._attribute(node.attribute.add(), depth)

    def _attribute(self, attribute: onnx.AttributeProto, depth: int) -> None:
        attribute.name = "a"
        ways = {
            onnx.AttributeProto.TENSOR: lambda: self._tensor(attribute.t),
            onnx.AttributeProto.SPARSE_TENSOR: lambda: self._sparse(attribute.sparse_tensor),
            onnx.AttributeProto.TENSORS: lambda: self._tensor(attribute.tensors.add()),
            onnx.AttributeProto.SPARSE_TENSORS: lambda: self._sparse(attribute.sparse_tensors.add()),
            onnx.AttributeProto.GRAPH: lambda: self._graph(attribute.g, depth),
            onnx.AttributeProto.GRAPHS: lambda: self._graph(attribute.graphs.add(), depth),
        }
        attribute.type = self._chance.choice(list(ways) if depth < 4 else list(ways)[:4])
        ways[attribute.type]()

    def _sparse(self, sparse: onnx.SparseTensorProto) -> None:
        self._tensor(sparse.values)
        self._tensor(sparse.indices)

    def _tensor(self, tensor: onnx.TensorProto) -> None:
        tensor.name, tensor.data_type = "w", 1
        tensor.dims.extend([2])
        if self._chance.random() < 0.3:
            tensor.raw_data = bytes(8)
            return
        name = self._chance.choice(["weights", "sub/weights", "w" * 200]) + str(len(self.names))
        self.names.add(name)
        tensor.data_location = 1
        for key, value in (("location", name), ("offset", "0"), ("length", "8")):
            tensor.external_data.add(key=key, value=value)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32))
def test_what_a_model_keeps_beside_it_is_found_however_it_is_written(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    places = Places(chance)
    # In a field that nobody knows nothing is a tensor.
    entry = field(13, field(1, b"location") + field(2, b"of nobody"))
    unknown = [_VarintBytes(UNKNOWN << 3 | _VARINT) + b"\x05", field(UNKNOWN, entry), group(entry), group(group(b""))]
    data = shuffled(places.model(), chance, unknown)
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    found = external_data(path)
    assert found == tuple(sorted(places.names))
    assert set(told_by_onnx(onnx.ModelProto.FromString(data))) <= set(found)


def told_by_onnx(model: onnx.ModelProto) -> list[str]:
    helper = external_data_helper
    used = [tensor for tensor in helper._get_all_tensors(model) if helper.uses_external_data(tensor)]
    return [location for tensor in used if (location := helper.ExternalDataInfo(tensor).location)]


def model_of(*entries: bytes) -> bytes:
    tensor = field(8, b"w") + b"\x70\x01" + b"".join(field(13, entry) for entry in entries)
    return field(7, field(5, tensor))


KEY, VALUE = field(1, b"location"), field(2, b"../secret")


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (model_of(KEY + VALUE), ("../secret",)),
        (model_of(VALUE + KEY), ("../secret",)),
        (model_of(field(1, b"offset") + VALUE + KEY), ("../secret",)),  # the last one counts
        (model_of(KEY + field(2, b"innocent") + VALUE), ("../secret",)),
        (model_of(KEY + VALUE + field(1, b"checksum")), ()),
        (model_of(group(KEY) + VALUE + field(9, b"x") + KEY), ("../secret",)),
        (model_of(KEY + field(2, b"one"), VALUE + KEY), ("../secret", "one")),
        (
            model_of(b"\x8a\x00" + _VarintBytes(8) + b"location" + VALUE),
            ("../secret",),
        ),  # a number with a byte too many
        (field(7, b"") + model_of(VALUE + KEY), ("../secret",)),  # parts of a message that comes twice are one
    ],
)
def test_a_file_cannot_hide_what_it_would_open(tmp_path: Path, data: bytes, found: tuple[str, ...]) -> None:
    path = tmp_path / "model" / "model.onnx"
    path.parent.mkdir()
    path.write_bytes(data)
    (tmp_path / "secret").write_bytes(bytes(8))
    assert set(told_by_onnx(onnx.ModelProto.FromString(data))) <= set(found)
    assert external_data(path) == found
    if "../secret" in found:
        with pytest.raises(BundleError, match="outside its folder"):
            check_onnx_files(path)


@given(data=st.binary(min_size=1, max_size=100))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_no_model_is_refused_before_a_library_sees_it(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    try:
        onnx.ModelProto.FromString(data)
    except Exception:
        return
    external_data(path)  # what protobuf reads is read here, too


def test_what_is_computed_from_sizes_and_constants_sees_no_values(tmp_path: Path) -> None:
    nodes = read_nodes(onnx_models.resized(tmp_path / "model.onnx"))
    assert [node.name for node in nodes] == ["shape", "slice", "concat", "resize"]
    assert [node.sees_values for node in nodes] == [False, False, False, True]
    nodes = read_nodes(onnx_models.shift(tmp_path / "model.onnx", 1.0))
    assert [(node.op_type, node.sees_values) for node in nodes] == [("Constant", False), ("Add", True)]


@pytest.mark.parametrize("file", sorted(DEMO_STORE.rglob("*.onnx")), ids=lambda path: path.name)
def test_a_whole_network_is_read_as_the_library_reads_it(file: Path) -> None:
    graph = onnx.load(file).graph
    assert [(one.name, one.op_type) for one in read_nodes(file)] == [(one.name, one.op_type) for one in graph.node]
    types = {weight.data_type for weight in graph.initializer}
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
    with pytest.raises(BundleError, match="is not an ONNX file"):
        read_nodes(path)
