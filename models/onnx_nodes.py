"""Which nodes of an ONNX graph compute only with sizes, and which with clients' values.

Reads just enough of the file's protobuf to follow names from node to node, without the onnx library and without reading
weights. Of operators, only Shape and Size are known to ignore values.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from convoy.models.errors import BundleError
from convoy.models.onnx_wire import fields

_Found = TypeVar("_Found")

# Operators whose output depends only on the sizes of their input.
SIZE_READERS = ("Shape", "Size")
_GRAPH = 7  # of ModelProto
_NODE, _INPUT, _INITIALIZER = 1, 11, 5  # of GraphProto
_NODE_INPUT, _NODE_OUTPUT, _NODE_NAME, _NODE_OP = 1, 2, 3, 4  # of NodeProto
_VALUE_NAME, _TENSOR_NAME, _TENSOR_TYPE = 1, 8, 2  # of ValueInfoProto and TensorProto
_HALVES = (10, 16)  # TensorProto.FLOAT16, BFLOAT16


@dataclass(frozen=True, slots=True)
class Node:
    """One node. `sees_values` means that its outputs depend on clients' values, and not only on sizes."""

    name: str
    op_type: str
    sees_values: bool


@dataclass(slots=True)
class _RawNode:
    name: str = ""
    op_type: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)


def read_nodes(path: Path) -> tuple[Node, ...]:
    """The nodes of the main graph in the file's order. Raises BundleError if it is not an ONNX file, OSError."""
    return _read(path, _nodes)


def has_half_weights(path: Path) -> bool:
    """Whether some weight has 16 bits, so that the file computes in them. Raises BundleError, OSError."""
    return _read(path, _has_halves)


def _read(path: Path, read: Callable[[mmap.mmap], _Found]) -> _Found:
    with path.open("rb") as handle:
        if path.stat().st_size == 0:
            raise BundleError(f"{path}: is empty")
        with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return read(data)
            except (IndexError, UnicodeDecodeError, ValueError) as error:
                raise BundleError(f"{path}: is not an ONNX file ({error})") from error


def _nodes(data: mmap.mmap) -> tuple[Node, ...]:
    nodes: list[_RawNode] = []
    inputs: set[str] = set()
    constants: set[str] = set()
    for part, first, last in _graph(data):
        if part == _NODE:
            nodes.append(_node(data, first, last))
        elif part == _INPUT:
            inputs.add(_named(data, first, last, _VALUE_NAME))
        elif part == _INITIALIZER:
            constants.add(_named(data, first, last, _TENSOR_NAME))
    seen, judged = inputs - constants, []
    for node in nodes:  # nodes are in topological order
        sees = node.op_type not in SIZE_READERS and any(name in seen for name in node.inputs)
        if sees:
            seen.update(node.outputs)
        judged.append(Node(node.name, node.op_type, sees))
    return tuple(judged)


def _has_halves(data: mmap.mmap) -> bool:
    for part, first, last in _graph(data):
        if part == _INITIALIZER:
            numbers: dict[int, int] = {}
            for _ in fields(data, first, last, numbers):
                pass
            if numbers.get(_TENSOR_TYPE) in _HALVES:
                return True
    return False


def _graph(data: mmap.mmap) -> Iterator[tuple[int, int, int]]:
    for number, start, end in fields(data, 0, len(data)):
        if number == _GRAPH:
            yield from fields(data, start, end)


def _node(data: mmap.mmap, start: int, end: int) -> _RawNode:
    node = _RawNode()
    for number, first, last in fields(data, start, end):
        if number == _NODE_INPUT:
            node.inputs.append(data[first:last].decode())
        elif number == _NODE_OUTPUT:
            node.outputs.append(data[first:last].decode())
        elif number == _NODE_NAME:
            node.name = data[first:last].decode()
        elif number == _NODE_OP:
            node.op_type = data[first:last].decode()
    return node


def _named(data: mmap.mmap, start: int, end: int, wanted: int) -> str:
    return next((data[first:last].decode() for number, first, last in fields(data, start, end) if number == wanted), "")
