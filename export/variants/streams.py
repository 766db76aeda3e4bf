"""Which channels of a graph share one scale, and which nodes write and read them.

Between convolutions the scale of a channel is arbitrary. It passes through homogeneous operators (additions, ReLU,
pools), channel by channel through concatenations, and along the product of SiLU, Hardswish and squeeze-and-excitation,
whose other factor is a sigmoid: a product in front of it restores the channel. ReLU6 is crossed with limits per
channel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from convoy.export.variants.onnx_graph import array, attribute, consumers, initializers, producers

# Scaling their input's channels by a positive factor scales their output by the same factor.
_TIES = frozenset({"Add", "Relu", "LeakyRelu", "MaxPool", "AveragePool", "GlobalAveragePool"})
# Their output is not in the channel's scale any more, and their input can be scaled back.
GATES = frozenset({"Sigmoid", "HardSigmoid"})
# These are exact with limits, or a sigmoid's input, per channel.
CROSSED = GATES | {"HardSwish", "Clip"}


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """Tensors [N, channels, ...] that share scales, and the nodes around them, by name.

    `places` says for each tensor which of the stream's `count` scales each of its channels has. Convolutions and
    products that write the stream are `writers`, those that read it `readers`; one that reads it and adds to it is in
    both. `crossings` must know the scales. Channels that are not `free` [count] keep their scale.
    """

    tensors: tuple[str, ...]
    writers: tuple[str, ...]
    readers: tuple[str, ...]
    crossings: tuple[str, ...]
    places: Mapping[str, np.ndarray]
    free: np.ndarray

    @property
    def count(self) -> int:
        return len(self.free)


def streams(graph: Any) -> tuple[Stream, ...]:
    """All streams of the graph with channels that may be scaled, in the graph's order."""
    if any(own.HasField("g") or own.graphs for node in graph.node for own in node.attribute):
        # Inner graphs read tensors without naming them as inputs.
        return ()
    return tuple(_Search(graph).found())


class _Search:
    """Every channel that a convolution writes has a number; those that must share a scale are joined."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._makers = producers(graph)
        self._weights = own_weights(graph)
        self._constants = initializers(graph)
        self._channels: dict[str, np.ndarray] = {}
        self._flat: set[str] = set()
        self._count = 0
        self._pairs: list[np.ndarray] = []
        self._crossings: list[Any] = []
        self._fixed: list[int] = []

    def found(self) -> Iterator[Stream]:
        writers, readers = [], []
        for node in self._graph.node:
            if is_scalable(node, self._weights):
                readers += [node] if self._reads(node) else []
                writers += [node] if self._writes(node) else []
            elif not self._joins(node):
                self._fix(*node.input, *node.output)
        self._fix(*(tensor.name for tensor in (*self._graph.input, *self._graph.output)))
        yield from self._streams(writers, readers)

    def _writes(self, node: Any) -> bool:
        if node.op_type != "Conv":
            return False
        start, self._count = self._count, self._count + self._weights[node.input[1]].dims[0]
        self._channels[node.output[0]] = np.arange(start, self._count)
        return True

    def _reads(self, node: Any) -> bool:
        """A classifier behind a pool or a flattened map reads each channel once or several times in a row."""
        channels = self._channels.get(node.input[0])
        if channels is None:
            return False
        inputs = input_channels(node, self._weights)
        if inputs % len(channels) == 0 and (node.op_type == "Gemm" or inputs == len(channels)):
            return True
        self._fix(node.input[0])
        return False

    def _joins(self, node: Any) -> bool:
        """Whether the node's output has the scales of its input, or they can be handled."""
        if node.domain or len(node.output) != 1:
            return False
        given = [self._channels.get(name) for name in node.input]
        if node.op_type in CROSSED and node.input[0] in self._flat:
            return False
        if node.op_type in GATES:
            if given[0] is not None:
                self._crossings.append(node)
            return True
        if node.op_type == "Mul":
            return self._is_gated(node)
        if node.op_type in ("Clip", "HardSwish"):
            if given[0] is None or (node.op_type == "Clip" and not self._is_relu6(node)):
                return False
            self._crossings.append(node)
            self._channels[node.output[0]] = given[0]
            return True
        if node.op_type == "Concat" and attribute(node, "axis", 0) == 1:
            known = [one for one in given if one is not None]
            if len(known) < len(given):
                return False
            self._channels[node.output[0]] = np.concatenate(known)
            return True
        if self._flattens(node):
            self._flat.add(node.output[0])
            given = given[:1]
        elif self._is_pool(node):
            given = given[:1]
        elif node.op_type not in _TIES:
            return False
        return self._ties(node.output[0], given)

    def _flattens(self, node: Any) -> bool:
        """Whether it turns [N, channels, ...] into [N, channels * ...]."""
        if node.op_type == "Reshape" and node.input[1] in self._constants:
            shape = array(self._constants[node.input[1]]).tolist()
            return len(shape) == 2 and -1 in shape and (0 not in shape or attribute(node, "allowzero", 0) == 0)
        return node.op_type == "Flatten" and bool(attribute(node, "axis", 1) == 1)

    def _is_pool(self, node: Any) -> bool:
        """A mean over height and width, as newer exporters write a global pool."""
        if node.op_type != "ReduceMean" or not attribute(node, "keepdims", 1):
            return False
        axes = self._constants.get(node.input[1]) if len(node.input) > 1 else None
        found = array(axes).tolist() if axes is not None else attribute(node, "axes", [])
        return sorted(found) in ([2, 3], [-2, -1])

    def _ties(self, output: str, given: list[np.ndarray | None]) -> bool:
        first, *others = given
        if first is None or any(other is None or len(other) != len(first) for other in others):
            return False
        for other in others:
            assert other is not None
            self._pairs.append(np.stack([first, other]))
        self._channels[output] = first
        return True

    def _is_gated(self, node: Any) -> bool:
        """A product of channels and a sigmoid's output, per pixel or for the whole channel."""
        gates = [name for name in node.input if name in self._makers and self._makers[name].op_type in GATES]
        values = [name for name in node.input if name not in gates]
        if len(gates) != 1 or len(values) != 1 or values[0] not in self._channels:
            return False
        source = self._channels.get(self._makers[gates[0]].input[0])
        if source is None or len(source) != len(self._channels[values[0]]):
            return False
        self._channels[node.output[0]] = self._channels[values[0]]
        return True

    def _is_relu6(self, node: Any) -> bool:
        limits = [self._constants.get(name) for name in node.input[1:]]
        return len(limits) == 2 and all(limit is not None for limit in limits) and not array(limits[0]).any()

    def _fix(self, *names: str) -> None:
        for name in names:
            self._fixed += self._channels.get(name, np.zeros(0, int)).tolist()

    def _streams(self, writers: list[Any], readers: list[Any]) -> Iterator[Stream]:
        roots = _joined(self._count, self._pairs)
        ends = np.zeros((2, len(roots)), bool)
        for end, nodes in zip(ends, (writers, readers), strict=True):
            for node in nodes:
                name = node.output[0] if nodes is writers else node.input[0]
                end[roots[self._channels[name]]] = True
        free: np.ndarray = np.logical_and(*ends)
        free[roots[self._fixed]] = False
        for names in self._grouped(roots):
            of_stream = np.unique(np.concatenate([roots[self._channels[name]] for name in names]))
            if not free[of_stream].any():
                continue
            inside = set(names)
            yield Stream(
                tuple(names),
                tuple(node.name for node in writers if node.output[0] in inside),
                tuple(node.name for node in readers if node.input[0] in inside),
                tuple(node.name for node in self._crossings if node.input[0] in inside),
                {name: np.searchsorted(of_stream, roots[self._channels[name]]) for name in names},
                free[of_stream],
            )

    def _grouped(self, roots: np.ndarray) -> list[list[str]]:
        """The tensors that share a channel with each other, directly or not."""
        chains = [np.stack([roots[some[:-1]], roots[some[1:]]]) for some in self._channels.values()]
        whole, found = _joined(self._count, chains), defaultdict(list)
        for name, channels in self._channels.items():
            found[whole[roots[channels[0]]]].append(name)
        return list(found.values())


def _joined(count: int, pairs: list[np.ndarray]) -> np.ndarray:
    """The group of each number; each of `pairs` [2, n] belongs together."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    rows, columns = np.concatenate([np.zeros((2, 0), int), *pairs], axis=1)
    links = coo_matrix((np.ones(len(rows), bool), (rows, columns)), shape=(count, count))
    groups: np.ndarray = connected_components(links, directed=False)[1] if count else np.zeros(0, int)
    return groups


def own_weights(graph: Any) -> dict[str, Any]:
    """The fp32 constants that only one node reads, once, so that changing one changes nothing else."""
    given = {tensor.name for tensor in (*graph.input, *graph.output)}
    readers = consumers(graph)
    return {
        name: tensor
        for name, tensor in initializers(graph).items()
        if tensor.data_type == tensor.FLOAT and name not in given and len(readers[name]) == 1
    }


def is_scalable(node: Any, weights: Mapping[str, Any]) -> bool:
    """Whether the node's weights are its own, so that scales can go into them."""
    if node.domain or node.op_type not in ("Conv", "Gemm"):
        return False
    if node.op_type == "Gemm":
        return node.input[1] in weights and not attribute(node, "transA", 0)
    return all(name in weights for name in node.input[1:] if name)


def input_channels(node: Any, weights: Mapping[str, Any]) -> int:
    """How many channels a layer's weights read, in all groups together; for a flattened map, a classifier's columns."""
    dims = weights[node.input[1]].dims
    if node.op_type == "Gemm":
        return int(dims[1 if attribute(node, "transB", 0) else 0])
    return int(dims[1]) * int(attribute(node, "group", 1))
